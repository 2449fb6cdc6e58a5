"""Choose a token's experts from its router's logits."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import is_less


@triton.jit
def route_token(
    logits,  # (N, E) any float
    ids,  # (N, K) int32, written: by falling logit, equal ones by number
    weights,  # (N, K) float32, written: their softmax over all experts, or over the K
    padding,  # (N,) bool, of tokens that have no experts, -1; or None
    token,
    slots,
    EXPERTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """An expert's place is the number of larger logits. Every place has an expert, whatever the logits hold.

    Behind the last expert stand some that are smaller than any number; a token that gets one, as other logits are no
    numbers, has no expert there.
    """
    EXPERTS_UP: tl.constexpr = triton.next_power_of_2(EXPERTS)
    expert = tl.arange(0, EXPERTS_UP)
    inside = expert < EXPERTS
    logit = tl.load(
        logits + token.to(tl.int64) * EXPERTS + expert, mask=inside, other=float("-inf"), cache_modifier=".cg"
    ).to(tl.float32)
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    # Of a float that had 16 bits the lower 13 say nothing, and int32 has room for the rest and the expert.
    if logits.dtype.element_ty.primitive_bitwidth == 16:
        order = _as_it_is((order >> 13) * EXPERTS_UP - expert)
        place = tl.sum(is_less(order[None, :], order[:, None]), axis=0)
    else:
        order = _as_it_is(order.to(tl.int64) * EXPERTS_UP - expert)
        place = tl.sum((order[:, None] > order[None, :]).to(tl.int32), axis=0)
    chosen = place < slots
    share = tl.exp(logit - tl.max(logit, axis=0))
    share /= tl.sum(tl.where(chosen, share, 0.0) if RENORMALIZE else share, axis=0)
    if padding is not None:
        inside = inside & (tl.load(padding + token) == 0)
    to = token.to(tl.int64) * slots + place
    tl.store(ids + to, tl.where(inside, expert, -1), mask=chosen)
    tl.store(weights + to, share, mask=chosen)


@triton.jit
def _as_it_is(tensor):
    """The tensor, which the compiler exchanges between threads as it is.

    Else it exchanges what the tensor is made of, where that has fewer bits, and every thread makes all of it anew: of
    128 orders, 1,200 instructions more, which no program has in its cache.
    """
    return tl.max(tensor[:, None], axis=1)
