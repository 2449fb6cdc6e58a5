"""What torch's compiler is given: the same in other operations, routers left to the reader, kernels that wait."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mreader import lowering, opaque
from mreader.kernels.route import route
from mreader.opaque import Experts


@pytest.fixture(autouse=True)
def _compilers_start_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------- products and topk


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("few", [True, False])
def test_the_largest_are_topk_s(few: bool, dim: int, largest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one and, where there are many numbers, by sorting; groups that are out of the running hold infinities."""
    monkeypatch.setattr(lowering, "_FEW_NUMBERS", 11 if few else 6)
    x = torch.randperm(77, generator=torch.Generator().manual_seed(0)).view(7, 11) - 38.0
    x[2] = float("-inf")
    x[2, 4], x[2, 9] = 1.5, -2.5
    for found, expected in zip(lowering._topk(x, 2, dim, largest), x.topk(2, dim, largest), strict=True):
        assert found.dtype == expected.dtype
        if dim == 0 or largest:  # else equals decide, of which topk names any
            assert torch.equal(found, expected)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


@pytest.mark.parametrize("k", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_are_topk_s_in_every_dtype(dtype: torch.dtype, k: int) -> None:
    """None, few and many of a row; numbers that float32 cannot tell apart where the dtype can."""
    x = torch.randperm(3 * 40, generator=torch.Generator().manual_seed(0)).view(3, 40).to(dtype)
    if dtype in (torch.float64, torch.int64):
        x += 2**40
    values, indices = lowering._topk(x, k)
    expected = x.topk(k)
    assert values.dtype == dtype
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


@pytest.mark.parametrize("k", [3, 16])
def test_more_than_there_are_is_refused_as_by_topk(k: int) -> None:
    with pytest.raises(RuntimeError):
        lowering._topk(torch.zeros(2, 2), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [True, False])
def test_of_equal_numbers_the_first_are_chosen(largest: bool, dtype: torch.dtype) -> None:
    x = torch.tensor([[-0.0, 5.0, 0.0, 5.0, 5.0]], dtype=dtype) * (1 if largest else -1)
    values, indices = lowering._topk(x, 5, -1, largest)
    assert indices.tolist() == [[1, 3, 4, 0, 2]]
    assert torch.equal(values, x[0, indices])


def test_places_of_what_is_no_number_are_places() -> None:
    """The largest: a router's choice stays one, whatever a token holds."""
    x = torch.tensor(
        [[1.0, math.nan, 3.0, math.inf, math.nan], [math.nan] * 5, [-math.inf, math.nan, -math.inf, 0.0, 0.0]]
    )
    x[0, 1] = -x[0, 1]  # the sign of what is no number is none
    values, indices = lowering._topk(x, 3)
    assert indices.tolist() == [[1, 4, 3], [0, 1, 2], [1, 3, 4]]
    torch.testing.assert_close(values, x.gather(-1, indices), rtol=0, atol=0, equal_nan=True)
    values, indices = lowering._topk(x, 3, largest=False)
    assert indices.tolist() == [[0, 2, 3], [0, 1, 2], [0, 2, 3]]
    torch.testing.assert_close(values, x.gather(-1, indices), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bias", [torch.arange(5.0), None])
def test_a_product_by_sums_is_linear_s(bias: Tensor | None) -> None:
    """Of float32 products of bfloat16 numbers, rounded once: half a unit in the last place, 2^-8."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, 2, 33), (5, 33)))
    found = lowering._linear(x, weight, bias if bias is None else bias.bfloat16())
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias if bias is None else bias.double())
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


class Router(torch.nn.Module):
    """A product of 4 x 6 x 10 and one of 4 x 6 x 11."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.wide = torch.nn.Linear(6, 10), torch.nn.Linear(6, 11)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.router(x).topk(3), self.wide(x)


def test_what_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products up to the bound, and every topk."""
    monkeypatch.setattr(lowering, "_FEW_PRODUCTS", 4 * 6 * 10)
    targets: list[Any] = []
    model, x = Router(), torch.randn(4, 6)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        targets.extend(node.target for node in lowering.rewrite(graph).graph.nodes)
        return graph

    found, expected = torch.compile(model, backend=backend)(x), model(x)
    assert targets.count(lowering._linear) == targets.count(torch.nn.functional.linear) == 1
    assert targets.count(lowering._topk) == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- routers

E, H, K = 10, 6, 3
Choice = Callable[[Tensor], tuple[Tensor, Tensor]]
"""logits (N, E) -> ids (N, K) and weights (N, K)."""


class Block(nn.Module):
    """A router and the experts that it chooses."""

    def __init__(self, choose: Choice) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = Experts(nn.Parameter(torch.zeros(E, 4, H), requires_grad=False))
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.experts(x, *self.choose(self.gate(x)))
        return output


def shares(logits: Tensor) -> Tensor:
    return nn.functional.softmax(logits, dtype=torch.float32, dim=-1)


def as_qwen3(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(shares(logits), K, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    return ids, values.to(logits.dtype)


def as_olmoe(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(shares(logits), K, dim=-1)
    return ids, values.to(logits.dtype)


def as_mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(nn.functional.softmax(logits.float(), dim=-1), K, dim=-1)
    return ids, values / values.sum(dim=-1, keepdim=True)


def as_granite(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().topk(K, dim=-1)
    return ids, torch.softmax(values, dim=-1).type_as(logits)


def by_positions(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(torch.softmax(logits.to(torch.float32), -1), K, -1, True, True)
    return ids, torch.div(values, torch.sum(values, 1, keepdim=True))


def by_methods(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().softmax(1).topk(k=K, dim=1, largest=True, sorted=True)
    return ids, values.div(values.sum(dim=-1, keepdim=True))


PLAIN = [
    *((as_qwen3, True), (as_olmoe, False), (as_mixtral, True), (as_granite, True)),
    *((by_positions, True), (by_methods, True)),
]


def rounded_before(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).bfloat16().topk(K)
    return ids, values


def in_bfloat16(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.bfloat16().softmax(-1).topk(K)
    return ids, values


def smallest(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K, largest=False)
    return ids, values


def smallest_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(K, -1, False)
    return ids, shares(values)


def in_any_order(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K, sorted=False)
    return ids, values


def along_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().softmax(0).topk(K)
    return ids, values


def largest_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K, dim=0)
    return ids.mT, values.mT


def by_sigmoid(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.sigmoid().topk(K)
    return ids, values / values.sum(-1, keepdim=True)


def with_a_bias(logits: Tensor) -> tuple[Tensor, Tensor]:
    every = shares(logits)
    ids = (every + torch.arange(E)).topk(K)[1]
    return ids, every.gather(-1, ids)


def bias_on_the_shares(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = (shares(logits) + torch.arange(E)).topk(K)
    return ids, values


def scaled(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, 2.5 * values


def scaled_by_expert(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / values.sum(-1, keepdim=True) * torch.arange(E)[ids]


def scaled_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    values *= 2.5
    return ids, values


def divided_by_more(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / (values.sum(-1, keepdim=True) + 1e-2)


def divided_by_all(logits: Tensor) -> tuple[Tensor, Tensor]:
    every = logits.exp()
    values, ids = every.topk(K)
    return ids, values / every.sum(-1, keepdim=True)


def divided_along_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / values.sum(0, keepdim=True)


def divided_the_other_way(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values.sum(-1, keepdim=True) / values


def divided_sum_of_others(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / values.square().sum(-1, keepdim=True)


def of_other_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, _ = shares(logits).topk(K)
    return (-logits).topk(K)[1], values


def moved_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return (ids + 1) % E, values


def ids_changed_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    ids.fmod_(4)
    return ids, values


def logits_changed_after(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    logits.zero_()
    return ids, values


def logits_are_a_view(logits: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([logits, logits])
    values, ids = shares(both[: len(logits)]).topk(K)
    both.zero_()
    return ids, values


def weights_changed_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    weights = values / values.sum(-1, keepdim=True)
    weights[:, 0] = 1.0
    return ids, weights


def turned_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids.flip(-1), values


def places_as_weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    _, ids = shares(logits).topk(K)
    return ids, ids / ids.sum(-1, keepdim=True)


def from_groups(logits: Tensor) -> tuple[Tensor, Tensor]:
    every = shares(logits)
    best = every.unflatten(-1, (2, -1)).amax(-1).argmax(-1, keepdim=True)
    values, ids = every.masked_fill(torch.arange(E) // (E // 2) != best, 0.0).topk(K)
    return ids, values


def of_masked_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    masked = logits.masked_fill(logits > 0.5, float("-inf"))
    values, ids = shares(masked).topk(K)
    return ids, values


def softmax_twice(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, shares(values)


OTHERS = [
    *(rounded_before, in_bfloat16, smallest, smallest_logits, in_any_order, along_tokens, largest_tokens, by_sigmoid),
    *(with_a_bias, bias_on_the_shares, scaled, scaled_by_expert, scaled_in_place, divided_by_more, divided_by_all),
    *(divided_along_tokens, divided_the_other_way, divided_sum_of_others, of_other_ids, moved_ids),
    *(
        ids_changed_in_place,
        logits_changed_after,
        logits_are_a_view,
        weights_changed_in_place,
        turned_ids,
        places_as_weights,
        from_groups,
        of_masked_logits,
        softmax_twice,
    ),
]


class Chosen:
    """What the experts of a compiled block were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, chooses: bool = True) -> None:
        self.ids = self.weights = torch.empty(0)
        self.renormalize: bool | None = None  # none where the experts were told ids
        self.asked: list[int] = []
        monkeypatch.setattr(lowering, "chooses_experts", lambda module, x, k: (self.asked.append(k), chooses)[1])
        monkeypatch.setattr(opaque, "experts_forward", self._forward)
        monkeypatch.setattr(opaque, "experts_by_logits", self._by_logits)

    def of(self, choose: Choice, x: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
        block = Block(choose).to(dtype)
        with torch.no_grad(), opaque.serving({block.experts.down_proj.data_ptr(): block.experts}):
            block.gate.weight.copy_(torch.randn(E, H, generator=torch.Generator().manual_seed(1)))
            self.logits = block.gate(x)
            self.expected = choose(self.logits.clone())
            torch.compile(block, backend=lambda graph, inputs: lowering.route_in_kernels(graph))(x)

    def _forward(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.ids, self.weights, self.renormalize = ids, weights, None
        return x.clone()

    def _by_logits(self, module: Any, x: Tensor, logits: Tensor, routed: int, renormalize: bool) -> Tensor:
        assert torch.equal(logits, self.logits)
        (self.ids, self.weights), self.renormalize = route(logits, routed, renormalize), renormalize
        return x.clone()


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, H, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("choose", "renormalize"), PLAIN)
def test_a_plain_router_is_left_to_the_reader(
    choose: Choice, renormalize: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are those of the router but for their type, BF16 where that is the model's: half a unit, 2^-8."""
    chosen = Chosen(monkeypatch)
    chosen.of(choose, tokens(dtype), dtype=dtype)
    ids, weights = chosen.expected
    assert chosen.renormalize == renormalize
    assert chosen.asked == [K]
    assert torch.equal(chosen.ids, ids)
    tolerance = 1e-6 if weights.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(chosen.weights, weights.float(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("choose", OTHERS)
def test_any_other_router_stays(choose: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch)
    chosen.of(choose, tokens())
    ids, weights = chosen.expected
    assert chosen.renormalize is None
    assert torch.equal(chosen.ids, ids)
    torch.testing.assert_close(chosen.weights, weights)


def test_a_router_in_16_bits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shares that are rounded to the same number, the first is the largest; of their logits, another one may be."""
    chosen = Chosen(monkeypatch)
    chosen.of(lambda logits: logits.softmax(-1).topk(K)[::-1], tokens(torch.bfloat16), dtype=torch.bfloat16)
    assert chosen.renormalize is None


def test_a_router_stays_where_the_kernels_do_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch, chooses=False)
    chosen.of(as_qwen3, tokens())
    assert chosen.renormalize is None
    assert chosen.asked == [K]


# ---------------------------------------------------------------- products of one token

PARAMETER, MADE = nn.Parameter, Tensor.clone


@pytest.mark.parametrize(
    ("x", "weight", "make", "dtype", "bias", "taken"),
    [
        ((1, 1, 2048), (512, 2048), PARAMETER, torch.bfloat16, False, True),
        ((1, 2048), (600, 2048), PARAMETER, torch.float16, False, True),
        ((1, 1, 2048), (511, 2048), PARAMETER, torch.bfloat16, False, False),
        ((2, 1, 2048), (512, 2048), PARAMETER, torch.bfloat16, False, False),
        ((1, 1, 2048), (512, 2048), PARAMETER, torch.float32, False, False),
        ((1, 1, 2048), (512, 2048), PARAMETER, torch.bfloat16, True, False),
        ((1, 1, 2048), (512, 2048), MADE, torch.bfloat16, False, False),
        ((1, 1, 1 << 15), (512, 1 << 15), PARAMETER, torch.bfloat16, False, False),
    ],
)
def test_long_products_of_one_token_by_a_parameter_have_a_kernel(
    x: tuple[int, ...],
    weight: tuple[int, int],
    make: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    bias: bool,
    taken: bool,
) -> None:
    """Not where the matrix is made within the step: the kernel reads it before it waits. Nor on a CPU."""
    with FakeTensorMode():
        for device, expected in (("cuda:0", taken), ("cpu", False)):
            graph = torch.fx.Graph()
            nodes = [graph.placeholder(name) for name in ("x", "weight")]
            tensors = torch.empty(x, dtype=dtype, device=device), make(torch.empty(weight, dtype=dtype, device=device))
            for node, tensor in zip(nodes, tensors, strict=True):
                node.meta["example_value"] = tensor
            more = (graph.placeholder("bias"),) if bias else (None,)
            linear = graph.call_function(nn.functional.linear, (*nodes, *more))
            lowering.rewrite(torch.fx.GraphModule(nn.Module(), graph))
            assert (linear.target is opaque.product._opoverload) == expected
            assert len(linear.args) == (2 if expected else 3)


# ---------------------------------------------------------------- kernels that start early


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[..., list[str]]:
    """Bodies of the Triton kernels that torch generates for a function, as on a Hopper GPU; of combined ones each."""
    import torch.utils._triton
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []

    def save(code: str) -> None:
        codes.append(code)
        raise Generated

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda *_: True)
    monkeypatch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda *_: "none")
    monkeypatch.setattr(TritonKernel, "_enable_pdl_codegen", staticmethod(lambda: bool(config.triton.enable_pdl)))
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(save))
    options = {**lowering._OPTIONS, "cpu_backend": "triton", "fx_graph_cache": False}
    monkeypatch.setattr(lowering, "_OPTIONS", options)

    def generate(function: Callable[..., Any], *inputs: Any) -> list[str]:
        codes.clear()
        torch._dynamo.reset()
        with pytest.raises(Exception, match="Generated"), torch.inference_mode():
            torch.compile(function, backend=lowering.lower, dynamic=False)(*inputs)
        kernels = re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", codes[0], re.DOTALL)
        bodies = [source[source.index("@triton.jit") :] for source in kernels]
        assert bodies
        return [part for body in bodies for part in re.split(r"\n    (?:el)?if pid < num_xblocks", body)[1:] or [body]]

    return generate


class Generated(Exception):
    """There is code, which no compiler is needed for."""


def waits_first(kernel: str) -> bool:
    before, wait, _ = kernel.partition("gdc_wait()")
    return bool(wait) and not re.search(r"tl\.(load|store|atomic)", before)


def change_in_place(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    """A row of the cache and then all of it, as attention does."""
    cache.index_copy_(1, at, (2 * new).softmax(-1))
    return cache.sum(-1)


ROWS = torch.randn(4, 64)
FUNCTIONS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda x: x * 2 + torch.arange(64), (ROWS,)),
    (lambda x: (x / x.pow(2).mean(-1, keepdim=True)).softmax(-1), (ROWS,)),
    (lambda x: torch.zeros_like(x).scatter(0, x.argsort(0), x), (ROWS,)),
    (lambda x: (x.sum(-1), x.new_ones(7)), (ROWS,)),
    (lambda x, y: (x.softmax(-1), y.softmax(-1)), (ROWS, torch.randn(4, 48))),
    (lambda x: (x.unsqueeze(-2) * torch.ones(300, 64)).sum(-1).cumsum(-1), (ROWS,)),
    (lambda x: lowering._topk(x.softmax(-1), 3), (ROWS,)),
    (change_in_place, (torch.randn(2, 640, 64), torch.randn(2, 1, 64), torch.tensor([5]))),
]


@pytest.mark.parametrize(("function", "inputs"), FUNCTIONS)
def test_every_kernel_waits_before_it_reads_or_writes(
    function: Callable[..., Any], inputs: tuple[Any, ...], generated: Callable[..., list[str]]
) -> None:
    """In every part of a combined one, as a kernel that does not wait ends before its predecessor."""
    assert all(waits_first(kernel) for kernel in generated(function, *inputs))


def test_torch_alone_reads_what_is_changed_in_place_before_it_waits(
    generated: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it does no longer, nothing has to be done about it."""
    monkeypatch.setattr(lowering, "_waiting_first", lambda: nullcontext({"triton.enable_pdl": True}))
    function, inputs = FUNCTIONS[-1]
    assert not all(waits_first(kernel) for kernel in generated(function, *inputs))


def test_torch_s_generator_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen.triton import TritonKernel

    name = "_handle_pdl_before_access"
    before = getattr(TritonKernel, name)
    with lowering._waiting_first() as options:
        assert options == {"triton.enable_pdl": True}
        assert getattr(TritonKernel, name) is not before
    assert getattr(TritonKernel, name) is before
    with pytest.raises(RuntimeError, match="out of registers"), lowering._waiting_first():
        raise RuntimeError("out of registers")
    assert getattr(TritonKernel, name) is before
    monkeypatch.delattr(TritonKernel, name)
    with lowering._waiting_first() as options:
        assert options == {}, "a torch that does it in another way: kernels start one after the other"
