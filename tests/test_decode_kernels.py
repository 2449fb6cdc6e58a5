"""The sparse kernels, stage by stage and as a whole, against their formulas in float64, at odd shapes.

Every stage is compared on what the stages before it made: a channel that rounding moves across the border of the
selection changes the output by more than any error of arithmetic, and is no error itself.
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert, nb blocks of 128
# C = nb * 128 coordinates, T tiles of 64 channels

import functools
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mreader.activations import _FUNCTIONS, get_activation
from mreader.errors import UnsupportedError, UsageError
from mreader.formats.codes import BLOCK, CODES, QUATERNARY, TERNARY, Code
from mreader.formats.coding import pack, unpack, values
from mreader.kernels import decode as module
from mreader.kernels import exact_kernel, screen_kernel
from mreader.kernels.activation_kernel import activate, activation_kind
from mreader.kernels.decode import (
    Blocks,
    DecodeLayer,
    Gate,
    Router,
    Stages,
    decode,
    decode_routed,
    decode_share,
    repack,
    tuned_blocks,
)
from mreader.kernels.layout import GPU, TILE, Tiles, from_tiles, to_norms, to_tiles
from mreader.kernels.route import MOST_EXPERTS, rms_norm, route
from mreader.kernels.select import top_k_mask
from mreader.kernels.select_kernel import certain_from
from mreader.kernels.tuning import LayerShape, known_tuning, trial
from mreader.reader import ExpertLayer, ReadSettings, read
from mreader.sketch import draw_signs, hadamard, sketch_matrices

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STORED_RANK = 8
# The output is rounded once: at 2^-11 (FP16) and 2^-9 (BF16, which the interpreter cuts off at 2^-8 instead). float32:
# sums of up to 2,000 products.
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SUMS = ROUNDING[torch.float32]  # whatever the weights are, the kernels sum in float32
RECOVERY = 3e-4  # estimates are off by 0.2 %, most of that by chance, and what is recovered is a part of the output


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """What one run of the stages is made of.

    ids:            (N, K) - routed experts of 0..E-1, and sentinels
    shape:          E, H, I
    dtype:          of the token and the weights
    routing_dtypes: of ids and routing weights
    """

    name: str
    ids: tuple[tuple[int, ...], ...]
    shape: tuple[int, int, int]
    settings: ReadSettings
    code: Code
    dtype: torch.dtype
    blocks: Blocks
    activation: str = "silu"
    routing_dtypes: tuple[torch.dtype, torch.dtype] = (torch.int64, torch.float32)

    @property
    def k(self) -> int:
        return min(self.settings.k, len(self.ids[0]) * self.shape[2])


FOUR = Blocks(screen_parts=1, screen_warps=4, select_chunk=32, exact_channels=8, finish_columns=64)
EIGHT = Blocks(
    screen_parts=2,
    screen_warps=8,
    screen_words=4,
    screen_loads=40,
    score_channels=64,
    score_warps=2,
    exact_channels=8,
    finish_columns=64,
)

CASES = [
    # Sentinels on both sides of 0..E-1, a token without any expert.
    Case(
        "three-tokens",
        ((4, 0), (-1, 3), (5, -1)),
        (5, 192, 80),
        ReadSettings(40, 37, "variance", 8),
        TERNARY,
        torch.bfloat16,
        FOUR,
    ),
    # 80 coordinates, as converters store; 6 channels in the last tile, 2 columns in the last block; an expert twice.
    Case(
        "defaults",
        ((3, 3),),
        (5, 130, 70),
        ReadSettings(30, 80, "variance", 8),
        QUATERNARY,
        torch.float16,
        EIGHT,
        "gelu_pytorch_tanh",
        (torch.int32, torch.bfloat16),
    ),
    # A rank that is no power of two, below the stored one; programs of three steps, the last one partly empty; recovery
    # in pieces, likewise; parts of 16 coordinates, the third of 5, the last of none; 2 words a lane.
    Case(
        "steps",
        ((2, 0),),
        (3, 192, 70),
        ReadSettings(33, 37, "rho", 5),
        TERNARY,
        torch.float16,
        replace(
            FOUR, exact_channels=2, exact_steps=3, screen_parts=4, screen_words=2, screen_loads=8, recovery_rows=32
        ),
        "gelu",
    ),
    # More blocks than a program has side by side, and no multiple of them; all coordinates, a few at a time.
    Case(
        "all-coordinates",
        ((1,),),
        (2, 580, 66),
        ReadSettings(20, 128, "rho", 3),
        QUATERNARY,
        torch.float32,
        replace(FOUR, screen_loads=24, screen_registers=80),
    ),
    # Six tiles, strips of four: the second is half empty.
    Case(
        "two-strips",
        ((1, 0),),
        (2, 128, 321),
        ReadSettings(60, 80, "variance", 8),
        TERNARY,
        torch.bfloat16,
        Blocks(),
    ),
    # One coordinate a block, no recovery, fewer channels than a tile.
    Case("one-coordinate", ((0, 1, 6),), (6, 130, 10), ReadSettings(7, 1, "norm", 0), TERNARY, torch.float32, EIGHT),
    # Parts that begin behind the last coordinate picked; one word a lane.
    Case(
        "norm-quaternary",
        ((2,),),
        (3, 128, 64),
        ReadSettings(9, 37, "norm", 8),
        QUATERNARY,
        torch.bfloat16,
        replace(FOUR, screen_parts=8, screen_words=1, screen_loads=8, score_channels=64),
        "relu",
    ),
]
_REAL_IDS = tuple(tuple((3 * n + 2 * s) % 16 for s in range(8)) for n in range(3))
REAL = [
    Case(name, _REAL_IDS, shape, ReadSettings(704, 80, "variance", 8), code, torch.bfloat16, Blocks(), activation)
    for name, shape, code, activation in [
        ("qwen3-30b-a3b", (16, 2048, 768), TERNARY, "silu"),
        ("qwen3-30b-a3b-quaternary", (16, 2048, 768), QUATERNARY, "silu"),
        ("gemma4-26b", (16, 2816, 704), TERNARY, "gelu_pytorch_tanh"),  # 22 blocks: no multiple of 4 or 8
    ]
]
THREE_TOKENS = CASES[0]


def make_layer(case: Case, seed: int = 0) -> ExpertLayer:
    """Gaussian weights that keep g . x near 1, sketched as a converter does; orthonormal directions at random."""
    E, H, I = case.shape
    gate_up = (gaussian(E, 2, I, H, seed=seed) / H**0.5).to(case.dtype)
    down = (gaussian(E, I, H, seed=seed + 1) / I**0.5).to(case.dtype)
    signs = draw_signs(H, seed=0, layer=0).to(DEVICE)
    sketch = sketch_matrices(gate_up.flatten(0, 1).unbind(), signs, case.code)
    basis = torch.linalg.qr(gaussian(H, STORED_RANK, seed=seed + 2)).Q
    return ExpertLayer(
        gate_up=gate_up,
        down=down,
        codes=sketch.codes.unflatten(0, (E, 2)),
        scales=sketch.scales.unflatten(0, (E, 2)),
        errors=sketch.errors.unflatten(0, (E, 2)),
        signs=signs,
        down_norms=down.float().norm(dim=-1).half(),
        basis=basis.half(),
        coeffs=(down.float() @ basis).half(),
        code=case.code,
        activation=get_activation(case.activation),
    )


def make_inputs(case: Case, seed: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids, weights; routing weights of both signs."""
    ids_dtype, weights_dtype = case.routing_dtypes
    x = gaussian(len(case.ids), case.shape[1], seed=seed).to(case.dtype)
    weights = gaussian(len(case.ids), len(case.ids[0]), seed=seed + 1).to(weights_dtype)
    return x, torch.tensor(case.ids, dtype=ids_dtype, device=DEVICE), weights


# ---------------------------------------------------------------- the formulas


@dataclass(frozen=True)
class Formula:
    """The definition of docs/reader.md in float64, slot by slot. Slots that no expert serves hold zeros.

    rx:     (N, nb, 128)
    listed: (N, nb, coordinates) int64 - the largest |Rx| of each block, in order
    picked: (N, nb, 128) bool - the same
    p:      (N, K, I) - w_e phi(ghat_j) vhat_j
    score:  (N, K, I)
    """

    rx: Tensor
    listed: Tensor
    picked: Tensor
    p: Tensor
    score: Tensor


