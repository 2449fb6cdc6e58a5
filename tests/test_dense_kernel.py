"""The dense grouped products against their formula in float64, at odd shapes; their plan; and CUDA graphs of them."""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert, P = N * K slots

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mreader.activations import get_activation
from mreader.errors import UnsupportedError
from mreader.kernels import dense as module
from mreader.kernels.dense import Blocks, Tile, dense, dense_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative to the norm of the output. float32: hundreds of products, rounded at 6e-8 each. The others round a_j, the
# rows and y, at 2^-12 (FP16) and 2^-9 (BF16); the interpreter cuts BF16 off instead, at 2^-8, and always downwards.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}
SMALL = Blocks(16, Tile(32, 32, 4, 2), Tile(64, 16, 4, 2))  # small tiles: every loop runs more than once


@dataclass(frozen=True)
class Layer:
    """Random inputs of one call."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor

    def run(self, activation: str = "silu", blocks: Blocks | None = None) -> Tensor:
        return dense(self.x, self.ids, self.weights, self.gate_up, self.down, activation, blocks)

    def tokens(self, n: int) -> "Layer":
        """The first n tokens only."""
        return replace(self, x=self.x[:n], ids=self.ids[:n], weights=self.weights[:n])

    def error(self, y: Tensor, activation: str = "silu") -> float:
        """||y - reference|| / ||reference||."""
        reference = self.formula(get_activation(activation).function)
        return float((y.double() - reference).norm() / reference.norm())

    def formula(self, phi: Callable[[Tensor], Tensor]) -> Tensor:
        """y_n = sum over slots s of w_ns * sum_j phi(g_j . x_n) * (v_j . x_n) * d_j, slot by slot in float64."""
        x, gate_up, down = self.x.double(), self.gate_up.double(), self.down.double()
        y = torch.zeros_like(x)
        for n, token_ids in enumerate(self.ids.tolist()):
            for s, e in enumerate(token_ids):
                if 0 <= e < len(down):
                    gate, up = gate_up[e] @ x[n]
                    y[n] += self.weights[n, s].double() * ((phi(gate) * up) @ down[e])
        return y


def make(N: int, E: int, K: int, H: int, I: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Layer:
    """Gaussian weights that keep g . x near 1, routing weights of both signs, sentinels on both sides of 0..E-1."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Layer(
        gaussian(N, H).to(DEVICE, dtype),
        torch.randint(-1, E + 1, (N, K), generator=generator).to(DEVICE),
        gaussian(N, K).to(DEVICE),
        (gaussian(E, 2, I, H) / H**0.5).to(DEVICE, dtype),
        (gaussian(E, I, H) / I**0.5).to(DEVICE, dtype),
    )


# ---------------------------------------------------------------- the formula

