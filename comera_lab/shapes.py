"""Integers only: modes, ranks and counts of tensor-train (TT) and TT-matrix (TTM) formats. No torch.

A linear weight W (out, in) is a TT with modes (n_1..n_d | m_1..m_e): prod(n) = in, prod(m) = out, one core
G_k (r_{k-1}, s_k, r_k) per mode, r_0 = r_{d+e} = 1. A table E (rows, columns) is a TTM: one core
F_k (r_{k-1}, v_k, h_k, r_k) per pair of modes (Oseledets 2011; CoMERA, arXiv 2405.14377).
Features that do not factorise well are padded: the product of the modes may exceed the features, and the
padded rows and columns are never computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index


class ShapeError(ValueError):
    """A size that breaks a rule. The message states the rule, what was got, and the remedy."""


def positive_int(value: object, name: str) -> int:
    """`value` as an int >= 1; anything else (0, -1, 0.5, True, "same") raises ShapeError naming `name`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ShapeError(f"{name} must be an integer of at least 1, got {value!r}. Give a whole number.") from None
    if number < 1:
        raise ShapeError(f"{name} must be an integer of at least 1, got {number}. Give a whole number.")
    return number


def _positive_ints(values: object, name: str) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ShapeError(f"{name} must be a list of integers, got {values!r}. Give one integer per entry.")
    if not values:
        raise ShapeError(f"{name} must not be empty. Give at least one mode.")
    return tuple(positive_int(value, f"{name}[{k}]") for k, value in enumerate(values))


