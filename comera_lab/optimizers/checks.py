"""What optimizers refuse, in words: settings, parameters, gradients, loaded state. Nothing is changed in here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from comera_lab.optimizers.quantized import BLOCK
from comera_lab.optimizers.sharding import is_sharded
from comera_lab.optimizers.subspaces import subspace_of
from comera_lab.shapes import ShapeError

# Keys that torch's own schedulers and loaders put into groups
_FOREIGN_KEYS = frozenset({"params", "param_names", "name", "initial_lr", "max_lr", "min_lr"})


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(least: float, below: float = math.inf, *, open_end: bool = False) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return least <= value < below and not (open_end and value == least)

    return fits


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one) for one in values)


def _is_rate(value: Any) -> bool:
    # a tensor is taken at its word: reading it would wait for its device
    return (isinstance(value, Tensor) and value.numel() == 1) or _number(0)(value)


def _are_betas(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(_number(0, 1)(beta) for beta in value)


_FLAG = _one_of(True, False)
# setting -> (test, rule, remedy)
_RULES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "lr": (_is_rate, "at least 0", "Try 1e-3."),
    "betas": (_are_betas, "two numbers in [0, 1)", "AdamW takes (0.9, 0.999)."),
    "beta1": (_or_none(_number(0, 1)), "None or in [0, 1)", "None keeps no first moment."),
    "decay_rate": (_number(0, open_end=True), "above 0", "Adafactor takes 0.8."),
    "clip": (_number(0, open_end=True), "above 0", "Adafactor takes 1.0."),
    "floor": (_number(0), "at least 0", "Adafactor takes 1e-3."),
    "scale_parameter": (_FLAG, "True or False", "False takes the rate as it is."),
    "eps": (_number(0), "at least 0", "AdamW takes 1e-8."),
    "weight_decay": (_number(0), "at least 0", "Use 0.0 for none."),
    "rank": (_or_none(_whole(1)), "None or a whole number of at least 1", "Use None to go by rank_ratio."),
    "rank_ratio": (_or_none(_number(1)), "None or at least 1", "4 keeps a quarter of the smaller side."),
    "update_interval": (_whole(1), "a whole number of at least 1", "COAP takes 32."),
    "refresh_factor": (_whole(1), "a whole number of at least 1", "COAP takes 5."),
    "scale": (_number(0, open_end=True), "above 0", "1.0 leaves the update as it is."),
    "alignment": (_one_of("scale-free", "paper", None), "'scale-free', 'paper' or None", "None only refreshes."),
    "refresh": (_one_of("warm", "svd"), "'warm' or 'svd'", "'warm' is COAP's."),
    "stagger": (_FLAG, "True or False", "True spreads refreshes over the steps."),
    "transfer_moments": (_FLAG, "True or False", "False reuses moments as they are."),
    "bits": (_one_of(32, 8), "32 or 8", "8 keeps moments as codes of one byte."),
    "plain_up_to": (_whole(0), "a whole number of at least 0", "Use 0 to project every matrix."),
    "foreach": (_one_of(True, False, None), "True, False or None", "None picks by size and device."),
    "maximize": (_FLAG, "True or False", "False minimises."),
    "stochastic_rounding": (_FLAG, "True or False", "It matters for half-precision weights alone."),
    "state_dtype": (
        _one_of(None, torch.float32, torch.float64, torch.bfloat16, torch.float16),
        "None or a floating dtype",
        "None is float32 for projected moments, the parameter's own for others.",
    ),
}


def check_settings(settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse unknown keys and values out of range. `known` are the optimizer's defaults."""
    unknown = settings.keys() - known.keys() - _FOREIGN_KEYS
    if unknown:
        raise ValueError(
            f"a parameter group may set {', '.join(sorted(known))}, got {', '.join(sorted(map(repr, unknown)))}. "
            "Correct or drop it."
        )
    for name, (fits, rule, remedy) in _RULES.items():
        if name in settings and not fits(settings[name]):
            raise ValueError(f"{name} must be {rule}, got {settings[name]!r}. {remedy}")


