"""The worker thread: states, Stop, Resume, refusals, failures, late results, interrupts."""

from __future__ import annotations

import _thread
import threading
import time

import pytest

from comera_lab.panels.live import MAX_POINTS, History, Pace, Throttle
from comera_lab.panels.runner import STATES, Failure, Progress, Runner


def counting(steps, pause_s=0.0, log=None):
    """A job of `steps` steps."""

    def job():
        for step in range(1, steps + 1):
            time.sleep(pause_s)
            if log is not None:
                log.append(step)
            yield Progress(step, step / steps)

    return job


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("comera-lab-")]


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.002)


def test_states_in_words_from_idle_to_finished():
    seen = []
    runner = Runner("words", on_change=lambda r: seen.append(r.words))
    assert (runner.state, runner.words) == ("idle", "idle")
    assert runner.start(counting(3), wait=True)
    assert seen == ["starting", "finished after 3 steps"]
    assert runner.state in STATES
    until(lambda: not workers())


def test_running_says_how_far():
    runner = Runner("percent")
    runner.state, runner.progress = "running", Progress(34, 0.34)
    assert runner.words == "running 34 %"


def test_stop_keeps_results_and_resume_goes_on_without_a_gap():
    log = []
    runner = Runner("stop", on_item=lambda progress: None)
    runner.start(counting(10_000, 0.001, log))
    until(lambda: len(log) > 5)
    runner.stop(wait=True)
    stopped_at = runner.progress.step
    assert (runner.state, runner.words) == ("stopped", f"stopped at step {stopped_at:,}")
    assert log == list(range(1, stopped_at + 1))
    assert runner.resume()
    until(lambda: len(log) > stopped_at + 5)
    runner.stop(wait=True)
    assert log == list(range(1, runner.progress.step + 1))


def test_stop_answers_in_under_one_step():
    runner = Runner("one-step")
    runner.start(counting(100, 0.2))
    until(lambda: runner.progress.step >= 1)
    pressed = time.monotonic()
    runner.stop()
    assert runner.words == "stopping"
    assert runner.join(1.0)
    assert time.monotonic() - pressed < 1.0
    assert runner.progress.step == 2, "the step in progress was finished, and no other begun"


def test_stop_before_anything_and_resume_of_nothing_are_harmless():
    runner = Runner("nothing")
    runner.stop(wait=True)
    assert runner.state == "idle"
    assert not runner.resume()
    assert "no stopped run" in runner.refusal


def test_a_finished_run_cannot_be_resumed():
    runner = Runner("finished")
    runner.start(counting(2), wait=True)
    assert not runner.can_resume
    assert not runner.resume()


def test_J05_a_second_start_is_refused_and_one_thread_works():
    log = []
    runner = Runner("double")
    assert runner.start(counting(30, 0.002, log))
    time.sleep(0.05)
    assert not runner.start(counting(30, 0.002, log))
    assert "Press Stop first" in runner.refusal
    assert len(workers()) <= 1
    runner.join()
    assert log == list(range(1, 31))


def test_J05_a_second_start_while_data_is_loading_is_refused():
    loaded = threading.Event()

    def loading():
        loaded.wait(5)
        yield Progress(1, 1.0)

    runner = Runner("loading")
    assert runner.start(loading)
    assert runner.words == "starting"
    assert not runner.start(loading)
    loaded.set()
    runner.join()
    assert runner.state == "finished"


def test_J05_a_start_after_an_error_works():
    def broken():
        yield Progress(1, 0.5)
        raise RuntimeError("boom")

    runner = Runner("error")
    runner.start(broken, wait=True)
    assert runner.words == "failed after 1 steps"
    assert not runner.can_resume
    assert runner.start(counting(3), wait=True)
    assert (runner.state, runner.failure) == ("finished", None)


def test_one_worker_in_the_whole_process():
    first, second = Runner("first"), Runner("second")
    first.start(counting(10_000, 0.001))
    began = time.monotonic()
    assert not second.start(counting(1))
    assert time.monotonic() - began > 1.0, "it waits a moment for a panel that is just ending"
    assert "first panel is training" in second.refusal
    first.stop(wait=True)
    assert second.start(counting(1), wait=True)


