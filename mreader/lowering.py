"""A layer's operations in forms of which torch's compiler makes few kernels, and fast ones."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from mreader.graphs import example_of, is_parameter, name_of, nothing_changes
from mreader.opaque import product

# Up to so many products of two numbers are summed by reductions, which fuse with their neighbours, keep a GPU busy with
# few rows; a matrix product reads each number once, and wins with more of them.
_FEW_PRODUCTS = 1 << 23
# From so many numbers on, reading a matrix takes longer than a kernel of its own costs, which holds rows so long.
_MANY_NUMBERS, _LONGEST_ROW = 1 << 20, 1 << 14
# A row up to so long, and so many of it, are taken from it one by one.
_FEW_NUMBERS, _FEW_LARGEST = 1024, 16
_UP_TO_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
# For the compiler. A rotary embedding concatenates, which otherwise ends one kernel and begins another. Block sizes of
# reductions are chosen by rule: measuring kernels of 2 us chooses at random, some ten times slower than others. And
# kernels that do not wait for each other, as of queries and keys, are launched as one.
_OPTIONS: dict[str, Any] = {"force_pointwise_cat": True, "deterministic": True, "combo_kernels": True}

# What `_waiting_first` makes of torch's code: to be changed with it.
_WAITING = "mreader: waits before it reads or writes, 1"


def rewrite(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Put operations into a form that the compiler makes fewer kernels of."""
    _merge_equal_products(graph.graph)
    for node in list(graph.graph.nodes):
        if node.target in (torch.topk, "topk"):
            node.op, node.target = "call_function", _topk
        elif _is_product(node) and _is_of_one_token(node):
            _put_product(graph.graph, node)
        elif _is_product(node) and _has_few_products(node):
            node.target = _linear
    graph.recompile()
    return graph


def _merge_equal_products(graph: torch.fx.Graph) -> None:
    products: dict[Any, torch.fx.Node] = {}
    for node in filter(_is_product, list(graph.nodes)):
        first = products.get(node.args)
        if first is not None and nothing_changes(first, node):
            node.replace_all_uses_with(first)
            graph.erase_node(node)
        else:
            products[node.args] = node


def _is_product(node: Any) -> bool:
    """Whether it is linear by a matrix, all in one dtype, which autocast may have changed."""
    if node.target is not nn.functional.linear or node.kwargs:
        return False
    x, weight = map(example_of, node.args[:2])
    return bool(weight.dim() == 2 and x.dtype == weight.dtype == example_of(node).dtype)


def _put_product(graph: Any, linear: Any) -> None:
    """Our product in place of the linear node, or of a sum with it that comes next."""
    x, weight = linear.args[:2]
    addend = _other_addend(linear)
    node = linear if addend is None else linear.next
    node.op, node.target, node.args = "call_function", product._opoverload, (x, weight, addend)
    if addend is not None:
        graph.erase_node(linear)


def _other_addend(linear: Any) -> Any:
    """b where the next node is b + linear or linear + b, of tensors alike, and linear's only use; else None."""
    total, y = linear.next, example_of(linear)
    if name_of(total) != "add" or list(linear.users) != [total] or len(total.args) != 2 or total.kwargs:
        return None
    (other,) = [arg for arg in total.args if arg is not linear] or [None]
    example = getattr(other, "meta", {}).get("example_value")
    alike = isinstance(example, Tensor) and example.shape == y.shape and example.dtype == y.dtype
    return other if alike else None


def _is_of_one_token(linear: Any) -> bool:
    """Whether `mreader.kernels.product` takes the product: one row times a parameter of 16 bits that is long to read.

    Not another matrix: the kernel reads it before it waits for what its predecessor writes.
    """
    if len(linear.args) > 2 and linear.args[2] is not None:
        return False
    x, weight = map(example_of, linear.args[:2])
    fits = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and is_parameter(linear.args[1])
    return fits and x.numel() == weight.shape[1] <= _LONGEST_ROW and weight.numel() >= _MANY_NUMBERS


def _has_few_products(linear: torch.fx.Node) -> bool:
    x, weight = map(example_of, linear.args[:2])
    return x.dtype != torch.float64 and int(x.numel() * len(weight)) <= _FEW_PRODUCTS


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
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.virtualized import V

    class _OwnCode(CustomGraphPass):
        """No pass: a part of the name under which torch keeps code, which it would take for its own."""

        def __call__(self, graph: Any) -> None:
            pass

        def uuid(self) -> str:
            return _WAITING

    name = "_handle_pdl_before_access"
    before: Any = getattr(TritonKernel, name, None)
    if before is None:
        yield {}
        return

    def wait(kernel: Any, *args: Any, **kwargs: Any) -> None:
        scheduler = V.graph.scheduler
        if scheduler is None:
            return before(kernel, *args, **kwargs)
        known, scheduler.previous_node = scheduler.previous_node, None
        try:
            before(kernel, *args, **kwargs)
        finally:
            scheduler.previous_node = known

    setattr(TritonKernel, name, wait)
    try:
        yield {"triton.enable_pdl": True, "post_grad_custom_post_pass": _OwnCode()}
    finally:
        setattr(TritonKernel, name, before)
