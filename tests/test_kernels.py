"""Each operation of the decode block alone, against its formula written out, and at its corners."""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert, nb blocks, r rank

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mreader.activations import get_activation
from mreader.errors import UnsupportedError, UsageError
from mreader.formats.codes import BLOCK, QUATERNARY, TERNARY, Code
from mreader.formats.coding import pack, values
from mreader.kernels.exact import exact
from mreader.kernels.recover import recover
from mreader.kernels.rotate import pick_coordinates, rotate
from mreader.kernels.score import SCORES, Candidates, get_score, score
from mreader.kernels.screen import Estimates, decode, screen, tokens_by_expert
from mreader.kernels.select import select, top_k_mask

# Sums of a few hundred float32 products, each rounded at 6e-8: 1e-5 leaves room for any order of summation.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
SILU = get_activation("silu")
CODES = [TERNARY, QUATERNARY]

# An expert that no slot names, one that two slots of a token name, sentinels on both sides, a token of sentinels only.
E = 6
IDS = torch.tensor([[0, 5, 2], [2, -1, 4], [6, 2, 99], [-1, -1, -1], [3, 3, 0]])
SERVED = (IDS >= 0) & (IDS < E)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_bools(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.4


# ---------------------------------------------------------------- activations

ACTIVATIONS = ["silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh"]
ACTIVATIONS += ["gelu_python_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_transformers_own_and_its_derivative_is_autograds(name: str) -> None:
    from transformers.activations import ACT2FN

    activation = get_activation(name)
    # An even number of points: zero is not among them, where ReLU has no derivative.
    z = torch.linspace(-9, 9, 1000, dtype=torch.float64, requires_grad=True)
    value = activation.function(z)
    # gelu_fast spells sqrt(2/pi) with ten digits.
    torch.testing.assert_close(value, ACT2FN[name](z), rtol=1e-7, atol=1e-7)
    (slope,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(activation.derivative(z), slope, rtol=1e-10, atol=1e-12)
    assert activation.name == name


@pytest.mark.parametrize(
    ("name", "phi", "psi"),
    [
        ("clamped_silu(limit=2.5)", lambda z: z / (1 + torch.exp(-z)), lambda u: u),
        ("clamped_swiglu(alpha=1.702, limit=7)", lambda z: z / (1 + torch.exp(-1.702 * z)), lambda u: u + 1),
    ],
)
def test_a_clamped_activation_is_flat_beyond_its_limit(name: str, phi: Any, psi: Any) -> None:
    activation = get_activation(name)
    limit = float(name.split("limit=")[1].rstrip(")"))
    z = torch.linspace(-9, 9, 1000, dtype=torch.float64, requires_grad=True)
    inside, below = z.abs() <= limit, z <= limit
    value, up = activation.function(z), activation.up_function(z)
    edge = torch.full_like(z, limit)
    torch.testing.assert_close(value, torch.where(below, phi(z), phi(edge)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(up, torch.where(inside, psi(z), psi(edge.copysign(z))), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(activation.gated(z, z), value * up, rtol=0, atol=0)
    for found, of in ((activation.derivative(z), value), (activation.up_derivative(z), up)):
        (slope,) = torch.autograd.grad(of.sum(), z)
        torch.testing.assert_close(found, slope, rtol=1e-10, atol=1e-12)
    assert not activation.is_linear_in_up
    assert get_activation("silu").is_linear_in_up


@pytest.mark.parametrize(
    "name", ["clamped_silu", "clamped_silu()", "clamped_silu(alpha=1)", "clamped_silu(limit=x)", "silu(limit=1)"]
)
def test_an_activation_without_its_parameters_is_unknown(name: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"unknown activation {name!r}")):
        get_activation(name)


def test_an_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"sparkle.*gelu_pytorch_tanh.*silu"):
        get_activation("sparkle")


# ---------------------------------------------------------------- rotate


def sylvester(i: int, j: int) -> int:
    return -1 if (i & j).bit_count() % 2 else 1


@pytest.mark.parametrize("hidden", [7, 100, 128, 192])
def test_rotate_is_hadamard_times_signs_on_zero_padded_blocks(hidden: int) -> None:
    x = gaussian(3, hidden).double()
    signs = (random_bools(hidden) * 2 - 1).to(torch.int8)
    blocks = math.ceil(hidden / BLOCK)
    padded = torch.zeros(3, blocks * BLOCK, dtype=torch.float64)
    padded[:, :hidden] = x * signs
    hadamard = torch.tensor([[sylvester(i, j) for j in range(BLOCK)] for i in range(BLOCK)], dtype=torch.float64)
    expected = padded.view(3, blocks, BLOCK) @ hadamard / math.sqrt(BLOCK)
    rx = rotate(x.float(), signs)
    assert rx.dtype == torch.float32
    torch.testing.assert_close(rx.double(), expected, **FLOAT32)
    torch.testing.assert_close(rx.double().square().sum((1, 2)), x.square().sum(1), **FLOAT32)


def test_rotate_upcasts_before_it_adds() -> None:
    x, signs = gaussian(4, 192).bfloat16(), torch.ones(192, dtype=torch.int8)
    torch.testing.assert_close(rotate(x, signs), rotate(x.float(), signs), rtol=0, atol=0)


def test_coordinates_are_the_largest_of_each_block_ties_to_the_lower() -> None:
    rx = torch.zeros(1, 2, BLOCK)
    rx[0, 0, [3, 70, 127]] = torch.tensor([-5.0, 4.0, 6.0])
    rx[0, 1] = 1.0
    read = pick_coordinates(rx, 5)
    assert read[0, 0].nonzero().squeeze(1).tolist() == [0, 1, 3, 70, 127]
    assert read[0, 1].nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 4]
    assert pick_coordinates(rx, BLOCK).all()


# ---------------------------------------------------------------- select


def sorted_top_k(row: list[float], k: int) -> list[bool]:
    best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    return [i in best for i in range(len(row))]


@pytest.mark.parametrize("k", [0, 1, 7, 20, 39, 40, 41])
def test_top_k_is_a_stable_sorts(k: int) -> None:
    # Five distinct values in forty places: every k cuts through ties.
    scores = torch.randint(0, 5, (9, 40), generator=torch.Generator().manual_seed(k)).float()
    assert top_k_mask(scores, k).tolist() == [sorted_top_k(row, k) for row in scores.tolist()]


def test_select_takes_the_best_over_all_slots_and_sentinels_last() -> None:
    scores = torch.tensor([[[0.0, 9.0, 0.0], [-math.inf] * 3, [0.0, 8.0, 7.0]]])
    assert select(scores, 3).tolist() == [[[False, True, False], [False] * 3, [False, True, True]]]
    assert select(scores, 5).tolist() == [[[True, True, True], [False] * 3, [False, True, True]]]
    assert select(scores, 7).tolist() == [[[True, True, True], [True, False, False], [True, True, True]]]


# ---------------------------------------------------------------- screen


def test_tokens_by_expert_names_every_served_slot_once() -> None:
    groups = list(tokens_by_expert(IDS, E))
    assert [expert for expert, _, _ in groups] == [0, 2, 3, 4, 5]
    pairs = {(t, s): e for e, ts, ss in groups for t, s in zip(ts.tolist(), ss.tolist(), strict=True)}
    assert pairs == {(t, s): IDS[t, s].item() for t, s in SERVED.nonzero().tolist()}


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("channels", [1, 7, 80, 160])
def test_decode_is_unpack_and_values(code: Code, channels: int) -> None:
    indices = torch.randint(0, len(code.levels), (2, 3, channels), dtype=torch.uint8)
    packed = pack(indices, code)
    assert torch.equal(decode(packed, code, channels), values(indices, code))
    # Padding means nothing, whatever it holds.
    packed[..., code.used_bytes(channels) :] = 255
    assert torch.equal(decode(packed, code, channels), values(indices, code))


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("coordinates", [1, 80, BLOCK])
@pytest.mark.parametrize(("blocks", "channels"), [(1, 7), (2, 80)])
def test_screen_is_the_dot_product_over_the_read_coordinates(
    code: Code, coordinates: int, blocks: int, channels: int
) -> None:
    levels = torch.randint(0, len(code.levels), (E, 2, blocks * BLOCK, channels), dtype=torch.uint8)
    scales = gaussian(E, 2, blocks, channels).abs().half()
    rx = gaussian(len(IDS), blocks, BLOCK, seed=1)
    read = pick_coordinates(rx, coordinates)
    estimates = screen(rx, read, IDS, pack(levels, code), scales, code)

    rows = values(levels, code).double() * scales.double().repeat_interleave(BLOCK, 2)
    for n, s in SERVED.nonzero().tolist():
        dots = ((rx[n] * read[n]).double().flatten()[:, None] * rows[IDS[n, s]]).sum(1)
        torch.testing.assert_close(estimates.gate[n, s].double(), dots[0], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(estimates.up[n, s].double(), dots[1], rtol=1e-5, atol=1e-4)
    assert not estimates.gate[~SERVED].any()
    assert not estimates.up[~SERVED].any()
    torch.testing.assert_close(estimates.energy_read, (rx * read).square().sum(-1))
    torch.testing.assert_close(estimates.energy_unread, (rx * ~read).square().sum(-1))


# ---------------------------------------------------------------- score


def candidates(code: Code = TERNARY, rank: int = 4, activation: str = "silu") -> Candidates:
    n, k, i, blocks = *IDS.shape, 7, 2
    estimates = Estimates(
        gaussian(n, k, i, seed=1),
        gaussian(n, k, i, seed=2),
        gaussian(n, blocks).abs(),
        gaussian(n, blocks, seed=3).abs(),
    )
    return Candidates(
        estimates,
        IDS,
        gaussian(n, k, seed=4),
        gaussian(E, 2, blocks, i, seed=5).abs().half(),
        gaussian(E, 2, blocks, i, seed=6).abs().bfloat16(),
        gaussian(E, i, seed=7).abs().half(),
        gaussian(E, i, rank, seed=8).half(),
        code,
        get_activation(activation),
    )


def formula(c: Candidates, name: str, n: int, s: int, j: int) -> float:
    e, w, ghat, vhat = c.ids[n, s], c.weights[n, s].double(), c.estimates.gate[n, s, j], c.estimates.up[n, s, j]
    ghat, vhat = ghat.double().requires_grad_(), vhat.double()
    phi = c.activation.function(ghat)
    (slope,) = torch.autograd.grad(phi, ghat)
    phi, p, d = phi.detach(), phi.detach() * vhat, c.down_norms[e, j].double()
    if name == "norm":
        return float(abs(w) * d * abs(p))
    energy_in, energy_out = c.estimates.energy_read[n].double(), c.estimates.energy_unread[n].double()
    if name == "rho":
        sg2, sv2 = ((c.errors[e, m, :, j].double() * (energy_in + energy_out)).sum() for m in range(2))
    else:
        noise = c.code.noise_read * energy_in + c.code.noise_unread * energy_out
        sg2, sv2 = ((c.scales[e, m, :, j].double() ** 2 * noise).sum() for m in range(2))
    var = (slope * vhat) ** 2 * sg2 + phi**2 * sv2 + slope**2 * sg2 * sv2
    return float(w**2 * (p**2 * (d**2 - (c.coeffs[e, j].double() ** 2).sum()) + var * d**2))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_scores_are_their_formulas(name: str, code: Code, rank: int, activation: str) -> None:
    c = candidates(code, rank, activation)
    scores = score(c, name)
    assert (c.weights < 0).any()
    assert (scores[~SERVED] == -math.inf).all()
    expected = [[formula(c, name, n, s, j) for j in range(7)] for n, s in SERVED.nonzero().tolist()]
    torch.testing.assert_close(scores[SERVED].double(), torch.tensor(expected, dtype=torch.float64), **FLOAT32)


def test_only_rho_reads_the_stored_errors() -> None:
    assert [name for name, entry in SCORES.items() if entry.reads_errors] == ["rho"]


def test_an_unknown_score_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"best.*norm, rho, variance"):
        get_score("best")


# ---------------------------------------------------------------- exact and recover


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_adds_the_kept_channels(dtype: torch.dtype) -> None:
    n, k, i, h = *IDS.shape, 7, 100
    x, weights, kept = gaussian(n, h).to(dtype), gaussian(n, k), random_bools(n, k, i)
    gate_up, down = gaussian(E, 2, i, h, seed=1).to(dtype) / 10, gaussian(E, i, h, seed=2).to(dtype)
    y = exact(x, IDS, weights, kept, gate_up, down, SILU)
    expected = torch.zeros(n, h, dtype=torch.float64)
    for t, s, j in (kept & SERVED.unsqueeze(-1)).nonzero().tolist():
        gate, up = gate_up[IDS[t, s], :, j].double() @ x[t].double()
        expected[t] += weights[t, s] * SILU.function(gate) * up * down[IDS[t, s], j].double()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, **FLOAT32)


def test_recover_folds_the_skipped_channels() -> None:
    n, k, i, h, r = *IDS.shape, 7, 100, 5
    p, weights, kept = gaussian(n, k, i), gaussian(n, k, seed=1), random_bools(n, k, i)
    basis, coeffs = gaussian(h, r, seed=2).half(), gaussian(E, i, r, seed=3).half()
    y = recover(p, IDS, weights, kept, basis, coeffs)
    expected = torch.zeros(n, h, dtype=torch.float64)
    for t, s, j in (~kept & SERVED.unsqueeze(-1)).nonzero().tolist():
        expected[t] += weights[t, s].double() * p[t, s, j] * (basis.double() @ coeffs[IDS[t, s], j].double())
    torch.testing.assert_close(y.double(), expected, **FLOAT32)


def test_the_format_and_the_kernels_name_the_same_scores() -> None:
    """config.json may name a score, and formats/ knows nothing of kernels/."""
    from mreader.formats import augmented
    from mreader.kernels.score import SCORES

    assert tuple(SCORES) == augmented.SCORES
