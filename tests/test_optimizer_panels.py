"""Panels of the optimizer lessons: a basis that follows real gradients, and a race whose verdict needs three seeds."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

import comera_lab.panels as lab
from comera_lab.memory import mib
from comera_lab.models.mlp import MLP
from comera_lab.optimizers import make_optimizer
from comera_lab.optimizers.projection import captured_energy, svd_basis
from comera_lab.panels.optimizer_figures import TRACES_A_LANE
from comera_lab.panels.optimizer_lanes import LANES, SEEDS, OptimizerLane, RaceSettings, band_of
from comera_lab.panels.optimizer_race import FIRST_LANES, LOCKED, _against
from comera_lab.panels.projection_figures import FLOOR_DEGREES
from comera_lab.panels.projection_run import (
    ALIGNED,
    COLS,
    FEATURES,
    FULL_SVD,
    OPTIMIZER_OF,
    PUBLISHED,
    RANDOM,
    REFRESH,
    TAPE_STEPS,
    ProjectionSettings,
    Replay,
    Tape,
    digits_tape,
    network_bytes,
)
from comera_lab.panels.state import PROJECTION_METHODS, LabState

SETTINGS = {
    "projection_method": FULL_SVD, "projection_rank": 4, "update_interval": 20, "refresh_factor": 3,
    "gradient_precision": "fp32",
}  # fmt: skip


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def replayed(tape: Tape, **values) -> Replay:
    replay = Replay(ProjectionSettings(**{**SETTINGS, **values}), tape)
    while not replay.finished:
        replay.advance()
    return replay


# A basis on real gradients


def test_the_tape_holds_the_gradients_of_a_real_training():
    tape = digits_tape()
    assert tape.gradients.shape == (TAPE_STEPS, COLS, COLS)
    assert bool(torch.isfinite(tape.gradients).all()) and float(tape.gradients[0].norm()) > 0
    gradient, best = tape.gradients[40], tape.best[list(tape.best_steps).index(41)]
    for rank in (1, 8, COLS):
        want = float(captured_energy(gradient, svd_basis(gradient, rank)))
        assert best[rank - 1] == pytest.approx(want, abs=1e-4)
    assert (np.diff(tape.best, axis=1) > -1e-12).all(), "more directions never keep less"
    assert digits_tape() is tape, "recorded once"


def test_no_basis_keeps_more_than_the_best_one_and_a_random_one_keeps_its_share():
    tape = digits_tape()
    means = {}
    for method in PROJECTION_METHODS:
        replay = replayed(tape, projection_method=method, projection_rank=8)
        at_best = replay.energy["energy_percent"][tape.best_steps.astype(int) - 1]
        assert (at_best <= replay.best_percent + 0.01).all()
        means[method] = replay.mean_percent
    assert means[RANDOM] == pytest.approx(100 * 8 / COLS, abs=1.5)
    assert means[RANDOM] < means[REFRESH] <= means[ALIGNED] < means[FULL_SVD]


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        (RANDOM, ["random"] * 11),
        (FULL_SVD, ["svd"] * 11),
        (REFRESH, ["refresh"] * 3),
        (ALIGNED, ["alignment", "alignment", "refresh"] * 3 + ["alignment"] * 2),
    ],
)
def test_every_method_keeps_its_schedule(method, kinds):
    replay = replayed(digits_tape(), projection_method=method)
    assert [update.kind for update in replay.updates] == kinds
    if method != REFRESH:
        assert [update.step for update in replay.updates] == list(range(21, TAPE_STEPS, 20))
    assert all(update.moved and update.angle_degrees > 0 and update.time_ms > 0 for update in replay.updates)
    assert {kind for kind, _ in replay.times_ms()} == set(kinds)


def _alignments(tape: Tape, method: str, precision: str, scale: float = 1.0):
    scaled = Tape(scale * tape.gradients, tape.best_steps, tape.best)
    return replayed(scaled, projection_method=method, gradient_precision=precision).of_kind("alignment")


def test_the_published_alignment_leaves_every_bit_at_small_gradients_and_the_scale_free_one_does_not():
    tape = digits_tape()
    still = _alignments(tape, PUBLISHED, "bf16", 0.01)
    assert still and not any(update.moved for update in still)
    assert all(0 < update.angle_degrees < 0.01 for update in _alignments(tape, PUBLISHED, "fp32"))
    large, small = (_alignments(tape, ALIGNED, "bf16", scale) for scale in (1.0, 0.01))
    assert all(update.moved and update.angle_degrees > 0.5 for update in large + small)
    for one, other in zip(large, small, strict=True):
        assert one.angle_degrees == pytest.approx(other.angle_degrees, rel=0.1), "without a unit, scale is nothing"


@pytest.mark.parametrize("method", PROJECTION_METHODS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predicted_bytes_are_those_of_the_real_optimizer(method, precision):
    settings = ProjectionSettings(**{**SETTINGS, "projection_method": method, "gradient_precision": precision})
    model = MLP(FEATURES).to(settings.dtype)
    optimizer = make_optimizer(OPTIMIZER_OF[method], model.parameters(), 1e-3, rank=4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert settings.optimizer_bytes() == sum(value.nbytes for value in kept)


@pytest.fixture(scope="module")
def projection():
    """One replay by full SVD; read only."""
    panel = lab.ProjectionPanel(LabState(projection_rank=4))
    assert panel.run(wait=True)
    return panel


def test_a_replay_shows_energy_angles_bytes_and_milliseconds(projection):
    assert projection.runner.words == f"finished after {TAPE_STEPS} steps"
    figure = projection.curves.figure
    line = next(trace for trace in figure.data if trace.name == FULL_SVD and trace.mode == "lines")
    assert len(line.x) == TAPE_STEPS and max(line.y) <= 100
    assert figure.data[0].name == "best possible at rank 4"
    text = projection.table()
    for words in ("energy kept", "svd", "(measured here)", f"{mib(network_bytes('galore', 4)):.3f} (predicted)"):
        assert words in text and words in projection.numbers.value + projection.verdict.value
    assert projection.state.runs["projection"]["replays"][0]["projection_rank"] == 4


def test_the_results_of_other_methods_stay_and_another_rank_begins_anew():
    panel = lab.ProjectionPanel(LabState(projection_rank=4))
    for method in (FULL_SVD, RANDOM):
        panel.projection_method.value = method
        panel.run(wait=True)
    assert list(panel.replays) == [FULL_SVD, RANDOM]
    panel.projection_rank.value = 6
    assert "Press Start for the new setting" in panel.verdict.value
    assert list(panel.replays) == [FULL_SVD, RANDOM], "a slider throws nothing away"
    panel.run(wait=True)
    assert list(panel.replays) == [RANDOM]


def test_the_panel_says_whether_the_basis_moved():
    panel = lab.ProjectionPanel(LabState(projection_method=PUBLISHED, gradient_precision="bf16"))
    panel.run(wait=True)
    assert "left every bit" in panel.verdict.value or "moved not one bit" in panel.verdict.value
    angles = next(t for t in panel.curves.figure.data if t.name == PUBLISHED and t.mode == "markers")
    alignments = [y for y, text in zip(angles.y, angles.text, strict=True) if text == "moved not one bit"]
    assert len(alignments) >= 6 and set(alignments) == {FLOOR_DEGREES}
    panel.projection_method.value = ALIGNED
    panel.run(wait=True)
    assert "turned it by" in panel.verdict.value


def test_a_stopped_replay_stays_and_goes_on():
    digits_tape()
    panel = lab.ProjectionPanel(LabState(update_interval=1))
    panel.run()
    until(lambda: FULL_SVD in panel.replays and len(panel.replays[FULL_SVD].energy) > 3)
    panel.stop(wait=True)
    done = len(panel.replays[FULL_SVD].energy)
    assert 3 < done < TAPE_STEPS and panel.runner.state == "stopped"
    assert f"in the first {done} steps" in panel.verdict.value
    panel.resume(wait=True)
    assert len(panel.replays[FULL_SVD].energy) == TAPE_STEPS


def test_the_first_page_shows_bytes_and_later_ones_the_replay(projection):
    before = lab.ProjectionPanel.static(projection)
    assert before.layout.sliders[0].currentvalue.prefix == "step "
    fresh = lab.ProjectionPanel(LabState()).static()
    assert fresh.layout.sliders[0].currentvalue.prefix == "rank "
    assert math.isclose(fresh.data[0].x[1], mib(network_bytes("galore", 8)))


# The race of optimizers

QUICK = {"optimizer_steps": 20, "update_interval": 4, "refresh_factor": 2, "rank_ratio": 8.0}


@pytest.fixture(scope="module")
def raced():
    """All five optimizers, three seeds, twenty steps; read only."""
    panel = lab.OptimizerRacePanel(LabState(**QUICK))
    panel.lanes.value = tuple(LANES)
    assert panel.run(wait=True, seeds=3)
    return panel


def test_every_optimizer_trains_from_three_seeds_and_its_bytes_are_as_predicted(raced):
    assert set(raced.runs) == {(name, seed) for name in LANES for seed in SEEDS}
    for (name, _), lane in raced.runs.items():
        assert lane.finished and lane.trainer.steps_done == 20
        assert lane.measured_bytes == lane.settings.predicted_bytes(name), name
        assert type(lane.trainer.optimizer) is type(make_optimizer(name, [torch.ones(8, 8)], 1e-3, **_plain(name)))
    sizes = {name: raced.runs[name, 0].measured_bytes for name in LANES}
    assert sizes["coap-8bit"] < sizes["coap"] == sizes["galore"] < sizes["adamw"]


def _plain(name):
    return {} if name == "adamw" else {"rank_ratio": 2, "plain_up_to": 4}


def test_all_lanes_of_a_seed_begin_with_the_same_weights_and_see_the_same_batches():
    settings = RaceSettings(**{**QUICK, "optimizer_steps": 20})
    one, other = OptimizerLane("adamw", 1, settings), OptimizerLane("coap", 1, settings)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    one.advance(), other.advance()
    assert one.trainer.rows[0].loss_nats == other.trainer.rows[0].loss_nats


def test_one_seed_is_an_anecdote_and_three_give_a_verdict(raced):
    panel = lab.OptimizerRacePanel(LabState(**QUICK))
    assert panel.verdict.value == ""
    panel.run(wait=True)
    assert not panel.unlocked and LOCKED in panel.verdict.value and LOCKED in panel.table()
    for words in ("bands overlap", "test loss than adamw", "of AdamW"):
        assert words not in panel.verdict.value
    first = panel.runs["coap", 0]
    panel.seeds_button.click()
    panel.runner.join()
    assert panel.unlocked and panel.runs["coap", 0] is first, "a finished lane is kept"
    assert LOCKED not in panel.verdict.value and panel.verdict.value.count("% of AdamW") == 2
    panel.run(wait=True)
    assert not panel.unlocked, "another start is one seed again"
    assert raced.unlocked and raced.verdict.value.count("% of AdamW") == 4


def test_the_verdict_is_that_of_the_bands():
    low, high = [0.1, 0.2, 0.15], [0.3, 0.25, 0.4]
    assert "a lower test loss than adamw in all" in _against("coap", low, high)
    assert "a higher test loss than adamw in all" in _against("coap", high, low)
    for mine in ([0.1, 0.3, 0.2], [0.2, 0.2, 0.2]):
        assert "cannot tell them apart" in _against("coap", mine, low)


@pytest.mark.parametrize("axis", ["steps", "seconds", "bytes"])
def test_a_band_lies_between_the_seeds_on_every_axis(raced, axis):
    band = band_of("coap", raced._of("coap"), axis)
    middle, least, largest = band.loss_nats
    assert band.seeds == 3 and (least <= middle).all() and (middle <= largest).all()
    ends = [lane.tests["loss_nats"][-1] for lane in raced._of("coap")]
    assert (least[-1], largest[-1]) == (min(ends), max(ends))
    want = {
        "steps": [20.0], "seconds": [np.median([lane.trainer.elapsed_s for lane in raced._of("coap")])],
        "bytes": [mib(raced.runs["coap", 0].measured_bytes)],
    }  # fmt: skip
    assert band.x[-1:] == pytest.approx(want[axis])
    raced.axis.value = axis
    assert raced.card.text == "" and len(raced.curves.figure.data) == TRACES_A_LANE * len(LANES)
    raced.axis.value = "steps"


def test_stop_keeps_the_lanes_and_resume_ends_them():
    panel = lab.OptimizerRacePanel(LabState(**{**QUICK, "optimizer_steps": 400}))
    panel.bar.start.click()
    until(lambda: panel.runs and all(len(lane.tests) for lane in panel.runs.values()))
    panel.bar.stop.click()
    assert panel.runner.join(5.0)
    done = {key: lane.trainer.steps_done for key, lane in panel.runs.items()}
    assert all(0 < steps < 400 for steps in done.values()) and max(done.values()) - min(done.values()) <= 1
    assert "stopped at step" in panel.bar.status.value and LOCKED in panel.verdict.value
    assert panel.state.runs["optimizers"]["lanes"][0]["loss_nats"]
    panel.bar.resume.click()
    until(lambda: all(lane.trainer.steps_done > done[key] for key, lane in panel.runs.items()))
    panel.stop(wait=True)
    assert not panel.seeds_button.disabled


def test_settings_that_changed_since_the_race_are_named():
    panel = lab.OptimizerRacePanel(LabState(**QUICK))
    panel.run(wait=True)
    panel.rank_ratio.value = 2
    assert "This race had: adamw, galore, coap, rank ratio 8" in panel.verdict.value
    panel.rank_ratio.value = 8
    assert "This race had" not in panel.verdict.value
    panel.lanes.boxes["flora"].value = True
    assert "This race had" in panel.verdict.value and set(panel.runs) == {(name, 0) for name in FIRST_LANES}


def test_optimizers_are_ticked_and_adamw_stays():
    panel = lab.OptimizerRacePanel(LabState())
    for name in ("flora", "coap-8bit"):
        panel.lanes.boxes[name].value = True
    assert panel.lanes.value == tuple(LANES)
    panel.lanes.boxes["adamw"].value = False
    assert panel.lanes.value == tuple(LANES) and panel.lanes.boxes["adamw"].value is True
    assert "must be adamw and at least one of" in panel.lanes.message.value
    panel.lanes.boxes["flora"].value = False
    assert panel.lanes.message.value == "" and "flora" not in panel.table()
    for bad in ((), ("adamw",), ("coap",), ("adamw", "lion"), "adamw", True):
        with pytest.raises(ValueError, match="must be adamw and at least one of"):
            panel.lanes.value = bad
    for box in panel.lanes.boxes.values():
        assert box.tooltip.endswith(".") and len(box.tooltip.split()) >= 4


def test_only_one_or_three_seeds():
    with pytest.raises(ValueError, match="seeds must be 1 or 3, got 2"):
        lab.OptimizerRacePanel(LabState()).run(seeds=2)


def test_the_twins_of_the_race(raced):
    assert raced.static().layout.sliders[0].currentvalue.prefix == "step "
    assert len(raced.static().to_json()) < 400_000
    text = raced.table()
    for name in LANES:
        assert f"{mib(raced.runs[name, 0].measured_bytes):.3f}" in text
    assert " to " in text, "least and largest of the seeds"