def served(ids: Tensor, experts: int) -> Iterator[tuple[int, int, int]]:
    """Token, slot and expert."""
    for n, token_ids in enumerate(ids.tolist()):
        for s, e in enumerate(token_ids):
            if 0 <= e < experts:
                yield n, s, e


def rotate_by_definition(x: Tensor, signs: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x.double() * signs, (0, -x.shape[1] % BLOCK))
    blocks: Tensor = padded.unflatten(1, (-1, BLOCK))
    return blocks @ hadamard(BLOCK).to(x.device).double() / math.sqrt(BLOCK)


def largest(numbers: Tensor, number: int) -> Tensor:
    """(..., number) int64: where the largest of the last axis are, in order; ties to the lower index."""
    return torch.sort(numbers, dim=-1, descending=True, stable=True).indices[..., :number]


def formula(x: Tensor, ids: Tensor, weights: Tensor, layer: ExpertLayer, settings: ReadSettings) -> Formula:
    E, I, _ = layer.down.shape
    rx = rotate_by_definition(x, layer.signs)
    listed = largest(rx.abs(), settings.coordinates)
    picked = torch.zeros_like(rx, dtype=torch.bool).scatter(-1, listed, True)
    seen, missed = torch.where(picked, rx, 0.0), torch.where(picked, 0.0, rx)
    energy_in, energy_out = seen.square().sum(-1), missed.square().sum(-1)
    p, score = (rx.new_zeros(*ids.shape, I) for _ in range(2))
    for n, s, e in served(ids, E):
        w, code, scales = weights[n, s].double(), layer.code, layer.scales[e].double()
        levels = values(unpack(layer.codes[e], code, I), code).double()
        gate, up = seen[n].flatten() @ (levels * scales.repeat_interleave(BLOCK, 1))
        phi, slope = layer.activation.function(gate), layer.activation.derivative(gate)
        p[n, s] = w * phi * up
        norm, recovered = layer.down_norms[e].double(), layer.coeffs[e, :, : settings.rank].double().square().sum(-1)
        if settings.score == "norm":
            score[n, s] = p[n, s].abs() * norm
            continue
        if settings.score == "rho":
            gate_error, up_error = (energy_in[n] + energy_out[n]) @ layer.errors[e].double()
        else:
            gate_error, up_error = (code.noise_read * energy_in[n] + code.noise_unread * energy_out[n]) @ scales**2
        variance = (slope * up) ** 2 * gate_error + phi**2 * up_error + slope**2 * gate_error * up_error
        score[n, s] = p[n, s] ** 2 * (norm**2 - recovered) + w**2 * variance * norm**2
    return Formula(rx, listed, picked, p, score)


def exact_by_definition(x: Tensor, ids: Tensor, weights: Tensor, kept: Tensor, layer: ExpertLayer) -> Tensor:
    """y = sum over kept j of w_e phi(g_j . x) (v_j . x) d_j."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for n, s, e in served(ids, len(layer.down)):
        gate, up = layer.gate_up[e].double() @ x[n].double()
        a = torch.where(kept[n, s], layer.activation.function(gate) * up, 0.0)
        y[n] += weights[n, s].double() * (a @ layer.down[e].double())
    return y


def left_by_definition(p: Tensor, ids: Tensor, kept: Tensor, layer: ExpertLayer, rank: int) -> Tensor:
    """(N, rank): sum over skipped j of w_e p_j b_j."""
    left = p.new_zeros(len(ids), rank, dtype=torch.float64)
    for n, s, e in served(ids, len(layer.down)):
        left[n] += torch.where(kept[n, s], 0.0, p[n, s].double()) @ layer.coeffs[e, :, :rank].double()
    return left


# ---------------------------------------------------------------- a run


@dataclass(frozen=True)
class Run:
    """The stages of a case, run one after the other, and their inputs.

    estimated: (N, K, I) float32 - w_e p_j as the score left them
    """

    case: Case
    layer: ExpertLayer
    x: Tensor
    ids: Tensor
    weights: Tensor
    stages: Stages
    estimated: Tensor
    formula: Formula

    @property
    def served(self) -> Tensor:
        """(N, K) bool."""
        return (self.ids >= 0) & (self.ids < len(self.layer.down))

    @property
    def picked(self) -> Tensor:
        """(N, nb, COORDINATES) int64: the coordinates of a block, in the order of the list."""
        return (self._listed >> 16).long()

    @property
    def picked_values(self) -> Tensor:
        """(N, nb, COORDINATES) float64: x' = 256 hi + lo of each."""
        lo, hi, _, _ = self._listed.unsqueeze(-1).view(torch.int8).double().unbind(-1)
        return 256 * hi + lo

    @property
    def keys(self) -> Tensor:
        """(N, K, I) int32."""
        return self.stages.keys

    @property
    def score(self) -> Tensor:
        """(N, K, I) float64: what the keys say; -1 where there is no expert."""
        numbers = (self.keys - 1).clamp_min(0).view(torch.float32).double()
        return torch.where(self.keys > 0, numbers, -1.0)

    @functools.cached_property
    def kept(self) -> Tensor:
        """(N, K, I) bool."""
        return kept_by_lists(self.stages)

    @property
    def _listed(self) -> Tensor:
        """(N, nb, COORDINATES) int32."""
        return self.stages.picked[..., : self.case.settings.coordinates].contiguous()


def kept_by_lists(stages: Stages) -> Tensor:
    """(N, K, I) bool: what the lists name; each entry once, with its row and weight, -1 behind.

    Some of the largest come in order, the others by rank.
    """
    kept = torch.zeros(stages.tokens, stages.candidates, dtype=torch.bool, device=DEVICE)
    served = ((stages.ids >= 0) & (stages.ids < stages.experts)).repeat_interleave(stages.channels, 1)
    channel = torch.arange(stages.channels, device=DEVICE).repeat(stages.slots)
    rows = stages.ids.repeat_interleave(stages.channels, 1) * stages.channels + channel
    weights = stages.weights.float().repeat_interleave(stages.channels, 1)
    for n, keys in enumerate(stages.keys.flatten(1).tolist()):
        row, weight = stages.rows[n].view(torch.int32).view(-1, 2).unbind(1)
        number = int((row >= 0).sum())
        assert (row[number:] == -1).all()
        named: dict[tuple[int, float], list[int]] = {}
        for place, entry in enumerate(zip(rows[n].tolist(), weights[n].tolist(), strict=True)):
            if served[n, place]:
                named.setdefault(entry, []).append(place)
        listed = zip(row[:number].tolist(), weight[:number].view(torch.float32).tolist(), strict=True)
        places = [named[entry].pop(0) for entry in listed]
        falls = [at for at in range(1, number) if places[at] < places[at - 1]]
        in_order, by_rank = places[: min(falls, default=number)], places[min(falls, default=number) :]
        assert by_rank == sorted(by_rank, key=lambda place: (-keys[place], place))
        assert min((keys[place] for place in in_order), default=0) >= max((keys[place] for place in by_rank), default=0)
        kept[n, places] = True
    return kept.view(stages.keys.shape)


@functools.cache
def run_of(case: Case) -> Run:
    layer = make_layer(case)
    x, ids, weights = make_inputs(case)
    stages = Stages(x, ids, weights, repack(layer), case.settings, case.blocks)
    stages.rotate()
    stages.screen()
    stages.score()
    estimated = stages.estimates.clone()
    stages.select()
    stages.exact()
    stages.finish()
    return Run(case, layer, x, ids, weights, stages, estimated, formula(x, ids, weights, layer, case.settings))


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.gpu) for case in REAL)],
    ids=lambda case: case.name,
)
def run(request: pytest.FixtureRequest) -> Run:
    return run_of(request.param)


def relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    return float((found.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- rotate


def test_the_largest_coordinates_are_listed_the_largest_first(run: Run) -> None:
    """Each once. Two within 2^-16 of each other may change places."""
    size = run.formula.rx.abs()
    expected = size.gather(-1, run.formula.listed)
    torch.testing.assert_close(size.gather(-1, run.picked), expected, rtol=2**-15, atol=0)
    assert (run.picked.sort(-1).values.diff() > 0).all()


def test_listed_values_are_rx_on_the_block_s_scale(run: Run) -> None:
    """x' / 2^e = Rx, but for the half of an integer, and 1e-6 of the largest by sums of 128 in float32."""
    rx = run.formula.rx.gather(-1, run.picked)
    x, unit = run.picked_values, run.stages.block_info[:, 0, :, None].double() * 2**-7
    top = x[..., 0].abs()
    assert ((top >= 2**13) & (top <= 2**14)).all()  # the top may be rounded up to 2^14
    slack = unit / 2 + rx.abs().amax(-1, keepdim=True) * 1e-6
    assert ((x * unit - rx).abs() <= slack).all()


def test_behind_the_last_coordinate_stands_the_largest_times_nothing(run: Run) -> None:
    """The screen reads on to a multiple of its steps: rows that it has read, and they change no sum."""
    behind = run.stages.picked[..., run.case.settings.coordinates :]
    assert torch.equal(behind, (run.picked[..., :1] << 16).int().expand_as(behind))


def test_block_info_sums_what_is_listed_and_the_energies(run: Run) -> None:
    """The sum is that of the rounded numbers, which the codes meet: the zero point goes out exactly."""
    _, total, energy = run.stages.block_info.double().unbind(1)
    assert torch.equal(total, run.picked_values.sum(-1))
    known, code = run.case.settings.score == "rho", run.case.code
    factors = (1.0, 1.0) if known else (code.noise_read, code.noise_unread)
    expected = run.formula.rx.square() * torch.where(run.formula.picked, *factors)
    torch.testing.assert_close(energy, expected.sum(-1), rtol=1e-5, atol=0)


def rotate_tokens(x: Tensor, coordinates: int) -> Run:
    """Only the first stage, of tokens (N, 192) of a layer of one expert."""
    case = replace(
        THREE_TOKENS, ids=((0,),) * len(x), shape=(1, 192, 10), settings=ReadSettings(1, coordinates, "norm", 0)
    )
    layer = make_layer(replace(case, dtype=x.dtype))
    _, ids, weights = make_inputs(case)
    stages = Stages(x, ids, weights, repack(layer), case.settings, case.blocks)
    stages.picked.fill_(-1)
    stages.rotate()
    return Run(case, layer, x, ids, weights, stages, x, formula(x, ids, weights, layer, case.settings))


@pytest.mark.parametrize("coordinates", [1, 37, 128])
def test_ties_go_to_the_lower_coordinate(coordinates: int) -> None:
    """A token of one number has |Rx| all alike in its block, and zeros in the other; a sum of two has halves alike."""
    x = torch.zeros(3, 192, device=DEVICE)
    x[0, 5], x[1, 150], x[1, 190] = 3.0, 1.0, -1.0
    run = rotate_tokens(x, coordinates)
    assert torch.equal(run.picked[0], torch.arange(coordinates, device=DEVICE).expand(2, -1))
    assert torch.equal(run.picked[1:], run.formula.listed[1:])


@pytest.mark.parametrize("size", [1e-24, 1e-12, 1e15])
def test_no_size_of_a_token_loses_digits(size: float) -> None:
    run = rotate_tokens(gaussian(2, 192, seed=3) * size, 37)
    test_the_largest_coordinates_are_listed_the_largest_first(run)
    test_listed_values_are_rx_on_the_block_s_scale(run)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_a_token_that_is_not_finite_lists_coordinates_all_the_same(what: float) -> None:
    """Else the screen would read where nothing is, and an overflow in one request would end those of all others."""
    x = gaussian(2, 192, seed=3)
    x[0, 7] = what
    picked = rotate_tokens(x, 37).picked
    assert ((picked >= 0) & (picked < BLOCK)).all()


# ---------------------------------------------------------------- route


def stages_with(router: Router, layer: DecodeLayer, case: Case) -> Stages:
    """Stages whose experts are chosen by `rotate`, of the case's tokens."""
    x, ids, weights = make_inputs(case)
    ids, weights = torch.full_like(ids, -7, dtype=torch.int32), torch.full_like(weights, 9.0, dtype=torch.float32)
    return Stages(x, ids, weights, layer, case.settings, case.blocks, router=router)


def route_tokens(logits: Tensor, routed: int, *, renormalize: bool = True) -> Stages:
    """Only the first stage, of a small layer with so many experts."""
    case = replace(THREE_TOKENS, ids=((0,) * routed,) * len(logits), shape=(logits.shape[1], 192, 3))
    stages = stages_with(Router(logits, routed, renormalize), repack(make_layer(case)), case)
    stages.rotate()
    return stages


@pytest.mark.parametrize(("experts", "routed"), [(1, 1), (3, 3), (60, 4), (128, 8), (200, 1), (256, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_are_the_router_s(experts: int, routed: int, dtype: torch.dtype, renormalize: bool) -> None:
    """Weights are off by a rounding of each of some exponentials, their sum and a division: 1e-6. BF16 has ties."""
    logits = (3 * gaussian(3, experts, seed=experts)).to(dtype)
    stages = route_tokens(logits, routed, renormalize=renormalize)
    ids, weights = route(logits, routed, renormalize)
    assert torch.equal(stages.ids.long(), ids)
    torch.testing.assert_close(stages.weights, weights, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 200.0])
def test_logits_of_any_size_and_layout_are_read_right(size: float) -> None:
    logits = size * gaussian(60, 3, seed=1).T
    assert not logits.is_contiguous()
    stages, (ids, weights) = route_tokens(logits, 4), route(logits, 4, renormalize=True)
    assert torch.equal(stages.ids.long(), ids)
    torch.testing.assert_close(stages.weights, weights, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 5), (3, 6), (4, 5)])
def test_logits_of_other_tokens_or_experts_are_refused(shape: tuple[int, int]) -> None:
    router = Router(torch.zeros(shape, device=DEVICE), 2, renormalize=True)
    with pytest.raises(UsageError, match=f"logits of shape {re.escape(str(shape))} for 3 tokens and 5 experts"):
        stages_with(router, repack(make_layer(THREE_TOKENS)), THREE_TOKENS)


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, 0.0, -1.0], [-2.0, 5.0, -2.0, -2.0, 5.0]], device=DEVICE)
    assert route_tokens(logits, 3).ids.tolist() == [[0, 1, 2], [1, 4, 0]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_logits_that_are_no_numbers_choose_as_many_experts() -> None:
    """Each once, so that what follows stays within the layer's tensors; those behind the last one are none, -1."""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[nan] * 5, [-nan, 1.0, -inf, inf, nan], [-inf] * 5], device=DEVICE)
    for row in route_tokens(logits, 5).ids.tolist():
        named = [expert for expert in row if expert >= 0]
        assert set(row) <= {-1, 0, 1, 2, 3, 4}
        assert len(named) == len(set(named))
    assert route_tokens(logits[2:], 2).ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_experts_chosen_on_the_way_are_served_like_others(case: Case) -> None:
    """To the bit: the kernels behind the first one know no difference, and that one does nothing else to x."""
    layer, (x, ids, _) = repack(make_layer(case)), make_inputs(case)
    logits, routed = gaussian(len(x), case.shape[0], seed=1).to(case.dtype), min(ids.shape[1], case.shape[0])
    case = replace(case, ids=tuple(row[:routed] for row in case.ids))
    router = Router(logits, routed, renormalize=True)
    stages = stages_with(router, layer, case)
    y = stages.run()
    assert torch.equal(y, decode(x, stages.ids, stages.weights, layer, case.settings, case.blocks))
    assert torch.equal(y, decode_routed(x, router, layer, case.settings, case.blocks))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_gate_and_the_norm_before_it_are_gone_through_on_the_way(case: Case) -> None:
    """Logits are sums in float32, rounded once to x's dtype; what follows has the bits that it has with them given.

    Float32 rounds a mean and a root in another order than torch: of normed numbers some are the next one, an epsilon
    away, and logits of H of those as much as their sum without signs says. The programs count who is through, and leave
    no trace of it: a second call finds what the first one found.
    """
    layer, (x, ids, _) = repack(make_layer(case)), make_inputs(case)
    (E, H, _), routed = case.shape, min(ids.shape[1], case.shape[0])
    case, epsilon = replace(case, ids=tuple(row[:routed] for row in case.ids)), torch.finfo(x.dtype).eps
    rows, norm = (gaussian(E, H, seed=1) / math.sqrt(H)).to(case.dtype), (1 + 0.1 * gaussian(H, seed=2)).to(case.dtype)
    for _ in range(2):
        logits = torch.full((len(x), E), math.nan).to(x)
        router = Router(logits, routed, renormalize=True, gate=Gate(rows, norm, 1e-3))
        stages = stages_with(router, layer, case)
        y, normed = stages.run(), stages.normed
        torch.testing.assert_close(normed, rms_norm(x, norm, 1e-3), rtol=2 * epsilon, atol=0)
        exact = normed.double() @ rows.double().mT
        torch.testing.assert_close(
            logits.double(), exact, rtol=2 * epsilon, atol=2 * epsilon * float((normed.abs() @ rows.abs().mT).max())
        )
        assert torch.equal(stages.ids.long(), route(logits, routed, renormalize=True)[0])
        given = replace(router, gate=None)
        assert torch.equal(y, decode_routed(normed, given, layer, case.settings, case.blocks))
        assert not layer.arrived.any()


