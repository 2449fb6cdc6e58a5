"""Rotate a token and pick its coordinates: one program a (block, token), and some that choose the token's experts."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import (
    is_less,
    let_next_start,
    nearest_integer,
    wait_for_earlier,
    wait_for_earlier_after,
)
from mreader.kernels.route_kernel import route_token
from mreader.kernels.screen_kernel import UNIT

_SCALE = tl.constexpr(0.08838834764831845)  # 1 / sqrt(128)
_LARGEST = tl.constexpr(13)  # the exponent that the largest |Rx| of a block gets: x' = 256 hi + lo, both signed bytes
_INFINITE, _NO_NUMBER = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)  # bits of float32


@triton.jit
def _hadamard(ORDER: tl.constexpr):
    """(ORDER, ORDER) float32 of +-1 in Sylvester's order: entry (i, j) is minus one to the number of bits of i & j."""
    i = tl.arange(0, ORDER)
    common = i[:, None] & i[None, :]
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float32)


@triton.jit
def rotate_kernel(
    x,  # (N, H) any float
    signs,  # (H,) int8
    picked,  # (N, nb, 128) int32, written: coordinate, hi and lo of its x' in 2, 1 and 1 bytes, by falling |Rx|
    blocks,  # (N, 3, nb) float32, written: UNIT / 2^e, sum of the picked x', energy of the error of a unit of noise
    histogram,  # (N, HISTOGRAM) int32, cleared for the scores
    rows,  # (N, listed) int64, -1 written, for the kept channels
    logits,  # (N, E) any float, or None: then ids and weights are there
    gate,  # (E, H) any float, whose products with the normed x the logits are: written here; None: x is normed
    norm,  # (H,) any float, with a gate
    normed,  # (N, H), with a gate written
    arrived,  # (N,) int32 zeros, with a gate: of its programs those that are through; zeros again behind the last
    ids,  # (N, K), written if there are logits, then int32
    weights,  # (N, K), written if there are logits, then float32
    padding,  # (N,) bool, or None
    epsilon,  # of the norm
    listed,
    slots,
    never,  # -1
    hidden: tl.constexpr,
    COORDINATES: tl.constexpr,
    NOISE_READ: tl.constexpr,  # squared error of an estimate per energy picked, in units of the score's noise
    NOISE_UNREAD: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    nb: tl.constexpr,
    EXPERTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUTERS: tl.constexpr,  # programs of a token that come before those of the blocks
    ROWS: tl.constexpr,  # of the gate, in each of them
    DEPENDENT: tl.constexpr,
):
    """x' = Rx 2^e, to the nearest integer, e such that the largest of the block lies in [2^13, 2^14].

    Where the largest |Rx| is below 2^-87, so is that. Where it is not finite, 1 / 2^e is no number, as what follows.

    Hadamard_128 = Hadamard_8 (x) Hadamard_16, coordinate i = 16 a + b: 3072 products instead of 16384.
    A coordinate's place is the number of larger ones. The last 7 of 24 digits of |Rx| give way to the coordinate, so
    that one comparison orders any two: equals are listed from the left, and so may be two within 2^-16 of each other.

    Where there are logits, the first program of a token chooses its experts. Where there is a gate, every program norms
    the token, and of those that multiply by the gate the last one to be through, when all logits are there, chooses.
    """
    block, token = tl.program_id(0), tl.program_id(1)
    if logits is not None:
        block -= ROUTERS
        if block < 0:
            if gate is None:
                wait_for_earlier(DEPENDENT)
                let_next_start(DEPENDENT)
                is_last = True
            else:
                first = (block + ROUTERS) * ROWS
                is_last = _write_logits(
                    x, gate, norm, logits, arrived, epsilon, token, first,
                    hidden, EXPERTS, ROUTERS, ROWS, DEPENDENT,
                )  # fmt: skip
            if is_last:
                route_token(logits, ids, weights, padding, token, slots, EXPERTS, RENORMALIZE)
            return
    at = block * 128 + tl.arange(0, 16)[:, None] + tl.arange(0, 8)[None, :] * 16
    sign = tl.load(signs + at, mask=at < hidden, other=0).to(tl.float32)
    if gate is not None:
        norm_weight = tl.load(norm + at, mask=at < hidden, other=0.0).to(tl.float32)
    of_token = token.to(tl.int64) * hidden + at
    wait_for_earlier_after(of_token.to(tl.int32) & 0x7FFFFFFF, never, DEPENDENT)
    let_next_start(DEPENDENT)
    number = tl.load(x + of_token, mask=at < hidden, other=0.0).to(tl.float32)
    if gate is not None:
        h = tl.arange(0, triton.next_power_of_2(hidden))
        every = tl.load(x + token.to(tl.int64) * hidden + h, mask=h < hidden, other=0.0).to(tl.float32)
        number = _normed(number, norm_weight, _norm_scale(every, epsilon, hidden), x.dtype.element_ty)
        tl.store(normed + of_token, number.to(x.dtype.element_ty), mask=at < hidden)
    signed = number * sign
    row = token * nb + block
    CLEARED: tl.constexpr = (HISTOGRAM + nb - 1) // nb
    cleared = tl.arange(0, triton.next_power_of_2(CLEARED))
    mine = (cleared < CLEARED) & (block * CLEARED + cleared < HISTOGRAM)
    tl.store(histogram + token.to(tl.int64) * HISTOGRAM + block * CLEARED + cleared, 0, mask=mine)
    for first in range(block * 128, listed, nb * 128):
        place = first + tl.arange(0, 128)
        tl.store(rows + token.to(tl.int64) * listed + place, -1, mask=place < listed)

    # Every sum runs along the first axis, which lies within a thread: no shuffles.
    half = tl.sum(signed[:, :, None] * _hadamard(16)[:, None, :], axis=0)
    rotated = tl.sum(half[:, None, :] * _hadamard(8)[:, :, None], axis=0) * _SCALE
    rx = tl.reshape(rotated, (128,))

    i = tl.arange(0, 128)
    # The bits of |Rx| are in its order, and in some order where they are NaN: 80 are picked whatever x holds.
    size = tl.abs(rx).to(tl.int32, bitcast=True)
    order = (size & ~127) | (127 - i)
    place = tl.sum(is_less(order[None, :], order[:, None]), axis=0)
    is_picked = place < COORDINATES

    size_of_block = tl.max(size, axis=0)
    shift = tl.minimum(tl.maximum(_LARGEST + 127 - (size_of_block >> 23), _LARGEST - 127), 100)
    up = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    down = tl.where(size_of_block < _INFINITE, (127 - shift) << 23, _NO_NUMBER).to(tl.float32, bitcast=True)
    integer = nearest_integer(rx * up)
    errors = rx * rx * tl.where(is_picked, NOISE_READ, NOISE_UNREAD)
    # One sum of three: each would wait at barriers of its own.
    listed = tl.where(is_picked, integer, 0)
    largest, total, energy = tl.reduce((tl.where(place == 0, i, 0), listed, errors), 0, _add_three)
    # Behind the last stands the largest again, times 0, so that the screen may read past the end: no mask, and no byte
    # more. lo is signed: where it is negative, hi is one more.
    entry = tl.where(is_picked, (i << 16) | ((integer + 128) & 0xFF00) | (integer & 0xFF), largest << 16)
    tl.store(picked + row * 128 + place, entry)
    to = blocks + token * 3 * nb + block
    tl.store(to, down * UNIT)
    tl.store(to + nb, total.to(tl.float32))
    tl.store(to + 2 * nb, energy)


