"""The whole decode block against a slow float64 reference written straight from the formulas, and its invariances."""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert
# B block, nb = ceil(H/B) blocks, C = nb*B rotated coordinates, r rank

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor

from mreader.activations import get_activation
from mreader.errors import UsageError
from mreader.formats.codes import BLOCK, QUATERNARY, TERNARY, Code
from mreader.reader import ExpertLayer, ReadSettings, read
from mreader.sketch import draw_signs, sketch_matrices

# float32 sums of a few hundred products against float64: 1e-5, relative to outputs of order one.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
# The same sums in another order (a matrix product of another shape).
REORDERED = {"rtol": 1e-5, "atol": 2e-6}

# (E, K, H, I): H no multiple of 128, I no multiple of 5, 4 or 32; one below a block; K = E.
Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(6, 3, 192, 80), (5, 2, 100, 7), (3, 3, 130, 33)]
SETTINGS = [
    pytest.param(score, coordinates, rank, id=f"{score}-{coordinates}-rank{rank}")
    for score in ("norm", "rho", "variance")
    for coordinates, rank in ((80, 6), (80, 0), (BLOCK, 3))
]
RANK = 6


@functools.cache
def make_layer(
    shape: Shape, code: Code = TERNARY, dtype: torch.dtype = torch.float32, activation: str = "silu"
) -> ExpertLayer:
    experts, _, hidden, channels = shape
    generator = torch.Generator().manual_seed(hidden)
    gate_up = (torch.randn(experts, 2, channels, hidden, generator=generator) / hidden**0.5).to(dtype)
    down = (torch.randn(experts, channels, hidden, generator=generator) / channels**0.5).to(dtype)
    signs = draw_signs(hidden, seed=0, layer=1)
    sketches = [sketch_matrices((gate, up), signs, code) for gate, up in gate_up]
    basis = torch.linalg.svd(down.flatten(0, 1).float().T, full_matrices=False).U[:, :RANK].contiguous()
    return ExpertLayer(
        gate_up=gate_up,
        down=down,
        codes=torch.stack([sketch.codes for sketch in sketches]),
        scales=torch.stack([sketch.scales for sketch in sketches]),
        errors=torch.stack([sketch.errors for sketch in sketches]),
        signs=signs,
        down_norms=down.float().norm(dim=-1).half(),
        basis=basis.half(),
        coeffs=(down.float() @ basis).half(),
        code=code,
        activation=get_activation(activation),
    )


def make_tokens(shape: Shape, tokens: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, distinct routed experts each, and weights of either sign."""
    experts, routed, hidden, _ = shape
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).topk(routed).indices
    return x, ids, torch.randn(tokens, routed, generator=generator)


# ---------------------------------------------------------------- the reference


@functools.cache
def decode_row(shape: Shape, code: Code, e: int, m: int, j: int) -> Tensor:
    """A rotated row as the sketch has it: of each coordinate's byte j // n the digit j % n, in base len(levels)."""
    layer, n, base = make_layer(shape, code), code.per_byte, len(code.levels)
    levels = [code.levels[byte // base ** (j % n) % base] for byte in layer.codes[e, m, :, j // n].tolist()]
    scales = layer.scales[e, m, :, j].double().repeat_interleave(BLOCK)
    return torch.tensor(levels, dtype=torch.float64) * scales


def rotated(x: Tensor, signs: Tensor) -> Tensor:
    padded = torch.zeros(math.ceil(len(x) / BLOCK) * BLOCK, dtype=torch.float64)
    padded[: len(x)] = x.double() * signs
    index = range(BLOCK)
    sylvester = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in index] for i in index], dtype=torch.float64)
    return (padded.view(-1, BLOCK) @ sylvester / BLOCK**0.5).flatten()


def picked(rx: Tensor, coordinates: int) -> Tensor:
    mask = torch.zeros_like(rx)
    for b in range(0, len(rx), BLOCK):
        order = sorted(range(b, b + BLOCK), key=lambda c: (-abs(float(rx[c])), c))
        mask[order[:coordinates]] = 1
    return mask