def test_J03_a_failure_has_one_line_and_a_traceback():
    def broken():
        raise ValueError("rank must be at least 1, got 0. Choose 1.")
        yield

    runner = Runner("failure")
    runner.start(broken, wait=True)
    assert runner.state == "failed"
    assert runner.failure is not None
    assert runner.failure.summary == "rank must be at least 1, got 0. Choose 1."
    assert "in broken" in runner.failure.trace
    assert Failure.of(KeyError("x")).summary == "KeyError: 'x'"


def test_an_error_while_taking_in_a_result_fails_the_run():
    def refuse(progress):
        raise RuntimeError("cannot draw")

    runner = Runner("consumer", on_item=refuse)
    runner.start(counting(5), wait=True)
    assert runner.state == "failed"
    assert runner.failure.summary == "RuntimeError: cannot draw"
    assert Runner("after").start(counting(1), wait=True)


def test_late_results_of_a_closed_run_are_dropped():
    release, taken = threading.Event(), []

    def slow():
        release.wait(5)
        yield Progress(1, 1.0)

    old = Runner("old", on_item=taken.append)
    old.start(slow)
    old.close()
    release.set()
    assert old.join(2.0)
    assert taken == []
    assert old.state == "idle"
    assert Runner("new").start(counting(1), wait=True)


def test_start_waits_for_the_last_step_of_a_closed_run():
    old, new = Runner("closing"), Runner("opening")
    old.start(counting(100, 0.3))
    until(lambda: old.progress.step >= 1)
    old.close()
    assert new.start(counting(3), wait=True)
    assert new.state == "finished"


def test_J06_an_interrupt_ends_a_run_that_is_waited_for():
    log = []
    runner = Runner("interrupt")
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runner.start(counting(10_000, 0.001, log), wait=True)
    assert time.monotonic() - began < 2.2
    timer.join()
    assert runner.state == "stopped"
    assert runner.resume()
    runner.stop(wait=True)
    assert log == list(range(1, runner.progress.step + 1))


def test_changes_are_announced_in_order_and_the_last_one_from_the_worker():
    seen = []
    runner = Runner("order", on_change=lambda r: seen.append((r.state, threading.current_thread().name)))
    runner.start(counting(10_000, 0.001))
    until(lambda: runner.progress.step > 1)
    runner.stop(wait=True)
    assert [state for state, _ in seen] == ["running", "stopping", "stopped"]
    assert seen[-1][1] == "comera-lab-order"


# pace, throttle and history


def test_J01_forty_calls_in_a_second_of_slow_work_are_at_most_five():
    value, done = [0], []

    def draw():
        time.sleep(0.3)
        done.append(value[0])

    throttle = Throttle(draw)
    for number in range(1, 41):
        value[0] = number
        throttle()
        time.sleep(0.7 / 40)
    until(lambda: done and done[-1] == 40, 1.0)
    assert len(done) <= 5


def test_a_throttle_draws_at_once_and_never_twice_at_the_same_time():
    inside, worst, calls = [0], [0], [0]

    def draw():
        inside[0] += 1
        worst[0] = max(worst[0], inside[0])
        calls[0] += 1
        time.sleep(0.01)
        inside[0] -= 1

    throttle = Throttle(draw, per_second=50)
    throttle()
    assert calls[0] == 1
    threads = [threading.Thread(target=lambda: [throttle() for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: throttle._timer is None)
    assert worst[0] == 1
    assert calls[0] >= 2


def test_a_cancelled_throttle_draws_no_more():
    calls = []
    throttle = Throttle(lambda: calls.append(1), per_second=10)
    throttle()
    throttle()
    throttle.cancel()
    time.sleep(0.25)
    assert calls == [1]


def test_pace_limits_a_fast_loop():
    pace, due, began = Pace(20), 0, time.monotonic()
    while time.monotonic() - began < 0.5:
        due += pace.due()
    assert 1 <= due <= 11


def test_K03_history_keeps_everything_and_hands_out_a_bounded_sample():
    history = History("step", "loss")
    for step in range(100_000):
        history.add(step, 1 / (step + 1))
    assert len(history) == len(history["loss"]) == 100_000
    sample = history.sample("step")
    assert len(sample) == MAX_POINTS <= 2000
    assert (sample[0], sample[-1]) == (0, 99_999)
    assert (sample[1:] > sample[:-1]).all()


def test_a_short_history_is_handed_out_whole_and_as_a_copy():
    history = History("step", "loss")
    history.add(1, 0.5)
    sample = history.sample("loss")
    sample[0] = 9
    assert history["loss"].tolist() == [0.5]
