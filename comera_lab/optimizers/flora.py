"""Flora: Adafactor whose first moment lives in a random projection that a seed brings back (Hao and others 2024).

arXiv 2402.03293. With u the Adafactor update of a matrix (rows, cols), rows >= cols, and A (cols, rank) of normal
numbers with variance 1 / rank, so that A A' is the identity in the mean:

    m <- b1 m + (1 - b1) u A          applied: (1 - b1) u + b1 m A'
    every `resample_interval` steps a new A, and m <- (m A_old') A_new

A is made again from its seed in every step, so it takes no memory between steps. Left out: Flora's compressed gradient
accumulation, and its rule that skips long matrices such as embeddings: give those a group with rank None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from comera_lab.optimizers import checks
from comera_lab.optimizers.adafactor import adafactor_direction
from comera_lab.optimizers.coap import PLAIN_UP_TO
from comera_lab.optimizers.eager import EagerOptimizer
from comera_lab.optimizers.projection import oriented, projected_rank
from comera_lab.optimizers.report import OptimizerReport, OptimizerRow
from comera_lab.shapes import ShapeError


class Flora(EagerOptimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) with Flora's first moment.

    rank, rank_ratio   of the first moment of matrices with more than `plain_up_to` elements; a convolution is taken as
                       the matrix (out, in * window). Others keep a whole first moment
    beta1              None keeps no first moment: plain Adafactor, nothing to project
    decay_rate         the second moment forgets with 1 - step ** -decay_rate
    eps, floor         added to squared gradients; least RMS of a weight, which multiplies the rate (`scale_parameter`)
    clip               an update with a larger RMS is shortened to it

    State, all float32: "step", "row_mean_sq" and "col_mean_sq" or "exp_avg_sq", "exp_avg", and the number "seed".
    `foreach` and half-precision state are not there. Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        beta1: float | None = 0.9,
        weight_decay: float = 0.0,
        *,
        rank: int | None = None,
        rank_ratio: float | None = 4.0,
        resample_interval: int = 1000,
        decay_rate: float = 0.8,
        eps: float = 1e-30,
        floor: float = 1e-3,
        clip: float = 1.0,
        scale_parameter: bool = True,
        plain_up_to: int = PLAIN_UP_TO,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "beta1": beta1, "weight_decay": weight_decay, "rank": rank, "rank_ratio": rank_ratio,
            "resample_interval": resample_interval, "decay_rate": decay_rate, "eps": eps, "floor": floor, "clip": clip,
            "scale_parameter": scale_parameter, "plain_up_to": plain_up_to, "seed": seed, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults)
        if beta1 is not None:  # without a first moment nothing is projected, and nothing has to be
            self.refuse_idle_projection()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its own settings win over the defaults. The caller's dict stays as it is."""
        _check_own_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def update(self) -> None:
        """`step` without closure and hooks."""
        due = [entry for entry in self._parameters() if entry[0].grad is not None]
        gradients = [parameter.grad for parameter, _, _, _ in due if parameter.grad is not None]
        for gradient, (_, _, name, _) in zip(gradients, due, strict=True):
            checks.check_gradient(gradient, name)
        checks.refuse_nonfinite(gradients, lambda number: due[number][2])
        for gradient, (parameter, group, _, number) in zip(gradients, due, strict=True):
            state = self.state[parameter]
            if not state:
                state.update(_fresh_state(parameter, group, number))
            _update(parameter, -gradient if group["maximize"] else gradient, group, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, in float32. Raises ShapeError, with nothing changed, where it does not fit."""
        mine = list(self._parameters())
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(saved) == len(mine):  # else torch's own message follows
            for key, (parameter, _, name, _) in zip(saved, mine, strict=True):
                _check_loaded(parameter, state_dict["state"].get(key, {}), name)
        super().load_state_dict(state_dict)
        for key, (parameter, _, _, _) in zip(saved, self._parameters(), strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and name != "step":  # torch would cast it to the parameter's dtype
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def report(self) -> OptimizerReport:
        """Name, shape, rank, side and state bytes of every parameter: as it is, or as its first step will make it."""
        rows = []
        for parameter, group, name, number in self._parameters():
            state = self.state.get(parameter) or _fresh_state(parameter.to("meta"), group, number)
            rank = _rank(tuple(parameter.shape), group)
            used = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
            side = None if rank is None else "columns" if _is_tall(parameter) else "rows"
            rows.append(OptimizerRow(name, tuple(parameter.shape), None if rank is None else (rank,), side, used))
        return OptimizerReport(tuple(rows))

    def _parameters(self) -> Iterator[tuple[Tensor, dict[str, Any], str, int]]:
        number = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                yield parameter, group, names[place] if names else f"parameter {number}", number
                number += 1


def random_projection(cols: int, rank: int, seed: int, device: torch.device) -> Tensor:
    """A (cols, rank) of normal numbers with variance 1 / rank; one seed gives one A on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(cols, rank, generator=generator, device=device) / math.sqrt(rank)


def _update(parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    state["step"] += 1
    direction = adafactor_direction(gradient.float(), state, group)
    if group["beta1"] is not None:
        direction = _with_momentum(direction, group, state)
    rate = float(group["lr"])
    change = rate * direction
    if group["scale_parameter"]:
        change *= _rms(parameter.float()).clamp_min(group["floor"])
    parameter.copy_(parameter.float() * (1 - rate * group["weight_decay"]) - change)


def _with_momentum(update: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> Tensor:
    """The update mixed with the lifted first moment; a plain first moment replaces it, as in Adafactor."""
    beta1, moment = group["beta1"], state["exp_avg"]
    if "seed" not in state:
        mean: Tensor = moment.lerp_(update, 1 - beta1)
        return mean.clone()
    flat = oriented(update.flatten(1))  # (rows, cols)
    cols, rank = flat.shape[1], moment.shape[1]
    basis = random_projection(cols, rank, state["seed"], update.device)
    made = int(state["step"])
    if made > 1 and (made - 1) % group["resample_interval"] == 0:
        state["seed"] = _next_seed(state["seed"])
        fresh = random_projection(cols, rank, state["seed"], update.device)
        moment.copy_(moment @ (basis.mT @ fresh))
        basis = fresh
    moment.lerp_(flat @ basis, 1 - beta1)
    mixed: Tensor = (1 - beta1) * flat + beta1 * moment @ basis.mT
    return (mixed if _is_tall(update) else mixed.mT).reshape(update.shape)


def _is_tall(tensor: Tensor) -> bool:
    return tensor.shape[0] >= tensor[0].numel()


def _rank(shape: tuple[int, ...], group: Mapping[str, Any]) -> int | None:
    if group["beta1"] is None or len(shape) not in (2, 4) or math.prod(shape) <= group["plain_up_to"]:
        return None
    return projected_rank((shape[0], math.prod(shape[1:])), group["rank"], group["rank_ratio"])


def _fresh_state(parameter: Tensor, group: Mapping[str, Any], number: int) -> dict[str, Any]:
    shape = tuple(parameter.shape)
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}

    def zeros(*sizes: int) -> Tensor:
        return parameter.new_zeros(sizes, dtype=torch.float32)

    if len(shape) < 2:
        state["exp_avg_sq"] = zeros(*shape)
    else:
        state["row_mean_sq"], state["col_mean_sq"] = zeros(*shape[:-1], 1), zeros(*shape[:-2], 1, shape[-1])
    rank = _rank(shape, group)
    if rank is not None:
        state["exp_avg"] = zeros(max(shape[0], math.prod(shape[1:])), rank)
        state["seed"] = _next_seed(group["seed"] + 7919 * number)
    elif group["beta1"] is not None:
        state["exp_avg"] = zeros(*shape)
    return state


def _next_seed(seed: int) -> int:
    """The seed that follows, well mixed (multiplier of a 63-bit linear congruence, Knuth)."""
    return (6364136223846793005 * seed + 1442695040888963407) % 2**63


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()


def _check_loaded(parameter: Tensor, state: Mapping[str, Any], name: str) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor) or key == "step":
            continue
        shape = tuple(parameter.shape)
        rows = max(shape[0], math.prod(shape[1:])) if len(shape) > 1 else 0
        want = {
            "exp_avg_sq": shape,
            "row_mean_sq": (*shape[:-1], 1),
            "col_mean_sq": (*shape[:-2], 1, *shape[-1:]),
            "exp_avg": (rows, value.shape[-1]) if "seed" in state else shape,
        }.get(key)
        if tuple(value.shape) != want:
            raise ShapeError(
                f"state {key!r} of {name} must have the shape {want} to fit its parameter, got {tuple(value.shape)}. "
                "Load the state of a model with the same shapes; the optimizer is as it was."
            )


def _check_own_settings(settings: Mapping[str, Any]) -> None:
    interval = settings["resample_interval"]
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ValueError(f"resample_interval must be a whole number of at least 1, got {interval!r}. Flora takes 1000.")
    for name, advice in (("decay_rate", "0.8"), ("floor", "1e-3"), ("clip", "1.0")):
        if not (settings[name] > 0 and math.isfinite(settings[name])):
            raise ValueError(f"{name} must be above 0, got {settings[name]!r}. Adafactor takes {advice}.")
    if isinstance(settings["seed"], bool) or not isinstance(settings["seed"], int) or settings["seed"] < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {settings['seed']!r}.")