def reference_token(
    x: Tensor, ids: list[int], weights: list[float], shape: Shape, code: Code, settings: ReadSettings
) -> Tensor:
    layer, channels = make_layer(shape, code), shape[3]
    rx = rotated(x, layer.signs)
    mask = picked(rx, settings.coordinates)
    energy = rx.square().view(-1, BLOCK).sum(1)
    energy_in = (rx * mask).square().view(-1, BLOCK).sum(1)
    energy_out = energy - energy_in
    basis, coeffs = layer.basis[:, : settings.rank].double(), layer.coeffs[..., : settings.rank].double()

    scores: dict[tuple[int, int], float] = {}
    estimated: dict[tuple[int, int], Tensor] = {}
    for s, (e, w) in enumerate(zip(ids, weights, strict=True)):
        for j in range(channels):
            ghat = (decode_row(shape, code, e, 0, j) @ (rx * mask)).requires_grad_()
            vhat = decode_row(shape, code, e, 1, j) @ (rx * mask)
            phi = layer.activation.function(ghat)
            (slope,) = torch.autograd.grad(phi, ghat)
            phi = phi.detach()
            p, d = phi * vhat, layer.down_norms[e, j].double()
            if settings.score == "norm":
                scores[s, j] = float(abs(w) * d * abs(p))
            else:
                if settings.score == "rho":
                    sg2, sv2 = ((layer.errors[e, m, :, j].double() * energy).sum() for m in range(2))
                else:
                    noise = code.noise_read * energy_in + code.noise_unread * energy_out
                    sg2, sv2 = ((layer.scales[e, m, :, j].double() ** 2 * noise).sum() for m in range(2))
                var = (slope * vhat) ** 2 * sg2 + phi**2 * sv2 + slope**2 * sg2 * sv2
                b2 = coeffs[e, j].square().sum()
                scores[s, j] = float(w**2 * (p**2 * (d**2 - b2) + var * d**2))
            estimated[s, j] = p

    kept = sorted(scores, key=lambda key: (-scores[key], key))[: settings.k]
    y = torch.zeros(len(x), dtype=torch.float64)
    for s, j in scores:
        e, w = ids[s], weights[s]
        if (s, j) in kept:
            gate, up = layer.gate_up[e, :, j].double() @ x.double()
            y += w * layer.activation.function(gate) * up * layer.down[e, j].double()
        else:
            y += w * estimated[s, j] * (basis @ coeffs[e, j])
    return y


def dense(x: Tensor, ids: Tensor, weights: Tensor, layer: ExpertLayer) -> Tensor:
    gate, up = torch.einsum("nh,nkmih->mnki", x.double(), layer.gate_up[ids].double())
    a = layer.activation.function(gate) * up * weights.double().unsqueeze(-1)
    return torch.einsum("nki,nkih->nh", a, layer.down[ids].double())


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("code", [TERNARY, QUATERNARY], ids=lambda code: code.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("score", "coordinates", "rank"), SETTINGS)
def test_the_block_is_its_definition(shape: Shape, code: Code, score: str, coordinates: int, rank: int) -> None:
    x, ids, weights = make_tokens(shape, tokens=2)
    assert (weights < 0).any()
    settings = ReadSettings(round(0.2 * shape[1] * shape[3]), coordinates, score, rank)
    y = read(x, ids, weights, make_layer(shape, code), settings)
    for n in range(len(x)):
        expected = reference_token(x[n], ids[n].tolist(), weights[n].tolist(), shape, code, settings)
        torch.testing.assert_close(y[n].double(), expected, **FLOAT32)


@pytest.mark.parametrize("k", [0, 1, 13, 14])
def test_no_channel_one_channel_all_but_one_and_all(k: int) -> None:
    shape = SHAPES[1]
    x, ids, weights = make_tokens(shape, tokens=1)
    settings = ReadSettings(k, 80, "variance", RANK)
    y = read(x, ids, weights, make_layer(shape), settings)
    expected = reference_token(x[0], ids[0].tolist(), weights[0].tolist(), shape, TERNARY, settings)
    torch.testing.assert_close(y[0].double(), expected, **FLOAT32)