def test_a_norm_is_rounded_before_its_weights_and_behind_them() -> None:
    """In FP16, which the interpreter rounds; a root that is the next float32 changes one number in hundreds."""
    case = replace(THREE_TOKENS, dtype=torch.float16)
    layer, (x, _, _) = repack(make_layer(case)), make_inputs(case)
    E, H, _ = case.shape
    rows, norm = gaussian(E, H, seed=1).half(), (1 + 0.1 * gaussian(H, seed=2)).half()
    stages = stages_with(Router(x.new_empty(len(x), E), 2, renormalize=True, gate=Gate(rows, norm, 1e-3)), layer, case)
    stages.rotate()
    assert (stages.normed == rms_norm(x, norm, 1e-3)).float().mean() > 0.98


@pytest.mark.parametrize(
    ("tokens", "rows", "norm"), [(3, (5, 191), 192), (3, (4, 192), 192), (3, (5, 192), 191), (129, (5, 192), 192)]
)
def test_gates_of_other_shapes_or_for_too_many_tokens_are_refused(
    tokens: int, rows: tuple[int, int], norm: int
) -> None:
    case = replace(THREE_TOKENS, ids=((0, 1),) * tokens)
    gate = Gate(torch.zeros(rows, device=DEVICE), torch.zeros(norm, device=DEVICE), 1e-6)
    router = Router(torch.zeros(tokens, 5, device=DEVICE), 2, renormalize=True, gate=gate)
    with pytest.raises(
        UsageError, match=re.escape(f"a gate of shape {rows} and a norm of ({norm},) for {tokens} tokens")
    ):
        stages_with(router, repack(make_layer(case)), case)


def test_padding_has_no_experts() -> None:
    case = replace(THREE_TOKENS, ids=((0, 1),) * 3)
    layer, x = repack(make_layer(case)), make_inputs(case)[0]
    router = Router(gaussian(3, 5, seed=2), 2, renormalize=True)
    padded = replace(router, padding=torch.tensor([False, True, False], device=DEVICE))
    stages = stages_with(padded, layer, case)
    y, expected = stages.run(), decode_routed(x, router, layer, case.settings, case.blocks)
    assert stages.ids[1].tolist() == [-1, -1]
    assert not y[1].any()
    assert torch.equal(y[::2], expected[::2])


