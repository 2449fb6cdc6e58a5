"""What torch's compiler is given: the same in other operations, and what it makes of them: kernels that wait."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mreader import lowering, opaque


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


# ---------------------------------------------------------------- products of one token

ROWS = torch.randn(4, 64)
PARAMETER, MADE = nn.Parameter, Tensor.clone


def turned(weight: Tensor) -> Tensor:
    return nn.Parameter(weight.view(weight.shape[::-1]).mT)


def graph_of(make: Callable[..., Any], *tensors: Tensor) -> tuple[torch.fx.Graph, Any]:
    """What `make` adds to a graph of these inputs, rewritten, and its output; none has numbers, as there is no GPU."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"input_{at}") for at in range(len(tensors))]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["example_value"] = tensor
    output = graph.output(make(graph, *nodes))
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            x, *more = (getattr(arg, "meta", {}).get("example_value") for arg in node.args)
            size = (*x.shape[:-1], len(more[0])) if node.target is nn.functional.linear else x.shape
            node.meta["example_value"] = torch.empty(size, dtype=x.dtype, device=x.device)
    lowering.rewrite(torch.fx.GraphModule(nn.Module(), graph))
    return graph, output.args[0]


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
        ((1, 1, 2048), (512, 2048), turned, torch.bfloat16, False, False),
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
            tensors = [
                torch.empty(x, dtype=dtype, device=device),
                make(torch.empty(weight, dtype=dtype, device=device)),
            ]
            tensors += [torch.empty(weight[0], dtype=dtype, device=device)] * bias
            _, linear = graph_of(
                lambda graph, *nodes: graph.call_function(nn.functional.linear, (*nodes, *[None] * (not bias))),
                *tensors,
            )
            assert (linear.target is opaque.product._opoverload) == expected
            assert len(linear.args) == 3
            assert bias or linear.args[2] is None


@pytest.mark.parametrize(
    ("add", "taken"),
    [
        (lambda graph, y, other, wide, precise: graph.call_function(operator.add, (other, y)), True),
        (lambda graph, y, other, wide, precise: graph.call_function(torch.add, (y, other)), True),
        (lambda graph, y, other, wide, precise: graph.call_method("add", (y, other)), True),
        (lambda graph, y, other, wide, precise: graph.call_function(torch.add, (y, other), {"alpha": 2}), False),
        (lambda graph, y, other, wide, precise: graph.call_function(operator.iadd, (y, other)), False),
        (lambda graph, y, other, wide, precise: graph.call_function(operator.mul, (y, other)), False),
        (lambda graph, y, other, wide, precise: graph.call_function(operator.add, (y, y)), False),
        (lambda graph, y, other, wide, precise: graph.call_function(operator.add, (y, 1.0)), False),
        (lambda graph, y, other, wide, precise: graph.call_function(operator.add, (y, wide)), False),
        (lambda graph, y, other, wide, precise: graph.call_function(operator.add, (y, precise)), False),
        (lambda graph, y, other, wide, precise: (graph.call_function(operator.add, (y, other)), y), False),
        (
            lambda graph, y, other, wide, precise: (
                graph.call_method("zero_", (other,)),
                graph.call_function(operator.add, (y, other)),
            )[1],
            False,
        ),
    ],
)
def test_a_sum_behind_such_a_product_is_taken_along(add: Callable[..., Any], taken: bool) -> None:
    """Where it comes next, is of tensors alike, and nothing else has use for the product."""
    with FakeTensorMode():
        sizes = ((1, 1, 2048), (512, 2048), (1, 1, 512), (4, 1, 512))
        x, weight, other, wide = (torch.empty(size, dtype=torch.bfloat16, device="cuda:0") for size in sizes)
        graph, _ = graph_of(
            lambda graph, x, weight, *more: add(graph, graph.call_function(nn.functional.linear, (x, weight)), *more),
            *(x, nn.Parameter(weight), other, wide, torch.empty(1, 1, 512, device="cuda:0")),
        )
        products = [node for node in graph.nodes if node.target is opaque.product._opoverload]
        x_node, weight_node, other_node, *_ = (node for node in graph.nodes if node.op == "placeholder")
        assert [node.args for node in products] == [(x_node, weight_node, other_node if taken else None)]
        assert any("add" in str(node.target) or "mul" in str(node.target) for node in graph.nodes) != taken
        graph.lint()