@pytest.mark.parametrize("code", [TERNARY, QUATERNARY], ids=lambda code: code.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("score", ["norm", "rho", "variance"])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_all_channels_kept_is_the_dense_layer(shape: Shape, code: Code, score: str, activation: str) -> None:
    layer = make_layer(shape, code, activation=activation)
    x, ids, weights = make_tokens(shape, tokens=9)
    y = read(x, ids, weights, layer, ReadSettings(shape[1] * shape[3], 80, score, RANK))
    torch.testing.assert_close(y.double(), dense(x, ids, weights, layer), **FLOAT32)


# ---------------------------------------------------------------- dtypes


def test_the_arithmetic_is_float32_whatever_the_dtype() -> None:
    shape = SHAPES[0]
    layer = make_layer(shape, dtype=torch.bfloat16)
    x, ids, weights = make_tokens(shape, dtype=torch.bfloat16)
    settings = ReadSettings(48, 80, "variance", RANK)
    y = read(x, ids.int(), weights.bfloat16(), layer, settings)
    upcast = dataclasses.replace(layer, gate_up=layer.gate_up.float(), down=layer.down.float())
    expected = read(x.float(), ids, weights.bfloat16().float(), upcast, settings)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected.bfloat16(), rtol=0, atol=0)


# ---------------------------------------------------------------- sentinels, duplicates, ties


@pytest.mark.parametrize("sentinel", [-1, 6, 2**31 - 1])
@pytest.mark.parametrize("score", ["norm", "rho", "variance"])
def test_an_unserved_slot_is_as_if_it_were_not_there(sentinel: int, score: str) -> None:
    shape = SHAPES[0]
    layer = make_layer(shape)
    x, ids, weights = make_tokens(shape)
    settings = ReadSettings(30, 80, score, RANK)
    marked = ids.clone()
    marked[:, 1] = sentinel
    # Whatever stands in the weight of such a slot.
    weights[:, 1] = math.nan
    expected = read(x, ids[:, [0, 2]], weights[:, [0, 2]], layer, settings)
    torch.testing.assert_close(read(x, marked, weights, layer, settings), expected, **REORDERED)


def test_a_token_without_experts_and_a_call_without_tokens() -> None:
    shape = SHAPES[0]
    layer, settings = make_layer(shape), ReadSettings(30, 80, "variance", RANK)
    x, ids, weights = make_tokens(shape)
    ids[2] = -1
    assert not read(x, ids, weights, layer, settings)[2].any()
    assert read(x[:0], ids[:0], weights[:0], layer, settings).shape == (0, 192)


def test_more_channels_than_the_served_slots_have() -> None:
    shape = SHAPES[0]
    layer = make_layer(shape)
    x, ids, weights = make_tokens(shape)
    ids[:, 1:] = -1
    y = read(x, ids, weights, layer, ReadSettings(100, 80, "variance", RANK))
    torch.testing.assert_close(y.double(), dense(x, ids[:, :1], weights[:, :1], layer), **FLOAT32)


def test_ties_go_to_the_lower_slot_and_channel() -> None:
    # Every expert is the same: all slots tie, channel by channel. Sketches of whole blocks; no recovery to blur it.
    shape = SHAPES[0]
    layer = make_layer(shape)
    first = {
        name: getattr(layer, name)[:1].expand_as(getattr(layer, name))
        for name in ("gate_up", "down", "codes", "scales", "errors", "down_norms", "coeffs")
    }
    same = dataclasses.replace(layer, **first)
    x, ids, _ = make_tokens(shape, tokens=1)
    weights = torch.tensor([[1.0, -1.0, 1.0]])
    for k, expected in ((1, 1), (2, 0), (3, 1), (4, 1)):
        # Slots 0 and 1 cancel; the channel of the third tie shows again, and a fourth starts the next channel.
        y = read(x, ids, weights, same, ReadSettings(k, 128, "norm", 0))
        one = read(x, ids[:, :1], weights[:, :1], same, ReadSettings(1, 128, "norm", 0))
        if k < 4:
            torch.testing.assert_close(y, expected * one, **REORDERED)
        else:
            two = read(x, ids[:, :1], weights[:, :1], same, ReadSettings(2, 128, "norm", 0))
            torch.testing.assert_close(y, two, **REORDERED)