def max_ranks(modes: Sequence[int]) -> tuple[int, ...]:
    """Largest useful rank of every bond, closing 1s included: the smaller side of each unfolding."""
    left = [math.prod(modes[:k]) for k in range(len(modes) + 1)]
    return tuple(min(left[k], left[-1] // left[k]) for k in range(len(left)))


def clip_ranks(ranks: int | Sequence[int], modes: Sequence[int]) -> tuple[int, ...]:
    """Ranks of every bond, closing 1s included, each clipped to what the modes can carry.

    One integer stands for every inner bond. A list needs len(modes) + 1 entries that begin and end with 1.
    """
    limits = max_ranks(modes)
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        inner = positive_int(ranks, "rank")
        return tuple(min(inner, limit) if 0 < k < len(modes) else 1 for k, limit in enumerate(limits))
    if len(ranks) != len(limits):
        raise ShapeError(
            f"{len(modes)} modes need {len(limits)} ranks, got {len(ranks)} in {tuple(ranks)}. "
            "Give the closing 1s too: (1, r_1, ..., 1)."
        )
    given = tuple(positive_int(rank, f"ranks[{k}]") for k, rank in enumerate(ranks))
    for k in (0, len(modes)):
        if given[k] != 1:
            raise ShapeError(f"ranks[{k}] closes the train and must be 1, got {given[k]}. Write 1 there.")
    return tuple(min(rank, limit) for rank, limit in zip(given, limits, strict=True))


def chain_params(modes: Sequence[int], ranks: Sequence[int]) -> int:
    """Elements of all cores: sum_k r_{k-1} s_k r_k."""
    return sum(ranks[k] * mode * ranks[k + 1] for k, mode in enumerate(modes))


def ordered_splits(number: int, parts: int, smallest: int = 1) -> Iterator[tuple[int, ...]]:
    """Every way to write `number` as a product of `parts` factors in ascending order."""
    if parts == 1:
        if number >= smallest:
            yield (number,)
        return
    for factor in range(smallest, math.isqrt(number) + 1 if parts == 2 else math.floor(number ** (1 / parts)) + 2):
        if number % factor == 0:
            for rest in ordered_splits(number // factor, parts - 1, factor):
                yield (factor, *rest)


def split_features(features: int, order: int = 3, max_padding: float = 0.1) -> tuple[int, ...]:
    """`features` as `order` modes, largest first, as even as possible.

    An exact split is taken when its largest mode is at most twice the even size features^(1/order); else
    the smallest padded product within `max_padding` (a fraction of the features) for which that holds; else
    the exact split. So 768 -> (12, 8, 8), and the prime 1009 -> (13, 13, 6) with 5 padded features.
    """
    features, order = positive_int(features, "features"), positive_int(order, "order")
    if not 0 <= max_padding <= 1:
        raise ShapeError(f"max_padding is a fraction of the features in [0, 1], got {max_padding}. Try 0.1.")

    def evenest(number: int) -> tuple[int, ...]:
        return min(ordered_splits(number, order), key=sum)

    exact = evenest(features)
    even = 2 * features ** (1 / order)
    if exact[-1] > even:
        for padded in range(features + 1, math.floor(features * (1 + max_padding)) + 1):
            modes = evenest(padded)
            if modes[-1] <= even:
                return modes[::-1]
    return exact[::-1]


def ranks_for_budget(modes: Sequence[int], params: int) -> tuple[int, ...]:
    """The ranks that spend at most `params` core elements: one rank everywhere, then single bonds raised.

    Raises ShapeError when even rank 1 costs more than `params`.
    """
    modes, params = _positive_ints(modes, "modes"), positive_int(params, "params")
    limits = max_ranks(modes)
    floor = sum(modes)
    if params < floor:
        raise ShapeError(
            f"rank 1 already needs {floor:,} parameters for modes {modes}, got a budget of {params:,}. "
            f"Give at least {floor:,}, or more modes."
        )
    low, high = 1, max(limits)
    while low < high:
        middle = (low + high + 1) // 2
        if chain_params(modes, clip_ranks(middle, modes)) <= params:
            low = middle
        else:
            high = middle - 1
    ranks = list(clip_ranks(low, modes))
    for k in range(1, len(modes)):
        cost_of_one = ranks[k - 1] * modes[k - 1] + modes[k] * ranks[k + 1]
        spare = (params - chain_params(modes, ranks)) // cost_of_one
        ranks[k] += min(spare, limits[k] - ranks[k])
    return tuple(ranks)


def _features(value: int | None, modes: tuple[int, ...], name: str) -> int:
    capacity = math.prod(modes)
    features = capacity if value is None else positive_int(value, name)
    if features > capacity:
        raise ShapeError(
            f"modes {modes} multiply out to {capacity}, less than {name}={features}. "
            f"Choose modes whose product is at least {features}; split_features({features}) gives some."
        )
    return features


@dataclass(frozen=True)
class TTShape:
    """Shape of a TT linear weight. `ranks` holds every bond, closing 1s included, clipped to `max_ranks`.

    `in_features`, `out_features` default to the products of the modes; smaller values mean padding.
    """

    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]
    ranks: tuple[int, ...]
    in_features: int = 0
    out_features: int = 0

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "in_modes", _positive_ints(self.in_modes, "in_modes"))
        set_field(self, "out_modes", _positive_ints(self.out_modes, "out_modes"))
        set_field(self, "in_features", _features(self.in_features or None, self.in_modes, "in_features"))
        set_field(self, "out_features", _features(self.out_features or None, self.out_modes, "out_features"))
        set_field(self, "ranks", clip_ranks(self.ranks, self.modes))

    @classmethod
    def for_features(
        cls,
        in_features: int,
        out_features: int,
        rank: int | Sequence[int] = 8,
        order: int = 3,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
    ) -> TTShape:
        """Shape for a dense layer's sizes; `order` modes a side unless modes are given, which must be exact.

        Input modes fall and output modes rise: large modes sit at the ends, where the ranks are small.
        """
        in_features = positive_int(in_features, "in_features")
        out_features = positive_int(out_features, "out_features")
        sides = []
        for name, features, modes in (("in", in_features, in_modes), ("out", out_features, out_modes)):
            if modes is None:
                chosen = split_features(features, order)
                sides.append(chosen if name == "in" else chosen[::-1])
                continue
            chosen = _positive_ints(modes, f"{name}_modes")
            if math.prod(chosen) != features:
                raise ShapeError(
                    f"{name}_modes {chosen} multiply out to {math.prod(chosen)}, but {name}_features is {features}. "
                    f"Leave {name}_modes out, or use split_features({features}); for padding build a TTShape."
                )
            sides.append(chosen)
        return cls(sides[0], sides[1], clip_ranks(rank, sides[0] + sides[1]), in_features, out_features)

    @property
    def modes(self) -> tuple[int, ...]:
        return self.in_modes + self.out_modes

    @property
    def split(self) -> int:
        """d, the number of input modes: the bond where the train is cut into its two half-chains."""
        return len(self.in_modes)

    @property
    def middle_rank(self) -> int:
        return self.ranks[self.split]

    @property
    def max_ranks(self) -> tuple[int, ...]:
        return max_ranks(self.modes)

    @property
    def core_shapes(self) -> list[tuple[int, int, int]]:
        return [(self.ranks[k], mode, self.ranks[k + 1]) for k, mode in enumerate(self.modes)]

    @property
    def params(self) -> int:
        """Elements of all cores."""
        return chain_params(self.modes, self.ranks)

    @property
    def dense_params(self) -> int:
        """Elements of the dense weight, without padding."""
        return self.in_features * self.out_features

    @property
    def compression(self) -> float:
        """dense_params / params: 28.8 means 28.8x smaller."""
        return self.dense_params / self.params

    @property
    def padding(self) -> tuple[int, int]:
        """Input and output features that exist only as padding."""
        return math.prod(self.in_modes) - self.in_features, math.prod(self.out_modes) - self.out_features

    def with_ranks(self, ranks: int | Sequence[int]) -> TTShape:
        given = clip_ranks(ranks, self.modes)
        return TTShape(self.in_modes, self.out_modes, given, self.in_features, self.out_features)


@dataclass(frozen=True)
class TTMShape:
    """Shape of a TT-matrix table E (rows, columns); padded rows and columns are allowed and never reachable."""

    row_modes: tuple[int, ...]
    column_modes: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: int = 0
    columns: int = 0

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "row_modes", _positive_ints(self.row_modes, "row_modes"))
        set_field(self, "column_modes", _positive_ints(self.column_modes, "column_modes"))
        if len(self.row_modes) != len(self.column_modes):
            raise ShapeError(
                f"a TT-matrix pairs row and column modes, got {len(self.row_modes)} row modes {self.row_modes} and "
                f"{len(self.column_modes)} column modes {self.column_modes}. Fill the shorter list with 1s."
            )
        set_field(self, "rows", _features(self.rows or None, self.row_modes, "rows"))
        set_field(self, "columns", _features(self.columns or None, self.column_modes, "columns"))
        set_field(self, "ranks", clip_ranks(self.ranks, self.modes))

    @classmethod
    def for_table(
        cls,
        rows: int,
        columns: int,
        rank: int | Sequence[int] | None = None,
        order: int = 3,
        row_modes: Sequence[int] | None = None,
        column_modes: Sequence[int] | None = None,
        params: int | None = None,
    ) -> TTMShape:
        """Shape for a dense table's sizes, by `rank` or by at most `params` core elements.

        `order` modes a side unless modes are given, whose products may exceed the sizes. Row modes fall and
        column modes rise, so that the products v_k h_k come out even.
        """
        v = tuple(row_modes) if row_modes is not None else split_features(rows, order)
        h = tuple(column_modes) if column_modes is not None else split_features(columns, len(v))[::-1]
        shape = cls(v, h, (1,) * (len(v) + 1), positive_int(rows, "rows"), positive_int(columns, "columns"))
        if rank is not None and params is None:
            return shape.with_ranks(rank)
        if params is not None and rank is None:
            return shape.with_ranks(ranks_for_budget(shape.modes, params))
        raise ShapeError(f"give exactly one of rank and params, got rank={rank}, params={params}. Try rank=16.")

    @property
    def modes(self) -> tuple[int, ...]:
        """Products v_k h_k: the modes of the TT whose cores are the flattened TTM cores."""
        return tuple(v * h for v, h in zip(self.row_modes, self.column_modes, strict=True))

    @property
    def core_shapes(self) -> list[tuple[int, int, int, int]]:
        pairs = zip(self.row_modes, self.column_modes, strict=True)
        return [(self.ranks[k], v, h, self.ranks[k + 1]) for k, (v, h) in enumerate(pairs)]

    @property
    def params(self) -> int:
        return chain_params(self.modes, self.ranks)

    @property
    def dense_params(self) -> int:
        return self.rows * self.columns

    @property
    def compression(self) -> float:
        return self.dense_params / self.params

    @property
    def padding(self) -> tuple[int, int]:
        """Rows and columns that exist only as padding."""
        return math.prod(self.row_modes) - self.rows, math.prod(self.column_modes) - self.columns

    def with_ranks(self, ranks: int | Sequence[int]) -> TTMShape:
        return TTMShape(self.row_modes, self.column_modes, clip_ranks(ranks, self.modes), self.rows, self.columns)