def checked_group(param_group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group, its parameters in a list, after settings and parameters have been checked."""
    group = dict(param_group)
    check_settings({**defaults, **group}, defaults)
    if not isinstance(group["params"], Tensor | set):
        group["params"] = list(group["params"])
        for number, item in enumerate(group["params"]):
            named = isinstance(item, tuple)
            check_parameter(item[1] if named else item, repr(item[0]) if named else f"parameter {number}")
    return group


def check_parameter(parameter: object, name: str) -> None:
    """Refuse what cannot be projected or stepped: integers, complex numbers, sparse tensors."""
    if not isinstance(parameter, Tensor):
        return  # torch's own message follows
    if not parameter.is_floating_point():
        raise ValueError(
            f"parameters must be real floating-point tensors, got {name} of {parameter.dtype}. "
            "Leave it out, or train its real and imaginary parts."
        )
    if parameter.layout != torch.strided:
        raise ValueError(f"parameters must be dense, got {name} of layout {parameter.layout}. Leave it out.")


def refuse_capture() -> None:
    """Raises RuntimeError while a CUDA graph is being captured: it would replay what this one step decided."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step() decides in Python which bases are due and cannot be captured in a CUDA graph, got a call during a "
            "capture. Use comera_lab.experiments.graphs.GraphedStep, which keeps that outside the graph."
        )


def check_gradient(gradient: Tensor, name: str) -> None:
    """Refuse a sparse gradient."""
    if gradient.layout != torch.strided:
        raise ValueError(
            f"gradients must be dense, got a sparse one for {name}. Use sparse=False in its embedding, or give that "
            "parameter to torch.optim.SparseAdam."
        )


def check_parts(group: Mapping[str, Any], optimizer: str, *, splits: bool) -> None:
    """Refuse DTensors where an optimizer, or its 8-bit moments, need the whole parameter."""
    if splits and group.get("bits") != 8:
        return
    items = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    if not any(is_sharded(item[1] if isinstance(item, tuple) else item) for item in items):
        return
    what = "8-bit moments are" if splits else f"{optimizer} is"
    raise ValueError(
        f"{what} for parameters that a process holds whole, got one that is split over processes. "
        "Use DDP, or COAPAdamW, GaLoreAdamW or torch's AdamW in 32 bits."
    )


def refuse_nonfinite(
    tensors: Sequence[Tensor], name_of: Callable[[int], str], agree: Callable[[bool], bool] | None = None
) -> None:
    """Raise ValueError if some tensor holds NaN or Inf, naming the first few; one reduction, one wait per device.

    `agree` asks all processes that share the parameters, so that all of them raise.
    """
    bad = _nonfinite(tensors, name_of) if tensors else []
    elsewhere = agree is not None and agree(bool(bad)) and not bad
    if not bad and not elsewhere:
        return
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    where = "the part of another process" if elsewhere else ", ".join(bad[:3]) + more
    raise ValueError(
        f"gradients must be finite, got non-finite values (NaN or Inf) for {where}. Nothing was "
        "changed. Lower the learning rate, clip gradients, or let a GradScaler skip such steps."
    )


def _nonfinite(tensors: Sequence[Tensor], name_of: Callable[[int], str]) -> list[str]:
    # Euclidean, ten times as fast on a CPU as the largest magnitude; squares may overflow, hence the second look
    norms = [norm.float() for norm in torch._foreach_norm(list(tensors))]
    by_device: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm)
    if all(bool(torch.stack(some).isfinite().all()) for some in by_device.values()):
        return []
    return [name_of(number) for number, tensor in enumerate(tensors) if not bool(tensor.isfinite().all())]


def check_state(parameter: Tensor, state: Mapping[str, Any], name: str) -> None:
    """Refuse loaded state that does not fit its parameter, before anything is changed."""
    subspace = subspace_of(state)
    shape = tuple(parameter.shape)
    low = shape
    if subspace is not None:
        ranks = tuple(int(state[key].shape[-1]) for key in subspace.keys if key in state)
        if len(ranks) != len(subspace.keys):
            raise ValueError(f"the state of {name} must hold {subspace.keys}, got {sorted(state)}. Load a whole state.")
        for key, want in zip(subspace.keys, subspace.basis_shapes(shape, ranks), strict=True):
            _expect(name, key, tuple(state[key].shape), want)
        low = subspace.low_shape(shape, ranks)
    count = math.prod(low)
    for key in ("exp_avg", "exp_avg_sq"):
        if key in state:
            _expect(name, key, tuple(state[key].shape), low)
        if f"{key}_codes" in state:
            _expect(name, f"{key}_codes", tuple(state[f"{key}_codes"].shape), (count,))
            _expect(name, f"{key}_scales", tuple(state[f"{key}_scales"].shape), (-(-count // BLOCK),))


def _expect(name: str, key: str, got: tuple[int, ...], want: tuple[int, ...]) -> None:
    if got != want:
        raise ShapeError(
            f"state {key!r} of {name} must have the shape {want} to fit its parameter, got {got}. Load the state of a "
            "model with the same shapes; the optimizer is as it was."
        )