# ---------------------------------------------------------------- invariances


@pytest.mark.parametrize("score", ["norm", "rho", "variance"])
def test_a_token_does_not_depend_on_the_others(score: str) -> None:
    shape = SHAPES[0]
    layer, settings = make_layer(shape), ReadSettings(30, 80, score, RANK)
    x, ids, weights = make_tokens(shape, tokens=40)
    together = read(x, ids, weights, layer, settings)
    alone = torch.cat([read(x[n : n + 1], ids[n : n + 1], weights[n : n + 1], layer, settings) for n in range(40)])
    torch.testing.assert_close(together, alone, **REORDERED)
    flipped = read(x.flip(0), ids.flip(0), weights.flip(0), layer, settings).flip(0)
    torch.testing.assert_close(flipped, together, **REORDERED)


def test_the_order_of_slots_does_not_matter() -> None:
    shape = SHAPES[0]
    layer, settings = make_layer(shape), ReadSettings(30, 80, "variance", RANK)
    x, ids, weights = make_tokens(shape)
    expected = read(x, ids, weights, layer, settings)
    torch.testing.assert_close(read(x, ids.flip(1), weights.flip(1), layer, settings), expected, **REORDERED)


def test_a_reader_touches_its_own_experts_only() -> None:
    shape = SHAPES[0]
    layer, settings = make_layer(shape), ReadSettings(30, 80, "rho", RANK)
    x, _, weights = make_tokens(shape)
    ids = torch.tensor([[0, 2, 5]]).expand(5, 3)
    names = ("gate_up", "down", "scales", "errors", "down_norms", "coeffs")
    poisoned = {name: getattr(layer, name).clone() for name in names}
    for tensor in poisoned.values():
        tensor[[1, 3, 4]] = math.nan
    y = read(x, ids, weights, dataclasses.replace(layer, **poisoned), settings)
    torch.testing.assert_close(y, read(x, ids, weights, layer, settings), rtol=0, atol=0)


def test_negative_weights_turn_the_output_around() -> None:
    shape = SHAPES[0]
    layer = make_layer(shape)
    x, ids, weights = make_tokens(shape)
    for score in ("norm", "rho", "variance"):
        settings = ReadSettings(30, 80, score, RANK)
        torch.testing.assert_close(read(x, ids, -weights, layer, settings), -read(x, ids, weights, layer, settings))


def test_reading_more_comes_closer() -> None:
    shape = SHAPES[0]
    layer = make_layer(shape)
    x, ids, weights = make_tokens(shape, tokens=40)
    exact = dense(x, ids, weights, layer)
    settings = [ReadSettings(k, 80, "variance", RANK) for k in (20, 60, 120, 240)]
    errors = [float((read(x, ids, weights, layer, setting) - exact).norm()) for setting in settings]
    assert errors == sorted(errors, reverse=True)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("k", "coordinates", "score", "rank", "cause"),
    [
        (-1, 80, "norm", 0, "k is -1"),
        (5, 0, "norm", 0, "0 coordinates"),
        (5, 129, "norm", 0, "129 coordinates"),
        (5, 80, "best", 0, "unknown score 'best'"),
        (5, 80, "norm", -1, "rank is -1"),
    ],
)
def test_settings_out_of_range_are_refused(k: int, coordinates: int, score: str, rank: int, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        ReadSettings(k, coordinates, score, rank)


def test_a_rank_above_the_stored_one_is_refused() -> None:
    shape = SHAPES[0]
    with pytest.raises(UsageError, match="rank 6 is stored"):
        read(*make_tokens(shape), make_layer(shape), ReadSettings(5, 80, "norm", 7))
