"""8-bit codes: the map's facts, the nearest code, and what rounding costs."""

from __future__ import annotations

import hashlib

import pytest
import torch

from comera_lab.optimizers.quantized import (
    BLOCK,
    dequantize_blockwise,
    new_moment,
    quantize_blockwise,
    read_moment,
    signed_map,
    unsigned_map,
    write_moment,
)
from comera_lab.shapes import ShapeError

# SHA-256 of the little-endian float32 tables of bitsandbytes 0.50.2, functional.create_dynamic_map(signed=..):
# the same bits, found on a CPU. A fact about the format, so that states can be exchanged.
BITSANDBYTES = {
    "signed": "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    "unsigned": "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}
MAPS = {"signed": signed_map, "unsigned": unsigned_map}


def wide_values(signed, count=4096):
    """Values over eight decades, both signs or squares."""
    values = 10 ** (-8 * torch.rand(count)) * (2 * torch.randint(0, 2, (count,)) - 1)
    return values if signed else values.square()


@pytest.mark.parametrize("kind", MAPS)
def test_maps_are_those_of_bitsandbytes(kind):
    code = MAPS[kind]()
    assert code.unique().numel() == 256
    assert (code.diff() > 0).all()
    assert {0.0, 1.0} <= set(code.tolist())
    assert hashlib.sha256(code.numpy().astype("<f4").tobytes()).hexdigest() == BITSANDBYTES[kind]


@pytest.mark.parametrize("kind", MAPS)
def test_codes_are_the_nearest_ones_of_a_binary_search(kind):
    code = MAPS[kind]()
    borders = (code[1:] + code[:-1]) / 2
    lowest = -1.0 if kind == "signed" else 0.0
    special = torch.cat([borders, code, borders.nextafter(torch.tensor(2.0)), borders.nextafter(torch.tensor(-2.0))])
    values = torch.cat([wide_values(kind == "signed", 50_000), special, torch.tensor([0.0, -0.0, 1e-40, 1.0])])
    values = values.clamp(lowest, 1)
    values = torch.cat([values, torch.ones(-values.numel() % BLOCK)])
    values.view(-1, BLOCK)[:, 0] = 1.0  # every block already has the scale 1
    codes, scales = quantize_blockwise(values, code)
    assert (scales == 1).all()
    assert torch.equal(codes, torch.bucketize(values, borders).to(torch.uint8))


@pytest.mark.parametrize("kind", MAPS)
def test_E03_all_codes_are_used_and_0_and_the_block_maximum_are_exact(kind):
    code = MAPS[kind]()
    values = wide_values(kind == "signed", 256 * BLOCK)
    values[::7] = 0
    values.view(-1, BLOCK)[:, 3] = 1.0  # positive maximum of each block
    codes, scales = quantize_blockwise(values, code)
    back = dequantize_blockwise(codes, scales, code, values.shape)
    assert len(codes.unique()) > 250
    assert (back[values == 0] == 0).all()
    assert (back.view(-1, BLOCK)[:, 3] == 1.0).all()
    big = values.abs() > 0.1 * scales.repeat_interleave(BLOCK)
    assert ((back - values).abs() <= 0.08 * values.abs())[big].all()


def test_the_unsigned_map_spends_all_its_codes_on_squares():
    """Pitfall of the public code: squares in the signed map use half of the codes."""
    squares = wide_values(False, 64 * BLOCK)
    used = {kind: len(quantize_blockwise(squares, make())[0].unique()) for kind, make in MAPS.items()}
    assert used["unsigned"] > 250
    assert used["signed"] <= 129


def test_E04_blocks_of_zeros_and_denormals_stay_finite():
    for make in MAPS.values():
        for values in (torch.zeros(512), torch.cat([torch.ones(256), torch.zeros(256)]), torch.full((256,), 1e-40)):
            back = dequantize_blockwise(*quantize_blockwise(values, make()), make(), values.shape)
            assert back.isfinite().all()
            assert (back[values == 0] == 0).all()
            assert torch.allclose(back, values, atol=1e-39)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_any_length_and_shape_come_back(count):
    values = torch.randn(count)
    codes, scales = quantize_blockwise(values, signed_map())
    assert codes.dtype == torch.uint8
    assert (codes.shape, scales.shape) == ((count,), (-(-count // BLOCK),))
    back = dequantize_blockwise(codes, scales, signed_map(), values.shape)
    assert back.shape == values.shape
    if count:
        assert (back - values).abs().max() < 0.08 * values.abs().max()
        blocks = torch.randn(3, 5, 7)
        again = dequantize_blockwise(*quantize_blockwise(blocks, signed_map()), signed_map(), blocks.shape)
        assert again.shape == blocks.shape


def test_what_does_not_fit_is_refused():
    codes, scales = quantize_blockwise(torch.randn(300), signed_map())
    with pytest.raises(ShapeError, match="301 values of shape .* need 301 codes and 2 scales, got 300 and 2"):
        dequantize_blockwise(codes, scales, signed_map(), (301,))
    with pytest.raises(ShapeError, match="code must be a map of 256 numbers, got"):
        quantize_blockwise(torch.randn(4), torch.randn(16))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_moments_are_kept_as_codes_from_4096_values_up(name):
    for count, quantized in ((4095, False), (4096, True)):
        state = {}
        new_moment(state, name, (count,), bits=8, dtype=torch.float32, device=torch.device("cpu"))
        assert (f"{name}_codes" in state) == quantized
        assert (read_moment(state, name, (count,)) == 0).all()
        values = torch.rand(count)
        write_moment(state, name, values)
        error = (read_moment(state, name, (count,)) - values).abs().max()
        assert error < 0.01
        assert (error > 0) == quantized
