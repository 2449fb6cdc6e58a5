"""The decoder layers of a captured step, compiled by torch: everything of them but the routed experts.

transformers writes a layer as some eighty small operations, each a kernel that starts, reads and writes; compiled, they
are about thirteen. All layers of a kind share one compilation, for which a layer is traced in the form of its `_twin`.
"""

# N sequences, L tokens of the cache, h heads, g key heads, D their size, E experts, K routed experts, H hidden size

import copy
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mreader.backend import runs_kernels
from mreader.experts import experts_forward
from mreader.runtime import decoder_layers, experts_modules

_ATTENTION = "mreader_one_token"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# Up to so many products of two numbers are summed by reductions, which fuse with their neighbours, keep a GPU busy with
# few rows, and take key heads as they are stored; a matrix product reads each number once, and wins with more of them.
_FEW_PRODUCTS, _FEW_SCORES = 1 << 23, 1 << 22
# A row up to so long, and so many of it, are taken from it one by one.
_FEW_NUMBERS, _FEW_LARGEST = 1024, 16
_UP_TO_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
# For the compiler. A rotary embedding concatenates, which otherwise ends one kernel and begins another. Block sizes of
# reductions are chosen by rule: measuring kernels of 2 us chooses at random, some ten times slower than others. And
# kernels that do not wait for each other, as of queries and keys, are launched as one.
_OPTIONS: dict[str, Any] = {"force_pointwise_cat": True, "deterministic": True, "combo_kernels": True}
# Kinds of layer times batches, lengths and models of one process: none of them is a sign of something going wrong.
_COMPILATIONS = 1024

# down_proj's address -> experts module of the step that this thread runs
_serving: ContextVar[dict[int, Any]] = ContextVar("mreader_serving", default={})  # noqa: B039


