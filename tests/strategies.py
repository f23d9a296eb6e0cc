"""Hypothesis strategies shared by the tests of the tensor-train core."""

from __future__ import annotations

from hypothesis import strategies as st

from comera_lab.shapes import TTShape, clip_ranks

modes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def tt_shapes(draw: st.DrawFn) -> TTShape:
    """Any order 1-3 a side (unequal too), modes of 1, ranks of 1, and padded features."""
    in_modes, out_modes = draw(modes), draw(modes)
    count = len(in_modes) + len(out_modes)
    inner = draw(st.lists(st.integers(1, 4), min_size=count - 1, max_size=count - 1))
    shape = TTShape(in_modes, out_modes, clip_ranks([1, *inner, 1], in_modes + out_modes))
    in_features = draw(st.integers(max(1, shape.in_features - 2), shape.in_features))
    out_features = draw(st.integers(max(1, shape.out_features - 2), shape.out_features))
    return TTShape(in_modes, out_modes, shape.ranks, in_features, out_features)
