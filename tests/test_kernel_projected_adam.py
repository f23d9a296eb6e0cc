"""The projected Adam step and the 8-bit codes in Triton's interpreter, against float64 and against broken copies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from interpreter import in_interpreter, nan_filled
from tolerances import RELATIVE, relative_error
from triton.runtime.errors import InterpreterError

from comera_lab.kernels import blockwise_quant as quant
from comera_lab.kernels import matrix_group as groups
from comera_lab.kernels import projected_adam as adam
from comera_lab.optimizers.quantized import dequantize_blockwise, quantize_blockwise, signed_map, unsigned_map
from comera_lab.shapes import ShapeError

# a large step, so that an error of the update shows in the weights
SCALARS = torch.tensor(groups.adam_scalars(3, 0.5, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1, scale=0.7))
NAMES = ("weights", "gradients", "bases", "exp_avgs", "exp_avg_sqs")
MARK = -7.0


def guarded(tensor):
    """The same values and strides inside a larger buffer of marks, at an address divisible by 16."""
    buffer = torch.full((tensor.numel() + 32,), MARK).to(tensor.dtype)
    inside = buffer.as_strided(tensor.shape, tensor.stride(), 16)
    return inside.copy_(tensor)


def marks_hold(tensor):
    buffer = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return bool((buffer[:16] == MARK).all() and (buffer[-16:] == MARK).all())


def make(rows, cols, rank, dtype=torch.float32, *, stack=2, transposed=False):
    generator = torch.Generator().manual_seed(rows + 10 * cols + 100 * rank)

    def draw(*sizes):
        return [torch.randn(*sizes, generator=generator) for _ in range(stack)]

    def matrices():
        return [t.T.to(dtype) for t in draw(cols, rows)] if transposed else [t.to(dtype) for t in draw(rows, cols)]

    return groups.MatrixGroup(
        weights=[guarded(t) for t in matrices()],
        gradients=matrices(),
        bases=[t.div(cols**0.5).to(dtype).T for t in draw(rank, cols)],
        exp_avgs=[guarded(t) for t in draw(rows, rank)],
        exp_avg_sqs=[guarded(0.1 + t.square()) for t in draw(rows, rank)],
    )


def encoded(group):
    """The group with its moments as 8-bit codes."""
    lines, codes, scales = dict(zip(NAMES, group.lines, strict=True)), [], []
    for name, code in zip(NAMES[3:], (signed_map(), unsigned_map()), strict=True):
        pairs = [quantize_blockwise(moment, code) for moment in lines[name]]
        codes.append([guarded(pair[0]) for pair in pairs])
        scales.append([guarded(pair[1]) for pair in pairs])
    lines |= dict(zip(NAMES[3:], codes, strict=True))
    return groups.MatrixGroup(**lines, scales=tuple(scales), maps=(signed_map(), unsigned_map()))


def exact(group):
    """The same rounded inputs in float64, in memory of its own."""
    dtype, shape = group.weights[0].dtype, (group.sizes[0], group.sizes[2])
    lines = {name: [tensor.double().clone() for tensor in line] for name, line in zip(NAMES, group.lines, strict=False)}
    lines["bases"] = [basis.to(dtype).double() for basis in group.bases]
    for name, scales, code in zip(NAMES[3:], group.scales or (), group.maps or (), strict=False):
        line = getattr(group, name)
        lines[name] = [dequantize_blockwise(c, s, code, shape).double() for c, s in zip(line, scales, strict=True)]
    return groups.MatrixGroup(**lines)


def worst_error(group, step=None):
    """Largest relative error of weights and moments after one step, and whether every mark is still there."""
    reference = exact(group)
    groups.naive_projected_adam(reference, SCALARS)
    with nan_filled():
        (step or adam.projected_adam)(group, SCALARS)
    names = ("weights",) if group.scales else ("weights", "exp_avgs", "exp_avg_sqs")
    pairs = [(a, b) for name in names for a, b in zip(getattr(group, name), getattr(reference, name), strict=True)]
    assert all(marks_hold(tensor) for name in names for tensor in getattr(group, name))
    return max(relative_error(got, want) for got, want in pairs)


SIZES = [(70, 33, 5), (67, 40, 130), (17, 1, 1), (1, 17, 3), (17, 500, 33)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "cols", "rank"), SIZES)
@in_interpreter
def test_H09_a_step_equals_float64_at_odd_sizes(rows, cols, rank, dtype, transposed):
    assert worst_error(make(rows, cols, rank, dtype, transposed=transposed)) < RELATIVE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_interpreter
def test_padded_strides_and_a_float32_basis_are_served(dtype):
    group = make(40, 24, 4, dtype)
    wide = [torch.full((40, 31), MARK).to(dtype) for _ in range(2)]
    lines = dict(zip(NAMES, group.lines, strict=True)) | {
        "weights": [w[:, 3:27].copy_(x) for w, x in zip(wide, group.weights, strict=True)]
    }
    lines["bases"] = [basis.float() + 1e-4 for basis in group.bases]
    group = groups.MatrixGroup(**lines)
    reference = exact(group)
    groups.naive_projected_adam(reference, SCALARS)
    adam.projected_adam(group, SCALARS)
    assert relative_error(group.weights[1], reference.weights[1]) < RELATIVE[dtype]
    assert all((w[:, :3] == MARK).all() and (w[:, 27:] == MARK).all() for w in wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "cols", "rank"), [(150, 40, 20), (67, 33, 3)])
@in_interpreter
def test_E03_8_bit_moments_are_read_and_written_as_the_torch_code_does(rows, cols, rank, dtype):
    torch_side, ours = (encoded(make(rows, cols, rank, dtype)) for _ in "ab")
    for mine, theirs in zip(ours.lines, torch_side.lines, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            a.copy_(b)
    groups.naive_projected_adam(torch_side, SCALARS)
    assert worst_error(ours) < RELATIVE[dtype]
    for name in NAMES[3:]:
        for a, b in zip(getattr(ours, name), getattr(torch_side, name), strict=True):
            difference = (a.int() - b.int()).abs()
            # sums in another order may cross a border between two codes, seldom
            assert difference.max() <= 1
            assert difference.count_nonzero() <= 0.002 * len(difference) + 1
            assert marks_hold_codes(a)
    for mine, theirs in zip(ours.scales, torch_side.scales, strict=True):
        assert all(relative_error(a, b) < RELATIVE[torch.float32] for a, b in zip(mine, theirs, strict=True))


def marks_hold_codes(codes):
    buffer = torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage())
    mark = torch.tensor(MARK).to(torch.uint8)
    return bool((buffer[:16] == mark).all() and (buffer[-16:] == mark).all())


@in_interpreter
def test_a_step_with_an_identity_basis_is_torch_adamw():
    weight = torch.randn(20, 8)
    parameter = torch.nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.3)
    moments = [torch.zeros(20, 8), torch.zeros(20, 8)]
    for step in range(1, 4):
        gradient = torch.randn(20, 8)
        group = groups.MatrixGroup(
            weights=[weight], gradients=[gradient], bases=[torch.eye(8)], exp_avgs=moments[:1], exp_avg_sqs=moments[1:]
        )
        scalars = groups.adam_scalars(step, 0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.3)
        adam.projected_adam(group, torch.tensor(scalars))
        parameter.grad = gradient
        reference.step()
    assert relative_error(weight, parameter) < RELATIVE[torch.float32]


# Each line breaks the kernel in one place; a test above must notice.
MUTANTS = {
    "moment not used": ("exp_avg_sq, exp_avg / (", "exp_avg_sq, low / ("),
    "decay left out": ("weight * decay - step_size", "weight - step_size"),
    "last columns skipped": (
        "low = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)\n    for first in range(0, cols,",
        "low = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)\n    for first in range(0, cols - 1,",
    ),
    "one matrix for all": ("tl.load(table_ptr + line * stack + item)", "tl.load(table_ptr + line * stack)"),
    "second half first": ("part = right if half else left", "part = left if half else right"),
    "rank tiles mixed up": ("(tl.program_id(0) % tiles) * BLOCK_RANK + half", "half"),
    "lift cut short": ("for first in range(0, rank, BLOCK_RANK)", "for first in range(0, rank - 2, BLOCK_RANK)"),
    "wrong beta": ("tl.load(scalars_ptr + 6)", "tl.load(scalars_ptr + 4)"),
    "basis scaled": ("basis.to(VALUE), lifted", "(1.01 * basis).to(VALUE), lifted"),
    "write past the ranks": (
        "mask = (row < rows)[:, None] & (k < rank)[None, :]\n    direction",
        "mask = (row < rows)[:, None] & (k <= rank)[None, :]\n    direction",
    ),
}


def mutated(module, folder, old, new):
    """A copy of a kernel file with one place changed."""
    source = Path(module.__file__).read_text()
    assert old in source
    file = Path(folder) / "mutant.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", file)
    sys.modules["mutant"] = copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@in_interpreter
def test_broken_copies_are_noticed(name, tmp_path):
    step = mutated(adam, tmp_path, *MUTANTS[name]).projected_adam
    errors = []
    for sizes in ((20, 33, 5), (5, 65, 130)):
        try:
            errors.append(worst_error(make(*sizes), step))
        except (AssertionError, InterpreterError):  # a mark was overwritten, or numpy refused
            errors.append(float("inf"))
    assert not all(error < RELATIVE[torch.float32] for error in errors)


def test_groups_that_do_not_fit_are_refused():
    good = dict(zip(NAMES, make(20, 8, 4).lines, strict=True))
    cases = [
        ({"bases": good["bases"][:1]}, ShapeError, r"one tensor a matrix, got \[2, 2, 1, 2, 2\]"),
        ({"gradients": [torch.zeros(8, 20)] * 2}, ShapeError, r"gradients must be \(20, 8\)"),
        ({"gradients": [torch.zeros(20, 8).half()] * 2}, ShapeError, "torch.float16, on cpu"),
        ({"weights": [torch.zeros(20)] * 2}, ShapeError, "weights and bases must be matrices"),
        ({"exp_avgs": [torch.zeros(4, 20).T] * 2}, ShapeError, r"exp_avgs must be .* with strides \(4, 1\)"),
        ({"maps": (signed_map(), unsigned_map())}, ValueError, "both scales and maps"),
        ({"weights": [torch.empty(1 << 16, 1 << 15, device="meta")] * 2}, ShapeError, r"fewer than 2\*\*31"),
    ]
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            groups.MatrixGroup(**good | change)
    with pytest.raises(ValueError, match="8 fp32 values"):
        adam.projected_adam(groups.MatrixGroup(**good), torch.zeros(3))
    double = groups.MatrixGroup(**{name: [t.double() for t in line] for name, line in good.items()})
    before = double.weights[0].clone()
    with pytest.raises(ValueError, match="Use the torch path"):
        adam.projected_adam(double, SCALARS)
    assert torch.equal(double.weights[0], before)


# 8-bit codes


@pytest.mark.parametrize("count", [1, 17, 256, 1009, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("signed", [True, False])
@in_interpreter
def test_E03_codes_equal_those_of_the_torch_code(count, dtype, signed):
    code = signed_map() if signed else unsigned_map()
    x = (torch.randn(count) * 10.0 ** torch.randint(-8, 1, (count,))).to(dtype)
    x = x if signed else x.abs()
    want = quantize_blockwise(x, code)
    for make_codes in (quant.quantize_blockwise, groups.naive_quantize_blockwise):
        codes, scales = make_codes(x, code)
        assert torch.equal(scales, want[1])
        assert torch.equal(codes, want[0])
    back = quant.dequantize_blockwise(codes, scales, code, (count,))
    assert torch.equal(back, dequantize_blockwise(*want, code, (count,)))
    assert torch.equal(back, groups.naive_dequantize_blockwise(codes, scales, code))


@in_interpreter
def test_E04_blocks_of_zeros_stay_zero_and_nan_stays_visible():
    x = torch.cat([torch.zeros(512), torch.full((256,), 1e-40), torch.randn(256)])
    x[-1] = float("nan")
    codes, scales = quant.quantize_blockwise(x, signed_map())
    back = quant.dequantize_blockwise(codes, scales, signed_map(), x.shape)
    assert torch.equal(back[:512], torch.zeros(512))
    assert back[512:768].isfinite().all()
    assert back[768:].isnan().all()


@in_interpreter
def test_empty_tensors_and_slices_are_encoded():
    codes, scales = quant.quantize_blockwise(torch.zeros(0, 3), signed_map())
    assert codes.shape == scales.shape == (0,)
    assert quant.dequantize_blockwise(codes, scales, signed_map(), (0, 3)).shape == (0, 3)
    x = torch.randn(30, 40)
    assert torch.equal(
        quant.quantize_blockwise(x[::2, 1:], signed_map())[0], quantize_blockwise(x[::2, 1:], signed_map())[0]
    )


@in_interpreter
def test_wrong_maps_blocks_and_scales_are_refused():
    x = torch.randn(300)
    with pytest.raises(ShapeError, match="float32 map of 256"):
        quant.quantize_blockwise(x, signed_map()[:16])
    with pytest.raises(ValueError, match="power of two from 16 up, got 100"):
        quant.quantize_blockwise(x, signed_map(), 100)
    codes, scales = quant.quantize_blockwise(x, signed_map())
    with pytest.raises(ShapeError, match="need 300 codes and 2 scales"):
        quant.dequantize_blockwise(codes, scales[:1], signed_map(), (300,))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.static_range(8)", "tl.static_range(7)"),
        ("value > middle", "value >= lower"),
        ("tl.maximum(scale, SMALLEST_NORMAL)", "(scale + 1.0)"),
        ("mask=item < count, other=0.0", "mask=item < count, other=9.0"),
    ],
)
@in_interpreter
def test_broken_codes_are_noticed(old, new, tmp_path):
    copy = mutated(quant, tmp_path, old, new)
    x = torch.cat([torch.randn(300), torch.zeros(300)])
    x = torch.cat([x, torch.tensor([1.0, float((signed_map()[9] + signed_map()[10]) / 2)]), torch.randn(31)])
    want, got = quantize_blockwise(x, signed_map()), copy.quantize_blockwise(x, signed_map())
    assert not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