def why_not_compiled(device: torch.device) -> str | None:
    """Why nothing is compiled for the device here; None where it can be."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE is set"
    if device.type == "cuda" and not runs_kernels(device):
        return "triton is not installed"
    wanted, known = ("CXX", ("g++", "clang++")) if device.type == "cpu" else ("CC", ("gcc", "clang", "cc"))
    if os.environ.get(wanted) or any(map(shutil.which, known)):
        return None
    return f"there is no {known[0]}"


class CompiledLayers:
    """The decoder layers of a model, compiled for one token a sequence on `cache`; used by the model within `in_force`.

    Results are those of the layers as they are but for rounding: what is fused stays in float32.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache) -> None:
        self._experts = {module.down_proj.data_ptr(): module for _, module in experts_modules(model)}
        self._cache = cache
        configs: dict[int, Any] = {}
        self._calls = [
            (layer, partial(self._call, layer, *self._traced(layer, configs))) for layer in decoder_layers(model)
        ]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within the block, the model's forward pass takes the compiled layers, in this thread."""
        token = _serving.set(self._experts)
        before = [layer._compiled_call_impl for layer, _ in self._calls]
        try:
            for layer, call in self._calls:
                layer._compiled_call_impl = call
            with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
                yield
        finally:
            for (layer, _), was in zip(self._calls, before, strict=True):
                layer._compiled_call_impl = was
            _serving.reset(token)

    def _traced(self, layer: Any, configs: dict[int, Any]) -> tuple[Any, Cache]:
        """The layer's twin, and a cache that has this layer only."""
        numbers = {module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")}
        own = [self._cache.layers[number] for number in numbers if number < len(self._cache.layers)]
        return _twin(layer, configs), Cache(layers=own)

    def _call(self, layer: Any, twin: Any, own: Cache, *args: Any, **kwargs: Any) -> Any:
        if _serving.get() is not self._experts:  # another thread's call of the same model
            return layer._call_impl(*args, **kwargs)
        args = tuple(own if value is self._cache else value for value in args)
        kwargs = {name: own if value is self._cache else value for name, value in kwargs.items()}
        return _compiled_run()(twin, args, kwargs)


def _twin(layer: Any, configs: dict[int, Any]) -> Any:
    """The layer with the same weights, in the form that is the same for all layers of its kind.

    It is number 0, of a cache with one layer; its routed experts are one opaque operation, its attention is
    `one_token_attention` where it is sdpa, and queries, keys and values are the rows of one product.

    configs: copies of the model's configurations by the id of the original, shared by all twins
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    for module in layer.modules():
        if hasattr(module, "mreader"):
            memo[id(module)] = _Experts(module.down_proj)
        for value in vars(module).values():
            if isinstance(value, PreTrainedConfig):
                memo[id(value)] = configs.setdefault(id(value), _with_attention(value))
    twin = copy.deepcopy(layer, memo)
    for module in list(twin.modules()):
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0
        _join_projections(module)
    return twin


def _with_attention(config: PreTrainedConfig) -> PreTrainedConfig:
    changed = copy.copy(config)
    if config._attn_implementation == "sdpa":
        changed._attn_implementation_internal = _ATTENTION
    return changed


def _join_projections(module: nn.Module) -> None:
    """Make q_proj, k_proj and v_proj rows of one matrix: a small product takes as long to start as to run.

    The matrix is a copy: weights that became views of it would be pulled from under graphs that hold their address.
    """
    parts: list[Any] = [getattr(module, name, None) for name in _PROJECTIONS]
    linears = [part for part in parts if type(part) is nn.Linear and part.bias is None]
    if len(linears) < len(parts) or len({part.in_features for part in linears}) > 1:
        return
    rows = nn.Parameter(torch.cat([part.weight for part in linears]), requires_grad=False)
    start = 0
    for name, part in zip(_PROJECTIONS, linears, strict=True):
        setattr(module, name, _Rows(rows, start, part.out_features))
        start += part.out_features


class _Rows(nn.Module):
    """x -> rows start .. start + count of a product that several of these have in common: (..., H) -> (..., count)."""

    def __init__(self, weight: nn.Parameter, start: int, count: int) -> None:
        super().__init__()
        self.weight, self.start, self.count = weight, start, count

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).narrow(-1, self.start, self.count)


class _Experts(nn.Module):
    """The routed experts as one operation, which finds them by the address of their down weights."""

    def __init__(self, down_proj: nn.Parameter) -> None:
        super().__init__()
        self.down_proj = down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output: Tensor = _routed_experts(hidden_states, top_k_index, top_k_weights, self.down_proj)
        return output


@torch.library.custom_op("mreader::routed_experts", mutates_args=())
def _routed_experts(x: Tensor, ids: Tensor, weights: Tensor, down_proj: Tensor) -> Tensor:
    return experts_forward(_serving.get()[down_proj.data_ptr()], x, ids, weights)


@_routed_experts.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, down_proj: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def one_token_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(scaling * q k^T + mask) v of one query a sequence, for transformers' attention interface.

    query:          (N, h, 1, D)
    key, value:     (N, g, L, D), (N, g, L, Dv)
    attention_mask: (N or 1, 1, 1, L) bool, true where a token is seen, or an addend
    returns:        (N, 1, h, Dv)
    """
    N, h, T, D = query.shape
    g, L = key.shape[1:3]
    if T != 1 or position_bias is not None or kwargs.get("s_aux") is not None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **kwargs
        )
        return output, None
    scale = D**-0.5 if scaling is None else scaling
    grouped = query.reshape(N, g, h // g, D)
    if N * h * L * D <= _FEW_SCORES:
        scores = (grouped.unsqueeze(-2).float() * key.unsqueeze(2).float()).sum(-1) * scale
    else:
        scores = (grouped @ key.transpose(-1, -2)).float() * scale
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = torch.where(attention_mask, scores, float("-inf"))
    elif attention_mask is not None:
        scores = scores + attention_mask
    shares = scores.softmax(-1)  # (N, g, h / g, L)
    output = shares.to(query.dtype) @ value
    return output.reshape(N, 1, h, value.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, one_token_attention)


def _rewrite(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
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
            elif _has_few_products(node):
                node.target = _linear
    graph.recompile()
    return graph


def _has_few_products(linear: torch.fx.Node) -> bool:
    x, weight = (cast("torch.fx.Node", arg).meta["example_value"] for arg in linear.args[:2])
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


def _backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return _lower(_rewrite(graph), inputs)


def _lower(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    lowered: Any = compile_fx(graph, inputs, config_patches=_OPTIONS)
    return cast("Callable[..., Any]", lowered)


@cache
def _compiled_run() -> Callable[..., Any]:
    """Made when first called for: torch.compile imports for seconds."""
    return torch.compile(_run, backend=_backend, dynamic=False)


def _run(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(*args, **kwargs)