@pytest.mark.parametrize(("experts", "routed"), [(MOST_EXPERTS + 1, 2), (3, 4), (3, 0)])
def test_routers_that_the_kernels_do_not_compute_are_refused(experts: int, routed: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{routed} of {experts} experts"):
        Router(torch.zeros(1, experts), routed, renormalize=False)


def test_no_tokens_have_no_experts() -> None:
    layer = repack(make_layer(THREE_TOKENS))
    x, logits = torch.empty(0, 192, device=DEVICE), torch.empty(0, 5, device=DEVICE)
    assert decode_routed(x, Router(logits, 2, renormalize=True), layer, THREE_TOKENS.settings).shape == (0, 192)


# ---------------------------------------------------------------- screen and score


def test_sums_of_codes_are_those_of_the_picked_coordinates(run: Run) -> None:
    """sum over the parts = sum over picked c of (code - zero) (Rx)_c, exact but for x' and the FP16 that is stored."""
    stages, layer = run.stages, run.layer
    channels, nb = stages.channels, stages.nb
    unit = stages.block_info[:, 0].amax(1).double()
    seen = torch.where(run.formula.picked, run.formula.rx, 0.0)
    for n, s, e in served(run.ids, len(layer.down)):
        codes = values(unpack(layer.codes[e], layer.code, channels), layer.code).double() / layer.code.levels[-1]
        step = (layer.code.levels[1] - layer.code.levels[0]) / layer.code.levels[-1]
        expected = torch.einsum("bc,mbcj->mbj", seen[n], codes.unflatten(1, (nb, BLOCK))) / step
        # (nb, parts, tiles, 2, 64) -> (2, nb, channels)
        found = stages.sums[n, s].double().sum(1).permute(2, 0, 1, 3).flatten(2)[..., :channels] * unit[n]
        assert ((found - expected).abs() <= 1e-3 * expected.abs().max()).all()


def test_estimates_are_the_formula(run: Run) -> None:
    """Sums of each block are stored as FP16, rounded at 2^-12, and x' at 2^-14: 0.2 % of the largest of the token."""
    expected = run.formula.p
    top = expected.abs().amax((1, 2), keepdim=True)
    assert ((run.estimated.double() - expected).abs() <= 2e-3 * top).all()


def test_scores_are_within_a_percent_where_they_matter(run: Run) -> None:
    """Of itself or of the k-th largest, whichever is more: no error as small can lift the others over the border.

    Far below it gate and up are small differences of large sums, so that what FP16 rounds away is much of what is left.
    """
    expected = run.formula.score
    border = expected.flatten(1).topk(run.case.k).values[:, -1]
    matters = expected.clamp_min(border.view(-1, 1, 1))
    error = ((run.score - expected).abs() / matters)[run.served].flatten()
    assert float(error.max()) < 0.01
    assert float((error > 4e-3).float().mean()) < 0.01


def test_a_program_may_have_as_many_channels_as_blocks() -> None:
    """As where H is 4096."""
    settings = ReadSettings(9, 37, "variance", STORED_RANK)
    run = run_of(Case("thirty-two", ((1,),), (2, 32 * BLOCK, 20), settings, TERNARY, torch.bfloat16, FOUR))
    test_estimates_are_the_formula(run)
    test_scores_are_within_a_percent_where_they_matter(run)


def test_slots_without_expert_have_no_score_and_no_estimate(run: Run) -> None:
    assert (run.keys[~run.served] == 0).all()
    assert (run.keys[run.served] > 0).all()
    assert (run.estimated[~run.served] == 0).all()


def histogram_of(keys: Tensor) -> Tensor:
    """(N, M) -> (N, COARSE + FINE): keys by upper bits; coarse bins first, then fine ones, shared by other octaves.

    A score of 0 (key 1) and no expert (key 0) have no fine bin.
    """
    sizes = module._HISTOGRAM
    coarse = [torch.bincount(row >> sizes["COARSE_SHIFT"], minlength=sizes["COARSE"]) for row in keys]
    fine = [
        torch.bincount((row[row > 1] >> sizes["FINE_SHIFT"]) % sizes["FINE"], minlength=sizes["FINE"]) for row in keys
    ]
    return torch.cat([torch.stack(coarse), torch.stack(fine)], 1).int()


def test_the_histogram_counts_every_candidate(run: Run) -> None:
    assert torch.equal(run.stages.histogram, histogram_of(run.keys.flatten(1)))


# ---------------------------------------------------------------- select


def test_exactly_k_are_kept_the_largest_of_all_slots(run: Run) -> None:
    """Unless no expert serves them: then there is nothing to read."""
    expected = top_k_mask(run.keys.flatten(1).double(), run.case.k).view_as(run.kept)
    assert torch.equal(run.kept, expected & run.served.unsqueeze(-1))


def test_kept_channels_leave_nothing_to_recover(run: Run) -> None:
    assert torch.equal(run.stages.estimates, run.estimated.masked_fill(run.kept, 0.0))


def test_no_skipped_channel_has_a_score_above_a_kept_one(run: Run) -> None:
    """By the formula's scores, each within 2 % of the kernel's."""
    score = torch.where(run.served.unsqueeze(-1), run.formula.score, -1.0)
    lowest = score.masked_fill(~run.kept, math.inf).amin((1, 2))
    highest = score.masked_fill(run.kept, -1.0).amax((1, 2))
    assert (lowest * 1.04 >= highest).all()


SLOTS, CHANNELS = 3, 37


def random_keys(low: int, high: int) -> Tensor:
    generator = torch.Generator().manual_seed(high)
    return torch.randint(low, high, (2, SLOTS, CHANNELS), generator=generator).int()


def keys_without_middle_slot() -> Tensor:
    keys = random_keys(1, 1 << 30)
    keys[:, 1] = 0
    return keys


def keys_of_two_windows() -> Tensor:
    """Keys of four fine bins, which one in ten of 32 octaves below shares: fine counts are too large in every bin."""
    keys = random_keys(1 << 29, (1 << 29) + (1 << 16))
    return torch.where(random_keys(0, 10) > 0, keys, keys - (32 << 23))


def keys_of_a_coincidence() -> Tensor:
    """20 scores of 0, in no fine bin, and 20 of 2.5, in fine bins that those of the lowest coarse bin would share."""
    keys = torch.tensor([16.0] * 71 + [2.5] * 20 + [0.0] * 20).view(torch.int32) + 1
    generator = torch.Generator().manual_seed(0)
    return torch.stack([keys[torch.randperm(len(keys), generator=generator)] for _ in range(2)]).view(2, SLOTS, -1)


KEYS = {
    "apart": random_keys(1, 0x7F800001),
    "one-bin": random_keys(1 << 29, (1 << 29) + (1 << 14)),  # one taken after the other
    "two-bins": random_keys((1 << 29) - (1 << 14), (1 << 29) + (1 << 14)),
    "shared-bins": keys_of_two_windows(),
    "ties": random_keys(1 << 29, (1 << 29) + 5),
    "all-equal": torch.full((2, SLOTS, CHANNELS), 1 << 29, dtype=torch.int32),
    "zero-scores": random_keys(1, 3),  # a key of 1 is a score of 0
    "zero-scores-and-as-many-in-shared-bins": keys_of_a_coincidence(),
    "infinite-scores": random_keys(0x7F800000, 0x7F800002),
    "no-expert": keys_without_middle_slot(),
    "no-expert-at-all": torch.zeros(2, SLOTS, CHANNELS, dtype=torch.int32),
}


def select_case(k: int, channels: int = CHANNELS, **blocks: int) -> Case:
    """Two tokens of three experts, for keys (2, 3, channels)."""
    case = replace(THREE_TOKENS, ids=((1, 0, 2), (2, 1, 0)), shape=(3, 128, channels))
    return replace(case, settings=ReadSettings(k, 1, "norm", 0), blocks=replace(case.blocks, **blocks))


def kept_by_keys(case: Case, keys: Tensor) -> Tensor:
    """(N, K, I) bool: what is kept by keys (N, K, I) in place of those of the score."""
    x, ids, weights = make_inputs(case)
    ids = torch.where(keys.amax(-1).to(DEVICE) > 0, ids, -1)
    stages = Stages(x, ids, weights, select_layer(case.shape[2]), case.settings, case.blocks)
    stages.keys.copy_(keys)
    stages.histogram.copy_(histogram_of(stages.keys.flatten(1)))
    stages.estimates.fill_(1.0)
    stages.rows.fill_(-1)
    stages.select()
    kept = kept_by_lists(stages)
    assert torch.equal(stages.estimates == 0, kept)
    return kept


@pytest.mark.parametrize("k", [0, 1, 50, 100, SLOTS * CHANNELS, 1000])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_selection_by_keys(keys: Tensor, k: int) -> None:
    """The k largest, ties to the lower slot and channel; but never a key of 0."""
    case = select_case(k)
    expected = top_k_mask(keys.flatten(1).double(), k).view_as(keys) & (keys > 0)
    assert torch.equal(kept_by_keys(case, keys), expected.to(DEVICE))


@pytest.mark.parametrize("warps", [2, 4])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_warps_of_a_program_list_one_after_the_other(keys: Tensor, warps: int) -> None:
    """All candidates in one chunk, of 128; words of 32 side by side in a warp of two."""
    case = select_case(50, select_chunk=128, select_warps=warps)
    expected = top_k_mask(keys.flatten(1).double(), 50).view_as(keys) & (keys > 0)
    assert torch.equal(kept_by_keys(case, keys), expected.to(DEVICE))


@pytest.mark.parametrize("chunk", [32, 64, 128])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_selection_by_keys_that_are_loaded_side_by_side(keys: Tensor, chunk: int) -> None:
    """One, two or four at once, where a token's lie so; the last chunk holds 12, 44 or 108 of its candidates."""
    keys = keys[..., :36].contiguous()
    case = select_case(50, channels=36, select_chunk=chunk, select_warps=2)
    expected = top_k_mask(keys.flatten(1).double(), 50).view_as(keys) & (keys > 0)
    assert torch.equal(kept_by_keys(case, keys), expected.to(DEVICE))


@pytest.mark.parametrize("warps", [4, 8])
def test_selection_from_more_candidates_than_one_look_takes(warps: int) -> None:
    """8,400, in two or three looks and 33 chunks; equals of the k-th largest on both sides of a border between them."""
    channels, k = 2800, 700
    case = replace(THREE_TOKENS, ids=((1, 0, 2),), shape=(3, 128, channels), settings=ReadSettings(k, 1, "norm", 0))
    case = replace(case, blocks=replace(case.blocks, select_warps=warps))
    keys = torch.randint(1, 1 << 30, (1, 3 * channels), generator=torch.Generator().manual_seed(0)).int()
    keys[0, 8000:8300] = keys.sort(descending=True).values[0, k - 100]
    keys = keys.view(1, 3, channels)
    expected = top_k_mask(keys.flatten(1).double(), k).view_as(keys)
    assert torch.equal(kept_by_keys(case, keys), expected.to(DEVICE))


@triton.jit
def _certain_kernel(histogram, out, candidates, k, COARSE_SHIFT: tl.constexpr, COARSE: tl.constexpr):
    thread = tl.arange(0, 64)
    tl.store(out + thread, certain_from(histogram, candidates, k + 0 * thread, thread, COARSE_SHIFT, COARSE))


@pytest.mark.parametrize("k", [0, 1, 50, 110, 111])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_channels_that_are_kept_for_certain(keys: Tensor, k: int) -> None:
    """Those in bins above that of the k-th largest key; what is sent to the L2 cache is these channels' rows."""
    of_token = keys[0].flatten().to(DEVICE)
    histogram, least = histogram_of(of_token[None]), torch.zeros(64, dtype=torch.int32, device=DEVICE)
    shift, bins = module._HISTOGRAM["COARSE_SHIFT"], module._HISTOGRAM["COARSE"]
    _certain_kernel[(1,)](histogram, least, len(of_token), k, COARSE_SHIFT=shift, COARSE=bins, num_warps=2)
    if k == 0:
        assert (least > of_token.max()).all()
    else:
        bin_of_border = int(of_token.sort(descending=True).values[k - 1]) >> shift
        assert (least == bin_of_border + 1 << shift).all()


@dataclass
class Fetched:
    """In place of `fetch_to_l2`: remembers addresses and bytes of what it is asked for."""

    asked: list[tuple[int, int]]

    def __call__(self, pointers: Any, number: Any, condition: Any, dependent: Any) -> None:
        addresses, conditions = pointers.handle.data, np.broadcast_to(condition.handle.data, pointers.handle.data.shape)
        number = int(number.handle.data.item() if hasattr(number, "handle") else number)
        size = number * pointers.dtype.element_ty.primitive_bitwidth // 8
        self.asked += [(int(address), size) for address in addresses[conditions]]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """What kernels ask for that are told to fetch ahead, though none of them is dependent."""
    if DEVICE.type != "cpu":
        pytest.skip("it looks into the interpreter")
    fetched = Fetched([])
    for kernel in (exact_kernel, screen_kernel):
        monkeypatch.setattr(kernel, "fetch_to_l2", fetched)
    monkeypatch.setattr(module, "launch_options", lambda dependent: {"DEPENDENT": False})
    monkeypatch.setattr(module, "full_registers", lambda dependent: {})
    monkeypatch.setattr(module, "has_dependent_launch", lambda device: True)
    return fetched


def rows_of(tensor: Tensor, rows: Tensor) -> set[tuple[int, int]]:
    """Address and bytes of the rows along the last axis."""
    size = tensor.shape[-1] * tensor.element_size()
    return {(tensor.data_ptr() + int(row) * size, size) for row in rows}


@pytest.mark.parametrize(("name", "ahead"), [("three-tokens", 1), ("three-tokens", 2), ("steps", 1)])
def test_rows_that_are_fetched_ahead_are_those_of_certain_channels(name: str, ahead: int, fetched: Fetched) -> None:
    """Gate, up and down of the channels in bins above the border's, of the first tokens; no other row."""
    case = next(case for case in CASES if case.name == name)
    case = replace(case, blocks=replace(case.blocks, exact_ahead=ahead))
    (x, ids, weights), layer = make_inputs(case), repack(make_layer(case))
    stages = Stages(x, ids, weights, layer, case.settings, case.blocks)
    stages.run()
    I, shift, expected = case.shape[2], module._HISTOGRAM["COARSE_SHIFT"], set()
    for token_ids, keys in list(zip(ids, stages.keys, strict=True))[:ahead]:
        border = int(keys.flatten().sort(descending=True).values[stages.k - 1]) >> shift
        slot, j = (keys >> shift > border).nonzero(as_tuple=True)
        expert = token_ids[slot]
        for matrix in (0, 1):
            expected |= rows_of(layer.gate_up, (2 * expert + matrix) * I + j)
        expected |= rows_of(layer.down, expert * I + j)
    assert expected
    assert set(fetched.asked) == expected


@pytest.mark.parametrize("name", ["defaults", "steps", "one-coordinate"])
def test_what_score_and_recovery_read_is_fetched_ahead(name: str, fetched: Fetched) -> None:
    """Of every expert that is routed to: scales, norms, errors where the score is of these, recovery map; whole."""
    case = next(case for case in CASES if case.name == name)
    case = replace(case, blocks=replace(case.blocks, screen_ahead=1))
    (x, ids, weights), layer = make_inputs(case), repack(make_layer(case))
    stages = Stages(x, ids, weights, layer, case.settings, case.blocks)
    stages.rotate()
    stages.screen()
    read = [layer.tiles.scales, layer.norms_for(case.settings.rank)]
    if case.settings.score == "rho":
        read.append(layer.tiles.errors)
    if case.settings.rank == STORED_RANK:
        read.append(layer.coeffs)
    asked: set[int] = set()
    for address, size in fetched.asked:
        asked |= set(range(address, address + max(size, 0)))
    experts = [e for _, _, e in served(ids, case.shape[0])]
    expected = {byte for tensor in read for e in experts for byte in bytes_of(tensor[e])}
    assert asked == expected


def bytes_of(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [1, 2, 9])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_fetched_ahead_changes_nothing(case: Case, ahead: int) -> None:
    inputs, layer = make_inputs(case), repack(make_layer(case))
    fetching = replace(case.blocks, exact_ahead=ahead, screen_ahead=1)
    for function in (decode, decode_share):
        expected = function(*inputs, layer, case.settings, case.blocks)
        assert torch.equal(function(*inputs, layer, case.settings, fetching), expected)


@functools.cache
def select_layer(channels: int = CHANNELS) -> DecodeLayer:
    return repack(make_layer(replace(THREE_TOKENS, shape=(3, 128, channels))))


def test_more_candidates_than_are_counted_are_refused() -> None:
    layer = select_layer()
    slots = module.MOST_CANDIDATES // CHANNELS + 1
    x, ids = torch.zeros(1, 128, device=DEVICE), torch.zeros(1, slots, dtype=torch.int64, device=DEVICE)
    with pytest.raises(UnsupportedError, match="the kernels count"):
        decode(x, ids, ids.float(), layer, THREE_TOKENS.settings, FOUR)


# ---------------------------------------------------------------- exact, recovery, finish


def test_kept_channels_are_computed_from_their_weights(run: Run) -> None:
    expected = exact_by_definition(run.x, run.ids, run.weights, run.kept, run.layer)
    assert relative(run.stages.outputs.sum(1), expected) < SUMS


def test_skipped_channels_are_summed(run: Run) -> None:
    rank = run.case.settings.rank
    if rank == 0:
        return
    expected = left_by_definition(run.estimated, run.ids, run.kept, run.layer, rank)
    assert relative(run.stages.recovery[..., :rank].sum(1), expected) < SUMS


def test_the_end_adds_all_and_rounds_once(run: Run) -> None:
    rank = run.case.settings.rank
    expected = run.stages.outputs.double().sum(1)
    if rank:
        expected += run.stages.recovery[..., :rank].double().sum(1) @ run.layer.basis[:, :rank].double().mT
    assert run.stages.y.dtype == run.case.dtype
    assert relative(run.stages.y, expected) < ROUNDING[run.case.dtype]


def test_the_output_is_the_formula_on_the_kept_channels(run: Run) -> None:
    rank = run.case.settings.rank
    expected = exact_by_definition(run.x, run.ids, run.weights, run.kept, run.layer)
    left = left_by_definition(run.formula.p, run.ids, run.kept, run.layer, rank)
    expected += left @ run.layer.basis[:, :rank].double().mT
    assert relative(run.stages.y, expected) < ROUNDING[run.case.dtype] + (RECOVERY if rank else 0)


# ---------------------------------------------------------------- the block


def small_case(ids: tuple[tuple[int, ...], ...], k: int) -> Case:
    """One coordinate a block of little experts: all kernels, and little work."""
    return replace(
        THREE_TOKENS, ids=ids, shape=(5, 130, 10), settings=ReadSettings(k, 1, "norm", 5), dtype=torch.float32
    )


def decode_case(case: Case) -> tuple[Tensor, Tensor]:
    """y of the kernels, and of the reader that runs on a CPU."""
    layer, inputs = make_layer(case), make_inputs(case)
    y = decode(*inputs, repack(layer), case.settings, case.blocks)
    return y, read(*inputs, layer, case.settings)


@pytest.mark.parametrize("k", [0, 20, 1000])
def test_with_no_choice_to_make_it_is_the_reader_of_the_cpu(k: int) -> None:
    """Nothing or everything kept, of 20 candidates."""
    y, expected = decode_case(small_case(((4, 0), (1, 2)), k))
    assert relative(y, expected.double()) < (RECOVERY if k == 0 else SUMS)


def test_a_block_by_default_parameters_is_the_reader_of_the_cpu() -> None:
    case = small_case(((4, 0),), 1000)
    layer, inputs = make_layer(case), make_inputs(case)
    y = decode(*inputs, repack(layer), case.settings)
    assert relative(y, read(*inputs, layer, case.settings).double()) < SUMS


NOBODY = [-1, 5, 99, 2**31 - 1, -(2**31), 2**63 - 1, 2**32, -(2**63)]


@pytest.mark.parametrize("k", [0, 7, 1000])
def test_a_token_keeps_a_share_of_k_for_the_experts_that_are_here(k: int) -> None:
    """k n / K of the largest, rounded, halves up, where n of its K = 4 experts are on this rank; k is at most K I."""
    case = small_case(((4, 0, 1, 2), (3, -1, 5, 2), (-1, -1, 1, 9), (7, -1, -1, -1)), k)
    (x, ids, weights), layer = make_inputs(case), repack(make_layer(case))
    stages = Stages(x, ids, weights, layer, case.settings, case.blocks, shared=True)
    y = stages.run()
    numbers = [(min(k, 40) * n + 2) // 4 for n in (4, 2, 1, 0)]
    for keys, kept, number in zip(stages.keys.flatten(1), kept_by_lists(stages).flatten(1), numbers, strict=True):
        assert torch.equal(kept, top_k_mask(keys.double(), number))
    assert torch.equal(decode_share(x, ids, weights, layer, case.settings, case.blocks), y)


@pytest.mark.parametrize("nobody", NOBODY)
def test_ids_out_of_range_contribute_nothing(nobody: int) -> None:
    """With all candidates kept, so that theirs are too; the expert beside them stays what it is."""
    y, expected = decode_case(small_case(((nobody, 3), (nobody, nobody)), 20))
    assert relative(y, expected.double()) < SUMS
    assert torch.equal(y[1], torch.zeros_like(y[1]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("what", [math.nan, 1e25])
def test_a_token_without_any_expert_gives_zeros_whatever_it_holds(what: float) -> None:
    """Rows of padding under expert parallelism: everything skipped, and recovered from no estimate."""
    case = small_case(((-1, 7), (4, 0)), 0)
    x, ids, weights = make_inputs(case)
    x[0] = what
    y = decode(x, ids, weights, repack(make_layer(case)), case.settings, case.blocks)
    assert torch.equal(y[0], torch.zeros_like(y[0]))


@pytest.mark.parametrize("k", [45, 70])
def test_more_groups_than_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Two turns and three, the last of them not full."""
    case = small_case(((4, 0), (1, 2)), k)
    case = replace(case, shape=(5, 130, 70), blocks=replace(case.blocks, exact_channels=1))
    expected, _ = decode_case(case)
    monkeypatch.setattr(module, "_MOST_GROUPS", 32)
    y, _ = decode_case(case)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)  # the same numbers, added in another order


@pytest.mark.parametrize("k", [1, 50, 100])
def test_more_keys_than_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Of a bin with many members, alike and not: their ranks are counted over several looks."""
    keys = random_keys(1 << 20, (1 << 20) + 40)
    monkeypatch.setattr(module, "_MOST_KEYS", 16)
    case = select_case(k)
    expected = top_k_mask(keys.flatten(1).double(), k).view_as(keys)
    assert torch.equal(kept_by_keys(case, keys), expected.to(DEVICE))


@pytest.mark.parametrize(
    "wrong",
    [
        {"screen_parts": 3},
        {"screen_words": 3},
        {"screen_loads": 12},
        {"screen_loads": 0},
        {"screen_registers": 20},
        {"exact_steps": -1},
        {"exact_programs": 0},
        {"screen_registers": 256},
        {"score_channels": 16},
        {"score_warps": 2},
        {"select_chunk": 300},
        {"select_chunk": 16},
        {"select_chunk": 2048},
        {"screen_ahead": 2},
        {"exact_ahead": -1},
        {"rotate_warps": 3},
        {"screen_warps": 6},
        {"score_warps": 0},
        {"select_warps": 12},
        {"exact_warps": 64},
        {"finish_warps": 5},
        {"recovery_rows": 1000},
        {"exact_channels": 6},
        {"finish_columns": 24},
        {"finish_columns": 0},
    ],
)
def test_parameters_that_a_kernel_cannot_run_with_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError) as caught:
        Blocks(**wrong)
    (name,) = wrong
    kernel, parameter = name.split("_")
    assert caught.value.cause.startswith(f"{kernel} ")
    assert f"{parameter} = {wrong[name]}" in caught.value.cause
    assert "in the tuning file" in caught.value.remedy


# The steps that were measured best on an H200 of 132 multiprocessors, with 11.5 % of the channels.
QWEN3_30B, OLMOE, GEMMA4_26B = (
    LayerShape(128, 8, 2048, 768),
    LayerShape(64, 8, 2048, 1024),
    LayerShape(128, 8, 2816, 704),
)
BEST_STEPS = [
    *((QWEN3_30B, 707, n, steps) for n, steps in ((1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (32, 15), (64, 30))),
    *((OLMOE, 942, n, steps) for n, steps in ((1, 1), (2, 2), (4, 3), (8, 5), (16, 10), (32, 20))),
    *((GEMMA4_26B, 648, n, steps) for n, steps in ((1, 1), (2, 1), (4, 2), (8, 4), (16, 11))),
]


@pytest.mark.parametrize(("shape", "k", "tokens", "steps"), BEST_STEPS)
def test_steps_follow_from_tokens_and_channels(shape: LayerShape, k: int, tokens: int, steps: int) -> None:
    parameters = known_tuning().parameters("exact", "NVIDIA H200", shape, tokens)
    blocks = Blocks(**{f"exact_{name}": value for name, value in parameters.items()})
    assert module._steps_at_once(k, tokens, blocks, 132) == steps


@given(
    k=st.integers(0, 5000),
    tokens=st.integers(1, 500),
    channels=st.sampled_from([1, 2, 4, 16]),
    programs=st.integers(1, 600),
)
def test_all_programs_are_under_way_at_once(k: int, tokens: int, channels: int, programs: int) -> None:
    """With the fewest steps that do it; more tokens than places take one program each."""
    blocks = Blocks(exact_channels=channels, exact_programs=programs)
    steps = module._steps_at_once(k, tokens, blocks, 1)

    def needed(steps: int) -> int:
        return tokens * max(math.ceil(k / (channels * steps)), 1)

    assert needed(steps) <= max(programs, tokens)
    assert steps == 1 or needed(steps - 1) > max(programs, tokens)


def test_parameters_of_another_version_are_refused() -> None:
    with trial({"exact": {"beside": 1}}), pytest.raises(UsageError, match="has exact beside, which this version"):
        tuned_blocks(DEVICE, LayerShape(5, 2, 130, 10), 1)


def test_more_programs_than_a_grid_has_are_refused() -> None:
    case = small_case(((4, 0),), 7)
    x, ids, weights = make_inputs(case)
    many = 40_000
    with pytest.raises(UnsupportedError, match="fewer at a time"):
        decode(x.expand(many, -1), ids.expand(many, -1), weights.expand(many, -1), select_layer(), case.settings, FOUR)


def test_a_token_of_zeros_gives_zeros() -> None:
    case = small_case(((4, 0),), 7)
    _, ids, weights = make_inputs(case)
    y = decode(torch.zeros(1, 130, device=DEVICE), ids, weights, repack(make_layer(case)), case.settings, case.blocks)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_a_token_that_is_not_finite_leaves_the_others_alone() -> None:
    case = small_case(((4, 0), (0, 3)), 7)
    (x, ids, weights), layer = make_inputs(case), repack(make_layer(case))
    clean = decode(x, ids, weights, layer, case.settings, case.blocks)
    x[0] = math.nan
    y = decode(x, ids, weights, layer, case.settings, case.blocks)
    assert y[0].isnan().all()
    assert torch.equal(y[1], clean[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_estimates_of_a_token_that_is_not_finite_are_no_numbers(what: float) -> None:
    """Nothing kept, so that only they tell: x' are integers, which have no NaN."""
    case = replace(small_case(((4, 0),), 0), settings=ReadSettings(0, 49, "norm", 5))
    x, ids, weights = make_inputs(case)
    x[0, 3] = what
    y = decode(x, ids, weights, repack(make_layer(case)), case.settings, case.blocks)
    assert y.isnan().all()


def test_no_tokens_give_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where launch parameters are known for other batches."""
    monkeypatch.setattr(module, "device_name", lambda device: "NVIDIA H200")
    case = small_case(((4, 0),), 7)
    x, ids, weights = make_inputs(case)
    y = decode(x[:0], ids[:0], weights[:0], repack(make_layer(case)), case.settings)
    assert y.shape == (0, 130)


def test_the_same_input_gives_the_same_bits() -> None:
    run = run_of(THREE_TOKENS)
    again = decode(run.x, run.ids, run.weights, run.stages.layer, run.case.settings, run.case.blocks)
    assert torch.equal(again, run.stages.y)


def test_a_token_alone_has_the_bits_that_it_has_among_others() -> None:
    run = run_of(THREE_TOKENS)
    one = slice(1, 2)
    alone = decode(run.x[one], run.ids[one], run.weights[one], run.stages.layer, run.case.settings, run.case.blocks)
    assert torch.equal(alone, run.stages.y[one])


# ---------------------------------------------------------------- activations


@triton.jit
def _activate_kernel(z, phi, slope, COUNT: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, COUNT)
    value, derivative = activate(tl.load(z + i), KIND)
    tl.store(phi + i, value)
    tl.store(slope + i, derivative)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's, of the interpreter: 1 / (1 + inf) is right
@pytest.mark.parametrize("name", sorted(_FUNCTIONS))
def test_every_activation_of_the_cpu_has_a_kernel_of_the_same_values(name: str) -> None:
    """float32: exp and erf within some 1e-7, and tanh as a difference of numbers near 1, times up to 30."""
    z = torch.linspace(-30, 30, 1024, device=DEVICE)
    phi, slope = torch.empty_like(z), torch.empty_like(z)
    _activate_kernel[(1,)](z, phi, slope, COUNT=1024, KIND=activation_kind(name))
    activation = get_activation(name)
    torch.testing.assert_close(phi.double(), activation.function(z.double()), rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(slope.double(), activation.derivative(z.double()), rtol=1e-6, atol=4e-6)


def test_an_activation_without_a_kernel_is_named() -> None:
    with pytest.raises(UnsupportedError, match="sparkle"):
        activation_kind("sparkle")


# ---------------------------------------------------------------- the sketch in tiles


@st.composite
def stored_sketches(draw: st.DrawFn) -> tuple[Code, Tensor, Tensor, Tensor]:
    """Code, level indices (E, 2, C, I), scales and errors (E, 2, nb, I)."""
    code = draw(st.sampled_from(sorted(CODES.values(), key=lambda code: code.name)))
    channels = draw(st.sampled_from([1, 63, 64, 65, 70, 128, 130]) | st.integers(1, 200))
    experts, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    indices = torch.randint(0, code.base, (experts, 2, blocks * BLOCK, channels), dtype=torch.uint8)
    scales, errors = torch.rand(2, experts, 2, blocks, channels)
    return code, indices, scales.half(), errors.bfloat16()


@settings(max_examples=30, deadline=None)
@given(sketch=stored_sketches())
def test_tiles_are_the_stored_sketch_in_another_order(sketch: tuple[Code, Tensor, Tensor, Tensor]) -> None:
    code, indices, scales, errors = sketch
    stored = (pack(indices, code), scales, errors)
    tiles = to_tiles(*stored, code)
    for found, expected in zip(from_tiles(tiles, code, scales.shape[-1]), stored, strict=True):
        assert torch.equal(found, expected)
    assert all(getattr(tiles, field.name).is_contiguous() for field in fields(Tiles))


@settings(max_examples=30, deadline=None)
@given(sketch=stored_sketches())
def test_every_number_has_its_place_in_the_tiles(sketch: tuple[Code, Tensor, Tensor, Tensor]) -> None:
    """A code at bits 2 (c mod 16) of word c / 16 of its tile, gate before up; a scale at c of its tile and block."""
    code, indices, scales, errors = sketch
    tiles = to_tiles(pack(indices, code), scales, errors, code)
    channel = torch.arange(scales.shape[-1])
    tile, c = channel // TILE, channel % TILE
    for matrix in range(2):
        words = tiles.codes[:, :, tile, matrix, c // 16]
        assert torch.equal(words >> 2 * (c % 16) & 3, indices[:, matrix].int())
        assert torch.equal(tiles.scales[:, :, tile, matrix, c], scales[:, matrix])
        assert torch.equal(tiles.errors[:, :, tile, matrix, c], errors[:, matrix])


@pytest.mark.parametrize("channels", [1, 64, 70, 768])
def test_what_is_counted_as_read_is_what_is_stored(channels: int) -> None:
    """A coordinate's gate and up codes are one run; scales of whole tiles; two norms a channel."""
    shape = (1, 2, 1, channels)
    codes = pack(torch.zeros(1, 2, BLOCK, channels), TERNARY)
    tiles = to_tiles(codes, torch.zeros(shape).half(), torch.zeros(shape).bfloat16(), TERNARY)
    assert GPU.code_runs(TERNARY, channels) == (tiles.codes.stride(1) * tiles.codes.element_size(),)
    assert 2 * GPU.stored_channels(channels) == tiles.scales.numel() == tiles.errors.numel()
    assert (
        GPU.norm_bytes * channels == to_norms(torch.ones(1, channels).half(), torch.zeros(1, channels, 2).half()).nbytes
    )


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_norms_of_a_channel_are_one_word(rank: int) -> None:
    """||d_j|| in the lower half as it is stored, sqrt(||d_j||^2 - ||b_j||^2) in the upper one; never less than none."""
    coeffs = torch.randn(2, 7, rank, generator=torch.Generator().manual_seed(0)).half()
    down_norms = (coeffs.float().norm(dim=-1) + torch.linspace(0, 3, 7)).half()
    coeffs[1, 6] *= 2  # more than the whole, which only rounding can make of it
    words = to_norms(down_norms, coeffs)
    assert (words.shape, words.dtype) == ((2, 7), torch.int32)
    lower, upper = words.unsqueeze(-1).view(torch.float16).unbind(-1)
    assert torch.equal(lower, down_norms)
    left = (down_norms.double() ** 2 - coeffs.double().square().sum(-1)).clamp_min(0).sqrt()
    torch.testing.assert_close(upper.double(), left, rtol=2**-10, atol=1e-3)  # 1e-3: of a difference of equals


def test_norms_are_made_once_a_rank() -> None:
    layer = repack(make_layer(CASES[0]))
    norms = [layer.norms_for(rank) for rank in (STORED_RANK, 1, STORED_RANK, 1)]
    assert norms[0] is norms[2]
    assert norms[1] is norms[3]
    assert torch.equal(norms[1], to_norms(layer.down_norms, layer.coeffs[..., :1]))


def test_the_layout_goes_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(GPU)) == GPU


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_stage_waits_for_the_host() -> None:
    case = REAL[0]
    inputs, layer = make_inputs(case), repack(make_layer(case))
    decode(*inputs, layer, case.settings)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode(*inputs, layer, case.settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_graph_replays_the_bits_of_an_eager_call(tokens: int) -> None:
    case = replace(REAL[0], ids=_REAL_IDS[:tokens])
    layer, (x, ids, weights) = repack(make_layer(case)), make_inputs(case)
    decode(x, ids, weights, layer, case.settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode(x, ids, weights, layer, case.settings)
    for seed in (11, 12):
        other, _, other_weights = make_inputs(case, seed)
        x.copy_(other)
        ids.copy_((ids + seed) % 16)
        weights.copy_(other_weights)
        graph.replay()
        assert torch.equal(y, decode(x, ids, weights, layer, case.settings))


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [4, 8])
def test_tokens_of_a_large_batch_have_the_bits_that_they_have_alone(warps: int) -> None:
    ids = tuple(tuple((5 * n + 3 * s) % 16 for s in range(8)) for n in range(64))
    case = replace(REAL[0], ids=ids, blocks=Blocks(screen_warps=warps, exact_steps=4))
    (x, ids_of, weights), layer = make_inputs(case), repack(make_layer(case))
    together = decode(x, ids_of, weights, layer, case.settings, case.blocks)
    for n in (0, 31, 63):
        one = slice(n, n + 1)
        assert torch.equal(decode(x[one], ids_of[one], weights[one], layer, case.settings, case.blocks), together[one])


@pytest.mark.parametrize("capability", [80, 90])
def test_a_gpu_s_compiler_takes_the_kernels(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(Path(__file__).with_name("kernels_for_gpus.py")), str(capability)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