CHANGES: list[Callable[[torch.fx.Graph, Any], Any]] = [
    lambda graph, node: graph.call_method("add_", (node, 1.0)),
    lambda graph, node: graph.call_function(operator.iadd, (node, 1.0)),
    lambda graph, node: graph.call_function(operator.setitem, (node, 0, 1.0)),
    lambda graph, node: graph.call_function(torch.add, (node, 1.0), {"out": node}),
]


@pytest.mark.parametrize("of_product", [False, True])
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_equal_products_are_one_unless_something_changes_between_them(
    change: Callable[[torch.fx.Graph, Any], Any] | None, of_product: bool
) -> None:
    def thrice(graph: torch.fx.Graph, x: Any, weight: Any) -> Any:
        first = graph.call_function(nn.functional.linear, (x, weight))
        if change:
            change(graph, first if of_product else x)
        graph.call_method("__add__", (x, 1.0))
        return first, *(graph.call_function(nn.functional.linear, (x, weight)) for _ in range(2))

    graph, _ = graph_of(thrice, torch.zeros(3, 5), torch.zeros(2, 5))
    assert sum(node.target is lowering._linear for node in graph.nodes) == (2 if change else 1)


def test_a_product_that_a_sum_took_along_is_no_other_one_s() -> None:
    """Where something changes between the two; else the first has another use than the sum."""

    def make(graph: torch.fx.Graph, x: Any, weight: Any, other: Any, *, changes: bool) -> Any:
        total = graph.call_function(operator.add, (graph.call_function(nn.functional.linear, (x, weight)), other))
        if changes:
            graph.call_method("add_", (x, 1.0))
        return total, graph.call_function(nn.functional.linear, (x, weight))

    with FakeTensorMode():
        sizes = ((1, 2048), (512, 2048), (1, 512))
        x, weight, other = (torch.empty(size, dtype=torch.bfloat16, device="cuda:0") for size in sizes)
        for changes in (True, False):
            graph, _ = graph_of(partial(make, changes=changes), x, nn.Parameter(weight), other)
            graph.lint()
            addends = [node.args[2] for node in graph.nodes if node.target is opaque.product._opoverload]
            assert [addend is not None for addend in addends] == ([True, False] if changes else [False])


def test_a_product_under_autocast_stays() -> None:
    model, x = Router(), torch.randn(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = torch.compile(model, backend=lambda graph, inputs: lowering.rewrite(graph))(x)
        expected = model(x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_a_product_by_a_vector_stays() -> None:
    _, y = graph_of(lambda graph, *nodes: graph.call_function(nn.functional.linear, nodes), ROWS, ROWS[0])
    assert y.target is nn.functional.linear


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


def test_torch_keeps_the_code_under_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch made with the same options, but without waits, is not taken for it; nor what another version made."""
    from torch._inductor.graph import GraphLowering

    made: list[str] = []
    codegen = GraphLowering.codegen
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(GraphLowering, "codegen", lambda graph: (made.append(""), codegen(graph))[1])
    waiting, torch_s = lowering._waiting_first, lambda: nullcontext({"triton.enable_pdl": True})
    for how, name, expected in (
        *((torch_s, "", 1), (torch_s, "", 0), (waiting, lowering._WAITING, 1), (waiting, lowering._WAITING, 0)),
        (waiting, "another version", 1),
    ):
        monkeypatch.setattr(lowering, "_waiting_first", how)
        monkeypatch.setattr(lowering, "_WAITING", name)
        torch._dynamo.reset()
        made.clear()
        with torch.inference_mode():
            torch.compile(lambda x: (3 * x).softmax(-1), backend=lowering.lower, dynamic=False)(ROWS)
        assert len(made) == expected


def test_torch_s_generator_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen.triton import TritonKernel

    name = "_handle_pdl_before_access"
    before = getattr(TritonKernel, name)
    with lowering._waiting_first() as options:
        assert options["triton.enable_pdl"] is True
        assert getattr(TritonKernel, name) is not before
    assert getattr(TritonKernel, name) is before
    with pytest.raises(RuntimeError, match="out of registers"), lowering._waiting_first():
        raise RuntimeError("out of registers")
    assert getattr(TritonKernel, name) is before
    monkeypatch.delattr(TritonKernel, name)
    with lowering._waiting_first() as options:
        assert options == {}, "a torch that does it in another way: kernels start one after the other"
