"""The decoder layers of a captured step, compiled by torch: everything of them but the routed experts.

transformers writes a layer as some eighty small operations, each a kernel that starts, reads and writes; compiled, they
are about nine. All layers of a kind share one compilation, for which a layer is traced in the form of its `_twin`.
"""

# N sequences, L tokens of the cache, h heads, g key heads, D their size, E experts, K routed experts, H hidden size

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mreader.backend import runs_kernels
from mreader.lowering import lower, rewrite
from mreader.opaque import Experts, attend, served, serving
from mreader.routers import route_in_kernels
from mreader.runtime import Mode, decoder_layers, experts_modules

_ATTENTION = "mreader_one_token"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# Up to so many products of two numbers, every head takes its scores by itself, and reads its keys anew.
_FEW_SCORES = 1 << 22
# Kinds of layer times batches, lengths and models of one process: none of them is a sign of something going wrong.
_COMPILATIONS = 1024


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

    choosing: the mode in which kernels may choose experts by the router's logits; None where they do not
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, *, choosing: Mode | None) -> None:
        self._choosing = choosing
        self._experts = {module.down_proj.data_ptr(): module for _, module in experts_modules(model)}
        self._cache = cache
        configs: dict[int, Any] = {}
        self._calls = [
            (layer, partial(self._call, layer, *self._traced(layer, configs))) for layer in decoder_layers(model)
        ]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within the block, the model's forward pass takes the compiled layers, in this thread."""
        before = [layer._compiled_call_impl for layer, _ in self._calls]
        try:
            for layer, call in self._calls:
                layer._compiled_call_impl = call
            with serving(self._experts), torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
                yield
        finally:
            for (layer, _), was in zip(self._calls, before, strict=True):
                layer._compiled_call_impl = was

    def _traced(self, layer: Any, configs: dict[int, Any]) -> tuple[Any, Cache]:
        """The layer's twin, and a cache that has this layer only."""
        numbers = {module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")}
        own = [self._cache.layers[number] for number in numbers if number < len(self._cache.layers)]
        return _twin(layer, configs), Cache(layers=own)

    def _call(self, layer: Any, twin: Any, own: Cache, *args: Any, **kwargs: Any) -> Any:
        if served() is not self._experts:  # another thread's call of the same model
            return layer._call_impl(*args, **kwargs)
        args = tuple(own if value is self._cache else value for value in args)
        kwargs = {name: own if value is self._cache else value for name, value in kwargs.items()}
        return _compiled_run(self._choosing)(twin, args, kwargs)


def _twin(layer: Any, configs: dict[int, Any]) -> Any:
    """The layer with the same weights, in the form that is the same for all layers of its kind.

    It is number 0, of a cache with one layer; its routed experts are one opaque operation, its attention is
    `one_token_attention` where it is sdpa, and queries, keys and values are the rows of one product.

    configs: copies of the model's configurations by the id of the original, shared by all twins
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    for module in layer.modules():
        if hasattr(module, "mreader"):
            memo[id(module)] = Experts(module.down_proj)
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
    g = key.shape[1]
    if T != 1 or position_bias is not None or kwargs.get("s_aux") is not None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **kwargs
        )
        return output, None
    scale = D**-0.5 if scaling is None else scaling
    if _has_kernel(query, key, attention_mask):
        mask = attention_mask if attention_mask is None else attention_mask[:, 0, 0]
        return attend(query[:, :, 0], key, value, mask, scale).unsqueeze(1), None
    scores = (query.reshape(N, g, h // g, D) @ key.transpose(-1, -2)).float() * scale
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = torch.where(attention_mask, scores, float("-inf"))
    elif attention_mask is not None:
        scores = scores + attention_mask
    shares = scores.softmax(-1)  # (N, g, h / g, L)
    output = shares.to(query.dtype) @ value
    return output.reshape(N, 1, h, value.shape[-1]), None


def _has_kernel(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether `mreader.kernels.attention` takes it: few products, and a mask that is the same for all heads."""
    N, h, _, D = query.shape
    L = key.shape[2]
    few = N * h * L * D <= _FEW_SCORES
    return query.is_cuda and query.dtype != torch.float64 and few and (mask is None or mask.shape[1:] == (1, 1, L))


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, one_token_attention)


@cache
def _compiled_run(choosing: Mode | None) -> Callable[..., Any]:
    """Made when first called for: torch.compile imports for seconds.

    One for each mode, with a backend of its own, by which torch tells compilations apart: the mode decides whether the
    kernels choose at a batch.
    """

    def choosing_backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return _backend(route_in_kernels(graph), inputs)

    return torch.compile(_run, backend=_backend if choosing is None else choosing_backend, dynamic=False)


def _run(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(*args, **kwargs)


def _backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return lower(rewrite(graph), inputs)
