from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comera_lab.shapes import (
    ShapeError,
    TTMShape,
    TTShape,
    chain_params,
    clip_ranks,
    max_ranks,
    ranks_for_budget,
    split_features,
)


def test_published_shapes_give_the_published_counts():
    square = TTShape((12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
    assert (square.params, round(square.compression, 1)) == (20_448, 28.8)
    wide = TTShape.for_features(768, 3072, 30)
    assert wide.in_modes + wide.out_modes == (12, 8, 8, 12, 16, 16)
    assert (wide.params, round(wide.compression, 1)) == (28_960, 81.5)
    assert TTShape.for_features(3072, 768, 30).params == 28_960
    table = TTMShape((16, 20, 10, 10), (4, 4, 8, 6), (1, 32, 32, 32, 1), 30_522, 768)
    assert (table.params, round(table.compression, 1)) == (167_808, 139.7)


@given(st.integers(1, 5000), st.integers(1, 5))
def test_split_covers_the_features_within_the_padding(features, order):
    modes = split_features(features, order)
    assert len(modes) == order
    assert features <= math.prod(modes) <= features * 1.1
    assert list(modes) == sorted(modes, reverse=True)
    assert math.prod(split_features(features, order, max_padding=0)) == features


@pytest.mark.parametrize(
    ("features", "modes"),
    [
        (768, (12, 8, 8)),
        (784, (14, 8, 7)),
        (3072, (16, 16, 12)),
        (1009, (13, 13, 6)),
        (50_261, (71, 59, 12)),
        (1, (1, 1, 1)),
    ],
)
def test_split_of_known_sizes(features, modes):
    assert split_features(features) == modes


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_max_ranks_are_the_smaller_sides_of_the_unfoldings(modes):
    limits = max_ranks(modes)
    assert limits == tuple(min(math.prod(modes[:k]), math.prod(modes[k:])) for k in range(len(modes) + 1))
    assert clip_ranks(10**6, modes) == limits


@given(st.lists(st.integers(2, 9), min_size=2, max_size=6), st.integers(1, 5000))
def test_budget_is_met_and_nearly_spent(modes, params):
    if params < sum(modes):
        with pytest.raises(ShapeError, match=f"Give at least {sum(modes):,}"):
            ranks_for_budget(modes, params)
        return
    ranks = ranks_for_budget(modes, params)
    assert chain_params(modes, ranks) <= params
    for k in range(1, len(modes)):
        more = [*ranks[:k], ranks[k] + 1, *ranks[k + 1 :]]
        assert ranks[k] == max_ranks(modes)[k] or chain_params(modes, more) > params


def test_F05_compression_by_target():
    modes = TTShape.for_features(1024, 1024).modes
    spent = chain_params(modes, ranks_for_budget(modes, 100_000))
    assert 75_000 <= spent <= 100_000
    table = TTMShape(split_features(8_209), split_features(192)[::-1], 1, 8_209, 192)
    ranks = ranks_for_budget(table.modes, 8_209 * 192 // 4)
    fitted = TTMShape(table.row_modes, table.column_modes, ranks, 8_209, 192)
    assert 4 <= fitted.compression <= 5
    assert math.prod(fitted.row_modes) - fitted.rows <= 0.1 * fitted.rows


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((2, 4, 4, 1), r"ranks[0] closes the train and must be 1, got 2"),
        ((1, 4, 4, 3), r"ranks[3] closes the train and must be 1, got 3"),
        ((1, 4, 1), "3 modes need 4 ranks, got 3"),
        ((1, 4, 0, 1), r"ranks[2] must be an integer of at least 1, got 0"),
        (0, "rank must be an integer of at least 1, got 0"),
        (-1, "rank must be an integer of at least 1, got -1"),
        (0.5, "rank must be an integer of at least 1, got 0.5"),
        ("same", "rank must be an integer of at least 1, got 'same'"),
        (True, "rank must be an integer of at least 1, got True"),
    ],
)
def test_F07_rank_argument_rules_rejected(ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        clip_ranks(ranks, (4, 4, 4))


@pytest.mark.parametrize(
    ("ranks", "used"),
    [(2, (1, 2, 2, 1)), (np.int64(3), (1, 3, 3, 1)), (10**6, (1, 4, 4, 1)), ([1, 2, 9, 1], (1, 2, 4, 1))],
)
def test_F07_rank_argument_rules_accepted_as_used(ranks, used):
    assert TTShape((4,), (4, 4), clip_ranks(ranks, (4, 4, 4))).ranks == used


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0, "out_features": 4}, "in_features must be an integer of at least 1, got 0"),
        ({"in_features": 4, "out_features": -3}, "out_features must be an integer of at least 1, got -3"),
        ({"in_features": 12, "out_features": 4, "in_modes": (5, 2)}, "multiply out to 10, but in_features is 12"),
        ({"in_features": 12, "out_features": 4, "in_modes": ()}, "in_modes must not be empty"),
        ({"in_features": 12, "out_features": 4, "in_modes": "12"}, "in_modes must be a list of integers"),
        ({"in_features": 12, "out_features": 4, "order": 0}, "order must be an integer of at least 1, got 0"),
    ],
)
def test_bad_sizes_name_rule_and_value(arguments, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        TTShape.for_features(**arguments)


def test_features_beyond_the_modes_are_refused():
    with pytest.raises(ShapeError, match="multiply out to 12, less than in_features=13"):
        TTShape((3, 4), (2,), (1, 1, 1, 1), in_features=13)
    with pytest.raises(ShapeError, match="got 2 row modes"):
        TTMShape((2, 3), (4,), (1, 1, 1))
    with pytest.raises(ShapeError, match="max_padding is a fraction"):
        split_features(10, 2, max_padding=1.5)
