"""A layer's operations in forms of which torch's compiler makes few kernels, and fast ones."""

# N tokens, E experts, K routed experts of a token

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from mreader.experts import chooses_experts
from mreader.opaque import product, routed_by_logits, routed_experts, served

# Up to so many products of two numbers are summed by reductions, which fuse with their neighbours, keep a GPU busy with
# few rows; a matrix product reads each number once, and wins with more of them.
_FEW_PRODUCTS = 1 << 23
# From so many numbers on, reading a matrix takes longer than a kernel of its own costs, which holds rows so long.
_MANY_NUMBERS, _LONGEST_ROW = 1 << 20, 1 << 14
# A row up to so long, and so many of it, are taken from it one by one.
_FEW_NUMBERS, _FEW_LARGEST = 1024, 16
_UP_TO_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("to", "float", "type_as")  # methods
# For the compiler. A rotary embedding concatenates, which otherwise ends one kernel and begins another. Block sizes of
# reductions are chosen by rule: measuring kernels of 2 us chooses at random, some ten times slower than others. And
# kernels that do not wait for each other, as of queries and keys, are launched as one.
_OPTIONS: dict[str, Any] = {"force_pointwise_cat": True, "deterministic": True, "combo_kernels": True}


def rewrite(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Put operations into a form that the compiler makes fewer kernels of."""
    products: dict[Any, torch.fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.target in (torch.topk, "topk"):
            node.op, node.target = "call_function", _topk
        elif node.target is nn.functional.linear and not node.kwargs:
            first = products.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.graph.erase_node(node)
            elif _is_of_one_token(node):
                node.target, node.args = product._opoverload, node.args[:2]
            elif _has_few_products(node):
                node.target = _linear
    graph.recompile()
    return graph


def route_in_kernels(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Give the routed experts their router's logits, where they choose by themselves: see `chooses_experts`.

    What chose before has no use then, and the compiler leaves it out.
    """
    for node in list(graph.graph.nodes):
        router = _router_of(node) if node.target is routed_experts._opoverload else None
        if router is None or not all(_chooses(module, node, router[1]) for module in served().values()):
            continue
        x, _, _, down_proj = node.args
        node.target, node.args = routed_by_logits._opoverload, (x, *router, down_proj)
    graph.recompile()
    return graph


def _chooses(module: Any, experts: Any, routed: int) -> bool:
    return chooses_experts(module, _example(experts.args[0]), routed)


def _router_of(experts: Any) -> tuple[Any, int, bool] | None:
    """Logits, K and whether weights add up to one, of a router as in `mreader.kernels.route`; None of any other.

    That is topk(softmax(logits)), as it is or divided by its sum, or softmax(topk(logits)), of a product that serves
    nothing else. Between topk and softmax there is no other type, which could have equal numbers where there were none.
    """
    _, ids, weights, _ = experts.args
    weights = _without_casts(weights)
    if _is_softmax(weights):  # of the largest logits
        largest, renormalize = weights.args[0], True
    else:
        largest, renormalize = _undivided(weights)
    topk: Any = largest.args[0] if _name(largest) == "getitem" and largest.args[1] == 0 else None
    if _name(topk) != "topk" or _name(ids) != "getitem" or ids.args != (topk, 1):
        return None
    arguments = inspect.signature(_topk).bind(*topk.args, **topk.kwargs).arguments
    scores, routed = arguments.pop("x"), arguments.pop("k")
    if not arguments.items() <= {("dim", -1), ("dim", 1), ("largest", True), ("sorted", True)}:
        return None
    if not _is_softmax(weights):
        if not _is_softmax(scores):
            return None
        scores = scores.args[0]
    logits = _without_casts(scores)
    if logits.target is not nn.functional.linear or not _serves_only(experts, logits):
        return None
    return logits, routed, renormalize


def _serves_only(experts: Any, logits: Any) -> bool:
    """Whether nothing else has to do with logits, ids, weights and all between: it might change them in place."""
    between, left = {logits, experts}, [*experts.args[1:3]]
    while left:
        node = left.pop()
        if node not in between:
            between.add(node)
            left.extend(node.args[:1] if _name(node) in _CASTS else node.all_input_nodes)
    return all(user in between for node in between - {experts} for user in node.users)


def _undivided(weights: Any) -> tuple[Any, bool]:
    """a of a / a.sum(-1, keepdim=True), and whether it was divided."""
    if _name(weights) in ("truediv", "itruediv", "div", "div_"):
        number, total = weights.args
        if (
            _name(total) == "sum"
            and total.args[0] is number
            and _axis(total) in (-1, 1)
            and total.kwargs.get("keepdim")
        ):
            return number, True
    return weights, False


def _is_softmax(node: Any) -> bool:
    """Along the last of two axes, not in less than float32."""
    if _name(node) != "softmax" or _example(node).dtype != torch.float32:
        return False
    return _axis(node) in (-1, 1) and _example(node).dim() == 2


def _axis(node: Any) -> Any:
    """The `dim` of a function or method that takes it behind the tensor."""
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")


def _without_casts(node: Any) -> Any:
    while _name(node) in _CASTS:
        node = node.args[0]
    return node


def _name(node: Any) -> str:
    """Of the function or method that a node calls."""
    target = getattr(node, "target", None)
    return str(getattr(target, "__name__", target))


def _example(node: Any) -> Any:
    """A tensor without numbers, as the node's."""
    return node.meta["example_value"]


def _is_of_one_token(linear: Any) -> bool:
    """Whether `mreader.kernels.product` takes the product: one row times a parameter of 16 bits that is long to read.

    Not another matrix: the kernel reads it before it waits for what its predecessor writes.
    """
    if len(linear.args) > 2 and linear.args[2] is not None:
        return False
    x, weight = map(_example, linear.args[:2])
    fits = x.is_cuda and x.dtype == weight.dtype in (torch.bfloat16, torch.float16) and isinstance(weight, nn.Parameter)
    return fits and x.numel() == weight.shape[1] <= _LONGEST_ROW and weight.numel() >= _MANY_NUMBERS


def _has_few_products(linear: torch.fx.Node) -> bool:
    x, weight = map(_example, linear.args[:2])
    return x.dtype == weight.dtype != torch.float64 and int(x.numel() * len(weight)) <= _FEW_PRODUCTS


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As nn.functional.linear of a matrix, by reductions in float32: a router has too few rows for a matrix product."""
    y = (x.unsqueeze(-2).float() * weight.float()).sum(-1)
    return (y if bias is None else y + bias).to(x.dtype)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """As torch.topk, of equal numbers the first ones: by taking the largest k times, each with its place in one int64.

    All of these are reductions of one row, which the compiler makes one kernel of, with the softmax before it. How long
    its sort takes depends on how many rows it gives to a program: 3 us or 27, for 8 rows of 128.
    """
    count = x.shape[dim]
    if not 0 < k <= min(count, _FEW_LARGEST) or count > _FEW_NUMBERS or x.dtype not in _UP_TO_FLOAT32:
        values, indices = x.sort(dim=dim, descending=largest, stable=True)
        return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)
    order = _in_order(x) if largest else ~_in_order(x)
    left = order << 32 | (count - 1 - _places(x, dim))
    found = []
    for _ in range(k):
        found.append(left.amax(dim, keepdim=True))
        left = torch.where(left == found[-1], torch.iinfo(torch.int64).min, left)
    both = torch.cat(found, dim)
    order = both >> 32 if largest else ~(both >> 32)
    return _out_of_order(order).to(x.dtype), count - 1 - (both & 0xFFFFFFFF)


def _places(x: Tensor, dim: int) -> Tensor:
    """(x.shape[dim], 1, ...): the index along an axis, to be broadcast."""
    return torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))


def _in_order(x: Tensor) -> Tensor:
    """int64 in the order of the numbers: their bits as float32, all but the sign turned over where it is negative.

    0.0 and -0.0 are one number, and what is no number is the largest.
    """
    number = torch.where(x == 0, 0.0, x.float())
    bits = torch.where(x.isnan(), math.nan, number).view(torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()


def _out_of_order(order: Tensor) -> Tensor:
    """float32: the inverse of `_in_order`."""
    bits = order.int()
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(torch.float32)


def lower(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The graph as kernels."""
    from torch._inductor.compile_fx import compile_fx

    with _waiting_first() as early:
        lowered: Any = compile_fx(graph, inputs, config_patches=_OPTIONS | early)
    return cast("Callable[..., Any]", lowered)


@contextmanager
def _waiting_first() -> Iterator[dict[str, Any]]:
    """Options by which a kernel starts while the one before it ends, from Hopper on, and waits for it before all else.

    The wait that torch generates stands before what it knows its predecessor to have written, by name; of two names of
    one tensor, as a cache that is changed in place has, it knows one. Without a predecessor, it waits before it reads
    or writes anything. None where this torch does it in another way.
    """
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    name = "_handle_pdl_before_access"
    before: Any = getattr(TritonKernel, name, None)
    if before is None:
        yield {}
        return

    def wait(kernel: Any, *args: Any, **kwargs: Any) -> None:
        scheduler = V.graph.scheduler
        known, scheduler.previous_node = scheduler.previous_node, None
        try:
            before(kernel, *args, **kwargs)
        finally:
            scheduler.previous_node = known

    setattr(TritonKernel, name, wait)
    try:
        yield {"triton.enable_pdl": True}
    finally:
        setattr(TritonKernel, name, before)
