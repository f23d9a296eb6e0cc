"""Say how an answer differs from the right one, without giving the right one away."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

# Answers are float32 arithmetic in an order we do not choose: 1e-4 relative is some 100 times its rounding
# on these sizes, and far below any misconception.
RELATIVE_TOLERANCE = 1e-4


class Difference(NamedTuple):
    """`stage` is what went wrong first: "type", "shape" or "value"."""

    stage: str
    message: str


def is_number(value: Any) -> bool:
    """True for ints, floats, numpy numbers and tensors that hold one number; not for True and False."""
    if isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.ndim == 0 and not value.is_complex()
    return isinstance(value, int | float | np.integer | np.floating) or (
        isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf"
    )


def difference(got: Any, want: Any, tolerance: float = RELATIVE_TOLERANCE) -> Difference | None:
    """None when `got` is as good as `want`, else the first thing that differs: type, shape, then value."""
    if isinstance(want, str):
        return _text_difference(got, want)
    if is_number(want):
        return _number_difference(got, float(want), tolerance)
    if isinstance(want, torch.Tensor):
        return _tensor_difference(got, want, tolerance)
    return _sequence_difference(got, want, tolerance)


def _text_difference(got: Any, want: str) -> Difference | None:
    if not isinstance(got, str):
        return Difference("type", f"Expected a word in quotes, got {kind_of(got)}.")
    if got.strip().casefold() != want.casefold():
        return Difference("value", "Not that one.")
    return None


def _number_difference(got: Any, want: float, tolerance: float) -> Difference | None:
    if not is_number(got):
        return Difference("type", f"Expected one number, got {kind_of(got)}.")
    number = float(got)
    if math.isclose(number, want, rel_tol=tolerance, abs_tol=1e-9):
        return None
    return Difference("value", number_clue(number, want))


def number_clue(got: float, want: float) -> str:
    """The likeliest reason why `got` is not `want`, in one sentence."""

    got, want = float(got), float(want)

    def near(other: float) -> bool:
        return math.isclose(got, other, rel_tol=1e-3)

    if not math.isfinite(got):
        return f"The number is {got}: look for a division by zero or a logarithm of zero."
    if want and near(1 / want):
        return "The ratio is upside down: swap what you divide and what you divide by."
    if near(want * 100):
        return "A hundred times too large: a percentage where a fraction is wanted?"
    if near(want / 100):
        return "A hundred times too small: a fraction where a percentage is wanted?"
    if near(want * 2**20) or near(want / 2**20):
        return "Right up to a factor of 1,048,576: one side is in bytes, the other in MiB."
    if near(-want):
        return "The size is right, the sign is not."
    if near(want * 2):
        return "Exactly twice too large: is something counted twice?"
    if near(want / 2):
        return "Exactly half: is something counted once that is there twice?"
    if want.is_integer() and abs(got - want) == 1:
        return "Off by one: look at where the counting starts and where it stops."
    return f"{_short_number(got)} is too {'large' if got > want else 'small'}."


def _tensor_difference(got: Any, want: torch.Tensor, tolerance: float) -> Difference | None:
    if isinstance(got, np.ndarray):
        got = torch.from_numpy(np.ascontiguousarray(got)) if got.dtype.kind in "iuf" else got
    if not isinstance(got, torch.Tensor):
        return Difference("type", f"Expected a tensor of shape {tuple(want.shape)}, got {kind_of(got)}.")
    if got.shape != want.shape:
        return Difference("shape", _shape_clue(tuple(got.shape), tuple(want.shape)))
    got, want = got.detach().double(), want.detach().double()
    if bool(want.isnan().any()) and torch.equal(got.isnan(), want.isnan()):  # a known mistake that leaves gaps
        got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    if not bool(torch.isfinite(got).all()):
        return Difference("value", "The shape is right, but some entries are not finite numbers.")
    scale = float(want.norm()) or 1.0
    if float((got - want).norm()) <= tolerance * scale:
        return None
    if want.ndim == 2 and want.shape[0] == want.shape[1] and torch.allclose(got.T, want, rtol=1e-3, atol=1e-6):
        return Difference("value", "The shape is right, but the matrix is transposed: rows and columns changed places.")
    gap = float((got - want).norm()) / scale
    return Difference("value", f"The shape is right, the values are not: they differ by {gap:.0%} in Frobenius norm.")


def _shape_clue(got: tuple[int, ...], want: tuple[int, ...]) -> str:
    text = f"The shape is {got}, it should be {want}."
    if len(got) == 2 and got == want[::-1]:
        return text + " It is transposed: rows and columns changed places."
    if math.prod(got) == math.prod(want) and [s for s in got if s != 1] == [s for s in want if s != 1]:
        return text + " Only axes of length 1 differ: the closing ranks r0 = rd = 1 must go."
    if got == want[::-1]:
        return text + " The axes are in reverse order."
    if sorted(got) == sorted(want):
        return text + " The axes are there, in another order."
    return text


def _sequence_difference(got: Any, want: Any, tolerance: float) -> Difference | None:
    if isinstance(got, np.ndarray | torch.Tensor | torch.Size):
        got = list(got)
    if not isinstance(got, list | tuple):
        return Difference("type", f"Expected {len(want)} values in a list or tuple, got {kind_of(got)}.")
    if len(got) != len(want):
        return Difference("shape", f"Expected {len(want)} values, got {len(got)}.")
    for place, (mine, right) in enumerate(zip(got, want, strict=True), start=1):
        if gap := difference(mine, right, tolerance):
            return Difference(gap.stage, f"Value {place} of {len(want)}: {gap.message}")
    return None


def kind_of(value: Any) -> str:
    """A short plain name for what was handed in."""
    if value is None:
        return "nothing (None)"
    if value is Ellipsis:
        return "three dots (...)"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"a tensor of shape {tuple(value.shape)}"
    if is_number(value):
        return f"the number {_short_number(float(value))}"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if callable(value):
        return "a function"
    return f"a {type(value).__name__}"


def _short_number(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:,.4g}"
