"""Attention of one new token a sequence over a cache of fixed size: scores, softmax and values in one kernel."""

# N sequences, h heads, g key heads, L tokens, D their size, Dv that of their values

import torch
import triton
from torch import Tensor

from mreader.kernels.attention_kernel import attention_kernel, combine_parts_kernel
from mreader.kernels.intrinsics import has_dependent_launch, launch_options

_BYTES = 1 << 16  # of keys that a program holds, and of values as many
_WARPS, _COMBINE_WARPS = 8, 4


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """y_n = sum over tokens l of p_l v_l, p = softmax of scale * q_n . k_l + mask_l; a key head serves h / g heads.

    query:   (N, h, D) float of up to 32 bits
    key:     (N, g, L, D), h a multiple of g
    value:   (N, g, L, Dv)
    mask:    (N or 1, L) bool, true where a token is seen, or an addend; None: all are seen
    returns: (N, h, Dv) dtype of query; a sequence that sees no token has no numbers

    Sums are float32 in a fixed order, and shares are not rounded. For few sequences: every head reads its keys anew.
    """
    (N, h, D), (g, L), Dv = query.shape, key.shape[1:3], value.shape[-1]
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    widest = triton.next_power_of_2(max(D, Dv))
    block = max(min(_BYTES // (widest * key.element_size()), triton.next_power_of_2(L)), 1)
    parts = triton.cdiv(L, block)
    several = parts if parts > 1 else 0
    output = query.new_empty(N, h, Dv)
    sums, scores = (torch.empty(N, h, several, size, device=query.device) for size in (Dv, 2))
    steps = (0, 0) if mask is None else (mask.stride(0) if len(mask) > 1 else 0, mask.stride(1))
    options = launch_options(has_dependent_launch(query.device))
    attention_kernel[(parts, h, N)](
        *(query, key, value, mask, output, sums, scores, scale, L),
        *(*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *steps, -1),
        **{"GROUP": h // g, "PARTS": parts, "BLOCK": block, "D": D, "DV": Dv},
        **options,
        num_warps=_WARPS,
    )
    if several:
        combine_parts_kernel[(N * h,)](*(sums, scores, output), PARTS=parts, DV=Dv, **options, num_warps=_COMBINE_WARPS)
    return output