@triton.jit
def _write_logits(
    x,
    gate,
    norm,
    logits,
    arrived,
    epsilon,
    token,
    first,
    H: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTERS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Logits of ROWS experts from `first` on, and whether the token has all now, of which no other program hears."""
    expert, h = first + tl.arange(0, ROWS), tl.arange(0, triton.next_power_of_2(H))
    inside = (expert < EXPERTS)[:, None] & (h < H)[None, :]
    rows = tl.load(gate + expert[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm + h, mask=h < H, other=0.0).to(tl.float32)
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    of_token = tl.load(x + token.to(tl.int64) * H + h, mask=h < H, other=0.0).to(tl.float32)
    of_token = _normed(of_token, norm_weight, _norm_scale(of_token, epsilon, H), x.dtype.element_ty)
    logit = tl.sum(rows * of_token[None, :], axis=1).to(logits.dtype.element_ty)
    tl.store(logits + token.to(tl.int64) * EXPERTS + expert, logit, mask=expert < EXPERTS)
    tl.debug_barrier()  # all threads have stored theirs before one of them says so
    is_last = tl.atomic_add(arrived + token, 1, sem="acq_rel") == ROUTERS - 1
    if is_last:
        tl.store(arrived + token, 0)
    return is_last


@triton.jit
def _norm_scale(numbers, epsilon, H: tl.constexpr):
    """1 / sqrt(mean of a token's squares + epsilon)."""
    return tl.rsqrt(tl.sum(numbers * numbers, axis=0) / H + epsilon)


@triton.jit
def _normed(numbers, weight, scale, dtype: tl.constexpr):
    """float32 numbers of a dtype, as transformers' RMS norms have them."""
    return (weight * (numbers * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c
