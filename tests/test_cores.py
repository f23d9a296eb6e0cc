from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar

import pytest
import tensorly
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import tt_shapes
from tensorly.decomposition import tensor_train
from tolerances import RELATIVE, relative_error

from comera_lab.cores import (
    chain,
    chain_tree,
    cores_to_matrix,
    from_tensorly,
    init_cores,
    matrix_to_cores,
    round_cores,
    to_dense,
    to_tensorly,
    tt_svd,
)
from comera_lab.shapes import ShapeError, TTMShape, TTShape

EXACT = RELATIVE[torch.float64]


def random_cores(shape, seed=0):
    return init_cores(shape, 1.0, torch.Generator().manual_seed(seed), dtype=torch.float64)


def element(cores, digits):
    """One element of the train by the definition: a product of matrices picked by the digits."""
    product = torch.ones(1, 1, dtype=cores[0].dtype)
    for core, digit in zip(cores, digits, strict=True):
        product = product @ core[(slice(None), *(digit if isinstance(digit, tuple) else (digit,)))]
    return product.item()


def digits_of(number, modes):
    found = []
    for mode in reversed(modes):
        number, digit = divmod(number, mode)
        found.append(digit)
    return found[::-1]


@given(tt_shapes(), st.integers(0, 3))
def test_matrix_elements_follow_the_documented_digits(shape, seed):
    cores = random_cores(shape, seed)
    weight = cores_to_matrix(cores, shape)
    assert weight.shape == (shape.out_features, shape.in_features)
    for j, i in {(0, 0), (shape.out_features - 1, shape.in_features // 2)}:
        digits = digits_of(i, shape.in_modes) + digits_of(j, shape.out_modes)
        assert weight[j, i].item() == pytest.approx(element(cores, digits), rel=EXACT)


def test_table_elements_pair_row_and_column_digits():
    shape = TTMShape((2, 3, 2), (2, 1, 3), (1, 3, 4, 1), rows=11, columns=6)
    cores = random_cores(shape)
    table = cores_to_matrix(cores, shape)
    assert table.shape == (11, 6)
    pairs = list(zip(digits_of(7, shape.row_modes), digits_of(4, shape.column_modes), strict=True))
    assert table[7, 4].item() == pytest.approx(element(cores, pairs), rel=EXACT)


@given(tt_shapes())
def test_full_rank_svd_of_a_matrix_is_exact(shape):
    weight = torch.randn(shape.out_features, shape.in_features, dtype=torch.float64)
    full = shape.with_ranks(10**6)
    assert relative_error(cores_to_matrix(matrix_to_cores(weight, full), full), weight) < EXACT


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_chain_equals_the_full_product_in_the_cheapest_order(order):
    generator = torch.Generator().manual_seed(order)
    ranks = [1, 5, 2, 6, 3, 4][: order + 1]
    modes = [3, 2, 4, 2, 3][:order]
    cores = [
        torch.randn(ranks[k], modes[k], ranks[k + 1], generator=generator, dtype=torch.float64) for k in range(order)
    ]
    product = cores[0]
    flops = 0
    for core in cores[1:]:
        flops += 2 * product.numel() * core.shape[1] * core.shape[2]
        product = torch.tensordot(product, core, dims=1).reshape(1, -1, core.shape[2])
    assert relative_error(chain(cores), product) < EXACT
    assert chain_tree(tuple(modes), tuple(ranks))[0] <= flops


def test_F03_element_order_of_laplacian_and_integers():
    laplacian = torch.diag(torch.full((64,), 2.0)) - torch.diag(torch.ones(63), 1) - torch.diag(torch.ones(63), -1)
    twos = (2,) * 6
    table = TTMShape(twos, twos, (1, *[64] * 5, 1))
    assert torch.linalg.norm(cores_to_matrix(matrix_to_cores(laplacian, table), table) - laplacian) <= 1e-4
    linear = TTShape(twos, twos, (1, *[64] * 11, 1))
    assert torch.linalg.norm(cores_to_matrix(matrix_to_cores(laplacian, linear), linear) - laplacian) <= 1e-4
    integers = torch.arange(60, dtype=torch.float64).reshape(6, 10)
    small = TTMShape((2, 3), (5, 2), (1, 99, 1))
    assert torch.equal(cores_to_matrix(matrix_to_cores(integers, small), small).round(), integers)
    embedding = torch.randn(12, 8, dtype=torch.float64)
    rows = TTMShape((3, 4), (4, 2), (1, 99, 1))
    assert relative_error(cores_to_matrix(matrix_to_cores(embedding, rows), rows)[5], embedding[5]) < EXACT


def tails(tensor, ranks):
    """sqrt of the sum of squared dropped singular values over all unfoldings: the bound of TT-SVD."""
    total = 0.0
    for k in range(1, tensor.dim()):
        values = torch.linalg.svdvals(tensor.reshape(math.prod(tensor.shape[:k]), -1))
        total += float(values[ranks[k] :].square().sum())
    return math.sqrt(total)


@pytest.mark.parametrize("ranks", [(1, 2, 3, 2, 1), (1, 1, 1, 1, 1), (1, 4, 9, 5, 1)])
def test_svd_by_rank_meets_its_bound_and_equals_tensorly(ranks):
    tensor = torch.randn(4, 5, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cores = tt_svd(tensor, ranks)
    assert [core.shape[0] for core in cores] + [1] == list(ranks)
    error = float(torch.linalg.vector_norm(to_dense(cores) - tensor))
    assert error <= tails(tensor, ranks) * (1 + EXACT)
    theirs = torch.tensor(tensorly.tt_to_tensor(tensor_train(tensorly.tensor(tensor.numpy()), list(ranks))))
    assert relative_error(to_dense(cores), theirs) < 1e-9


@given(st.floats(0, 0.9), st.integers(0, 4))
def test_svd_and_rounding_by_error_keep_the_promise(error, seed):
    generator = torch.Generator().manual_seed(seed)
    decay = torch.logspace(0, -3, 4, dtype=torch.float64)
    tensor = torch.randn(4, 4, 4, 4, dtype=torch.float64, generator=generator) * decay * decay[:, None, None, None]
    for cores in (tt_svd(tensor, error=error), round_cores(tt_svd(tensor), error=error)):
        assert relative_error(to_dense(cores), tensor) <= error + EXACT


def test_F08_rounding_by_tolerance():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(6, 10, generator=generator)
    tensor = torch.einsum("i,j,k->ijk", *vectors[:3]) + torch.einsum("i,j,k->ijk", *vectors[3:])
    stored = tt_svd(tensor, (1, 10, 10, 1))
    loose = round_cores(stored, error=1e-3)
    assert [core.shape[2] for core in loose] == [2, 2, 1]
    assert relative_error(to_dense(loose), tensor) <= 1e-3
    assert relative_error(to_dense(round_cores(stored, error=0.0)), tensor) <= 1e-6
    zero = round_cores([torch.zeros(core.shape) for core in stored], error=1e-3)
    assert [tuple(core.shape) for core in zero] == [(1, 10, 1)] * 3
    assert all(torch.isfinite(core).all() for core in zero)


def test_F10_error_falls_with_rank_and_complex_is_refused():
    tensor = torch.randn(16, 16, 16, generator=torch.Generator().manual_seed(0))
    errors = [relative_error(to_dense(tt_svd(tensor, rank)), tensor) for rank in range(1, 17)]
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(errors))
    assert errors[-1] < RELATIVE[torch.float32]
    with pytest.raises(TypeError, match="real floating-point"):
        tt_svd(tensor.to(torch.complex64), 4)


def test_rounding_by_rank_is_as_good_as_decomposing_anew():
    tensor = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rounded = round_cores(tt_svd(tensor), (1, 3, 4, 1))
    assert relative_error(to_dense(rounded), tensor) <= tails(tensor, (1, 3, 4, 1)) / torch.linalg.vector_norm(tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_decomposed_in_float32_and_cast_back(dtype):
    tensor = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    cores = tt_svd(tensor)
    assert {core.dtype for core in cores} == {dtype}
    assert relative_error(to_dense([core.double() for core in cores]), tensor) < RELATIVE[dtype]


def test_bad_tensors_are_refused():
    with pytest.raises(ValueError, match="got NaN or Inf"):
        tt_svd(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(TypeError, match="real floating-point tensors, got torch.int64"):
        tt_svd(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"error is relative and lies in \[0, 1\), got 1"):
        tt_svd(torch.ones(2, 2), error=1.0)
    with pytest.raises(ShapeError, match=r"describes a \(4, 6\) matrix, got \(6, 4\)"):
        matrix_to_cores(torch.ones(6, 4), TTShape((2, 3), (2, 2), (1, 2, 2, 2, 1)))


def test_start_values_have_the_asked_spread():
    shape = TTShape.for_features(768, 768, 30)
    spreads = [float(cores_to_matrix(random_cores(shape, seed), shape).std()) for seed in range(8)]
    assert 0.9 < sum(spreads) / len(spreads) < 1.1


class TestTensorly:
    vector_shape: ClassVar = TTShape((3, 4), (2, 5), (1, 3, 4, 2, 1))

    def test_tt_tensor_both_ways(self):
        cores = random_cores(self.vector_shape)
        theirs = to_tensorly(cores)
        assert type(theirs).__name__ == "TTTensor"
        assert relative_error(torch.tensor(tensorly.tt_to_tensor(theirs)), to_dense(cores)) < EXACT
        assert all(torch.equal(a, b) for a, b in zip(from_tensorly(theirs), cores, strict=True))

    def test_tt_matrix_both_ways(self):
        shape = TTMShape((3, 4), (2, 5), (1, 3, 1))
        cores = random_cores(shape)
        theirs = to_tensorly(cores)
        assert type(theirs).__name__ == "TTMatrix"
        dense = tensorly.tt_matrix.tt_matrix_to_matrix(theirs)
        assert relative_error(torch.tensor(dense), cores_to_matrix(cores, shape)) < EXACT
        assert all(torch.equal(a, b) for a, b in zip(from_tensorly(theirs), cores, strict=True))