SHAPES = [
    (1, 6, 3, 192, 80),  # a decode step: every tile has a masked end in I
    (5, 6, 3, 192, 80),  # programs find their block; experts shared by tokens
    (23, 6, 3, 192, 80),  # the first sizes with a plan
    (40, 2, 2, 64, 48),  # more slots an expert than a block holds
    (12, 1, 1, 64, 32),  # one expert, one slot
    (7, 37, 5, 100, 30),  # a prime E, most experts without a token, H and I that no vector of 16 bytes divides
    (4, 3, 3, 33, 17),  # K = E, odd rows
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_output_is_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = make(*shape, dtype=dtype)
    y = layer.run()
    assert y.dtype == dtype
    assert y.shape == layer.x.shape
    assert layer.error(y) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu2"])
def test_activations_are_those_of_the_cpu(name: str) -> None:
    layer = make(3, 6, 3, 64, 48)
    assert layer.error(layer.run(name), name) < TOLERANCE[torch.float32]


def test_an_activation_without_a_kernel_is_named() -> None:
    with pytest.raises(UnsupportedError, match="sparkle"):
        make(1, 2, 1, 32, 16).run("sparkle")


@pytest.mark.parametrize("slots", [15, 90, 700, 2000, 9000])
def test_every_default_of_the_tiles_gives_the_formula(slots: int) -> None:
    E = 31
    layer = make(8, E, 3, 80, 70)
    assert layer.error(layer.run(blocks=module._blocks(slots, E, 4))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_formula(dtype: torch.dtype) -> None:
    layer = make(9, 6, 3, 64, 48, dtype=dtype)
    y = dense_reference(layer.x, layer.ids, layer.weights, layer.gate_up, layer.down, get_activation("silu"))
    assert y.dtype == dtype
    assert layer.error(y) < TOLERANCE[dtype]


# ---------------------------------------------------------------- who contributes


@pytest.mark.parametrize("tokens", [2, 40])
def test_slots_that_no_expert_serves_contribute_nothing(tokens: int) -> None:
    layer = make(tokens, 4, 3, 64, 32)
    nobody = torch.tensor([-1, 4, 99], device=DEVICE).expand(tokens, 3)
    y = replace(layer, ids=nobody).run()
    assert torch.equal(y, torch.zeros_like(y))


def test_a_token_may_name_an_expert_twice() -> None:
    layer = make(6, 4, 3, 64, 32)
    layer = replace(layer, ids=torch.tensor([2, 0, 2], device=DEVICE).expand(6, 3))
    assert layer.error(layer.run()) < TOLERANCE[torch.float32]


def test_no_tokens_give_no_rows() -> None:
    assert make(0, 4, 3, 64, 32).run().shape == (0, 64)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing_comes_in_any_dtype(ids_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    layer = make(30, 5, 3, 64, 32)
    layer = replace(layer, ids=layer.ids.to(ids_dtype), weights=layer.weights.to(weights_dtype))
    assert layer.error(layer.run()) < TOLERANCE[torch.float32]


def test_many_tokens_are_computed_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TOKENS", 4)
    layer = make(9, 5, 3, 64, 32)
    assert layer.error(layer.run()) < TOLERANCE[torch.float32]


# ---------------------------------------------------------------- which sums are made, and in which order


def test_a_token_has_the_same_bits_whatever_is_beside_it() -> None:
    layer = make(30, 4, 3, 64, 48)
    alone = [layer.tokens(n).run(blocks=SMALL) for n in (1, 25)]  # without a plan and with one
    together = layer.run(blocks=SMALL)
    assert torch.equal(alone[0][0], together[0])
    assert torch.equal(alone[1], together[:25])


def test_the_order_of_the_slots_of_an_expert_changes_no_bit() -> None:
    layer = make(30, 4, 3, 64, 48)
    turned = Layer(layer.x.flip(0), layer.ids.flip(0), layer.weights.flip(0), layer.gate_up, layer.down)
    assert torch.equal(layer.run(blocks=SMALL), turned.run(blocks=SMALL).flip(0))


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_split_sums_add_up(splits: int) -> None:
    """Of 3 steps of 16 channels, the last one masked, 2 splits get 2 and 1, and 5 splits get one each or nothing."""
    layer = make(3, 4, 3, 64, 41)
    assert layer.error(layer.run(blocks=replace(SMALL, splits=splits))) < TOLERANCE[torch.float32]


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize("experts", [1, 5, 64])
@pytest.mark.parametrize("slots", [1, 16, 17, 300, 5000])
def test_the_plan_sorts_the_slots_and_covers_each_once(slots: int, experts: int) -> None:
    m = 16
    ids = torch.randint(-2, experts + 2, (slots, 1), generator=torch.Generator().manual_seed(slots)).to(DEVICE)
    plan = module._plan(module._Launcher(DEVICE), ids, experts, m)
    assert plan.order is not None
    assert plan.blocks is not None

    flat = ids.flatten()
    served = ((flat >= 0) & (flat < experts)).nonzero().flatten()
    order = served[flat[served].sort(stable=True).indices]
    assert plan.order[: len(order)].tolist() == order.tolist()

    covered = []
    for expert, first, end in plan.blocks.T.tolist():
        members = plan.order[first : min(first + m, end)].tolist() if expert >= 0 else []
        assert all(flat[slot] == expert for slot in members)
        covered += members
    assert covered == order.tolist()


# ---------------------------------------------------------------- resources


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("experts", [1, 6, 64, 128, 512])
def test_defaults_fit_the_shared_memory_of_any_gpu(experts: int, element_size: int) -> None:
    for power in range(19):
        blocks = module._blocks(1 << power, experts, element_size)
        assert blocks.shared_bytes(element_size) <= 99 * 1024


# ---------------------------------------------------------------- on a GPU

REAL = [(128, 8, 2048, 768), (64, 8, 2048, 1024), (128, 8, 2816, 704)]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 9, 64, 300, 3000])
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_real_shapes_on_a_gpu(shape: tuple[int, int, int, int], tokens: int) -> None:
    E, K, H, I = shape
    torch.manual_seed(tokens)
    x = torch.randn(tokens, H, device=DEVICE, dtype=torch.bfloat16)
    gate_up = (torch.randn(E, 2, I, H, device=DEVICE) / H**0.5).bfloat16()
    down = (torch.randn(E, I, H, device=DEVICE) / I**0.5).bfloat16()
    ids = torch.rand(tokens, E, device=DEVICE).topk(K).indices
    weights = torch.rand(tokens, K, device=DEVICE)
    y = dense(x, ids, weights, gate_up, down, "gelu_pytorch_tanh").double()
    wide = dense_reference(x.double(), ids, weights, gate_up, down, get_activation("gelu_pytorch_tanh"))
    # a_j, the rows and y are rounded to BF16, at 2^-9 each.
    assert float((y - wide).norm() / wide.norm()) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 40])
def test_weights_fetched_ahead_change_no_bit(tokens: int) -> None:
    layer = make(tokens, 32, 4, 250, 100, dtype=torch.bfloat16)  # the last columns and channels are no whole tile
    plain = layer.run(blocks=SMALL)
    assert torch.equal(layer.run(blocks=replace(SMALL, ahead=4)), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_a_graph_holds_a_call_and_replays_the_same_bits(tokens: int) -> None:
    layer = make(tokens, 32, 4, 256, 128, dtype=torch.bfloat16)
    layer.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.run()
    for seed in (1, 2):
        other = make(tokens, 32, 4, 256, 128, dtype=torch.bfloat16, seed=seed)
        layer.x.copy_(other.x)
        layer.ids.copy_(other.ids)
        layer.weights.copy_(other.weights)
        graph.replay()
        assert torch.equal(y, layer.run())
