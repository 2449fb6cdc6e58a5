"""The sketch of an expert, against the definition in float64 and block by block."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mreader.formats.codes import BLOCK, CODES, QUATERNARY, TERNARY, Code, count_blocks
from mreader.formats.coding import fit, pack, unpack, values
from mreader.sketch import draw_signs, hadamard, rotate_rows, sketch_matrices

SIZES = pytest.mark.parametrize("hidden", [128, 256, 200, 72])  # whole blocks, a padded last block, less than a block


def rotate_by_definition(weights: Tensor, signs: Tensor) -> Tensor:
    padded = torch.zeros(len(weights), count_blocks(weights.shape[1]) * BLOCK, dtype=torch.float64)
    padded[:, : weights.shape[1]] = weights.double() * signs
    entries = [[(-1) ** (i & j).bit_count() for j in range(BLOCK)] for i in range(BLOCK)]
    return padded.view(len(weights), -1, BLOCK) @ torch.tensor(entries, dtype=torch.float64).t() / math.sqrt(BLOCK)


def expert(channels: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(channels + hidden)
    gate, up = torch.randn(2, channels, hidden).mul(0.02).to(dtype)
    return gate, up


def test_signs_come_from_the_recipe() -> None:
    generator = torch.Generator().manual_seed(7 + 3)
    expected = torch.randint(0, 2, (300,), generator=generator) * 2 - 1
    signs = draw_signs(300, seed=7, layer=3)
    assert signs.dtype == torch.int8
    assert torch.equal(signs.long(), expected)
    assert not torch.equal(signs, draw_signs(300, seed=7, layer=4))


def test_first_signs_never_change() -> None:
    assert draw_signs(16, 0, 0).tolist() == [-1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1, -1, -1]


def test_hadamard_is_in_sylvester_order() -> None:
    assert hadamard(4).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@SIZES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotation_follows_the_definition(hidden: int, dtype: torch.dtype) -> None:
    weights, _ = expert(9, hidden, dtype)
    signs = draw_signs(hidden, 0, 0)
    rotated = rotate_rows(weights, signs)
    assert rotated.shape == (9, count_blocks(hidden), BLOCK)
    assert rotated.dtype == torch.float32
    torch.testing.assert_close(rotated.double(), rotate_by_definition(weights, signs), rtol=0, atol=1e-7)


@SIZES
def test_rotation_keeps_inner_products(hidden: int) -> None:
    weights, inputs = expert(9, hidden, torch.float32)
    signs = draw_signs(hidden, 0, 1)
    turned = rotate_rows(weights, signs).flatten(1) @ rotate_rows(inputs, signs).flatten(1).t()
    torch.testing.assert_close(turned, weights @ inputs.t(), rtol=0, atol=1e-6)


@SIZES
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("channels", [1, 5, 31, 80])
def test_sketch_holds_the_fit_of_every_rotated_block(hidden: int, code: Code, channels: int) -> None:
    gate, up = expert(channels, hidden)
    signs = draw_signs(hidden, 0, 0)
    sketch = sketch_matrices((gate, up), signs, code)
    blocks = count_blocks(hidden)
    assert sketch.codes.shape == (2, blocks * BLOCK, code.row_bytes(channels))
    assert sketch.scales.shape == sketch.errors.shape == (2, blocks, channels)
    dtypes = (sketch.codes.dtype, sketch.scales.dtype, sketch.errors.dtype)
    assert dtypes == (torch.uint8, torch.float16, torch.bfloat16)
    for matrix, weights in enumerate((gate, up)):
        indices, scales, errors = fit(rotate_rows(weights, signs), code)
        expected = pack(indices.flatten(1).t(), code)
        # The sums of a fit run in another order here, so a weight at the border of two codes may change sides.
        assert (sketch.codes[matrix] != expected).float().mean() < 1e-3
        torch.testing.assert_close(sketch.scales[matrix].t(), scales, rtol=2**-8, atol=0)
        torch.testing.assert_close(sketch.errors[matrix].t(), errors, rtol=2**-6, atol=0)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_a_sketch_of_many_chunks_estimates_the_rotated_weights(code: Code) -> None:
    channels, hidden = 1003, 300
    gate, up = expert(channels, hidden)
    signs = draw_signs(hidden, 0, 2)
    sketch = sketch_matrices((gate, up), signs, code)
    used = math.ceil(channels / code.per_byte)
    assert not sketch.codes[:, :, used:].any()
    for matrix, weights in enumerate((gate, up)):
        levels = values(unpack(sketch.codes[matrix], code, channels), code).double().unflatten(0, (-1, BLOCK))
        rebuilt = levels * sketch.scales[matrix].double().unsqueeze(1)
        error = rebuilt - rotate_by_definition(weights, signs).permute(1, 2, 0)
        torch.testing.assert_close(sketch.errors[matrix].double(), error.square().mean(1), rtol=2**-7, atol=0)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_noise_constants_hold_for_the_sketch_of_gaussian_rows(code: Code) -> None:
    gate, up = expert(600, 512)
    sketch = sketch_matrices((gate, up), draw_signs(512, 0, 0), code)
    ratio = sketch.errors.double() / sketch.scales.double().square()
    assert ratio.mean() == pytest.approx(code.noise_read, rel=0.03)


def test_missing_channels_are_digit_zero() -> None:
    for code, largest in ((TERNARY, 2), (QUATERNARY, 3)):
        sketch = sketch_matrices(expert(1, 128), draw_signs(128, 0, 0), code)
        assert int(sketch.codes.max()) == largest


def test_the_same_bytes_on_any_number_of_threads() -> None:
    gate, up = expert(700, 384)
    signs = draw_signs(384, 0, 0)
    threads = torch.get_num_threads()
    try:
        sketches = []
        for count in (1, 2):
            torch.set_num_threads(count)
            sketches.append(sketch_matrices((gate, up), signs, TERNARY))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(sketches[0].codes, sketches[1].codes)
    assert torch.equal(sketches[0].scales, sketches[1].scales)
    assert torch.equal(sketches[0].errors, sketches[1].errors)


def test_weights_in_slices_of_a_larger_tensor() -> None:
    gate, up = expert(33, 256)
    fused = torch.stack([gate, up], dim=1).flatten(0, 1)  # rows of gate and up in turn: views with strides
    signs = draw_signs(256, 0, 0)
    straight, strided = (
        sketch_matrices((gate, up), signs, TERNARY),
        sketch_matrices((fused[::2], fused[1::2]), signs, TERNARY),
    )
    turned = sketch_matrices((gate.t().contiguous().t(), up.t().contiguous().t()), signs, TERNARY)
    assert torch.equal(straight.codes, strided.codes)
    assert (straight.codes != turned.codes).float().mean() < 1e-3
