"""Operations of a compiled layer that torch's compiler does not look into: routed experts, attention, products."""

# N tokens or sequences, E experts, K routed experts of a token, H hidden size, h heads, Dv size of a value

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mreader.backend import current
from mreader.experts import experts_by_gate, experts_by_logits, experts_forward

# down_proj's address -> experts module of the step that this thread runs
_serving: ContextVar[dict[int, Any]] = ContextVar("mreader_serving", default={})  # noqa: B039


@contextmanager
def serving(modules: dict[int, Any]) -> Iterator[None]:
    """Within the block, in this thread, these experts modules are the ones that compiled layers call.

    modules: by the address of their down_proj
    """
    token = _serving.set(modules)
    try:
        yield
    finally:
        _serving.reset(token)


def served() -> dict[int, Any]:
    """The modules that `serving` has named."""
    return _serving.get()


class Experts(nn.Module):
    """The routed experts as one operation, which finds them by the address of their down weights."""

    def __init__(self, down_proj: nn.Parameter) -> None:
        super().__init__()
        self.down_proj = down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output: Tensor = routed_experts(hidden_states, top_k_index, top_k_weights, self.down_proj)
        return output


@torch.library.custom_op("mreader::routed_experts", mutates_args=())
def routed_experts(x: Tensor, ids: Tensor, weights: Tensor, down_proj: Tensor) -> Tensor:
    """`mreader.experts.experts_forward` of the module with these down weights."""
    return experts_forward(_serving.get()[down_proj.data_ptr()], x, ids, weights)


@routed_experts.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, down_proj: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mreader::routed_by_logits", mutates_args=())
def routed_by_logits(x: Tensor, logits: Tensor, routed: int, renormalize: bool, down_proj: Tensor) -> Tensor:
    """`mreader.experts.experts_by_logits` of the module with these down weights."""
    return experts_by_logits(_serving.get()[down_proj.data_ptr()], x, logits, routed, renormalize)


@routed_by_logits.register_fake
def _(x: Tensor, logits: Tensor, routed: int, renormalize: bool, down_proj: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mreader::routed_by_gate", mutates_args=())
def routed_by_gate(
    x: Tensor, rows: Tensor, norm: Tensor, epsilon: float, routed: int, renormalize: bool, down_proj: Tensor
) -> Tensor:
    """`mreader.experts.experts_by_gate` of the module with these down weights."""
    return experts_by_gate(_serving.get()[down_proj.data_ptr()], x, rows, norm, epsilon, routed, renormalize)


@routed_by_gate.register_fake
def _(
    x: Tensor, rows: Tensor, norm: Tensor, epsilon: float, routed: int, renormalize: bool, down_proj: Tensor
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mreader::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`mreader.kernels.attention.attend`, on a CUDA device."""
    from mreader.kernels.attention import attend

    with current(query.device):
        return attend(query, key, value, mask, scale)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


@torch.library.custom_op("mreader::product", mutates_args=())
def product(x: Tensor, weight: Tensor, addend: Tensor | None) -> Tensor:
    """`mreader.kernels.product.product`, on a CUDA device."""
    from mreader.kernels.product import product

    with current(x.device):
        return product(x, weight, addend)


@product.register_fake
def _(x: Tensor, weight: Tensor, addend: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
