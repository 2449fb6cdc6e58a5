"""What Triton has no words for: inline assembly with a plain twin that means the same, and dependent launch."""

# mypy: ignore-errors

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Codes of 2 bits stay where they are: every fourth of a masked word is a byte, code * 4^i. Four lanes hold a word each
# of four coordinates, and a product of integer matrices sums over them: rows 8 and up of the left one are other codes.


def _multiply_add(i: int) -> str:
    """Codes i and i + 1 of every four: into results 2 i to 2 i + 3."""
    masks = [0x03030303 << 2 * (i + row) for row in range(2)]
    rows = [f"and.b32 m{at}, ${8 + at // 2}, {masks[at % 2]:#010x};" for at in range(4)]
    to, before = (",".join(f"${first + 2 * i + j}" for j in range(4)) for first in (0, 12))
    product = f"mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {{{to}}}, {{m0,m1,m2,m3}}, {{$10,$11}}, {{{before}}};"
    return "\n".join([*rows, product])


_ASSEMBLY = tl.constexpr("\n".join(["{ .reg .b32 m0, m1, m2, m3;", _multiply_add(0), _multiply_add(2), "}"]))
_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 12))
_DTYPES = tl.constexpr((tl.int32,) * 8)


@triton.jit
def add_codes_asm(word, other_word, x, other_x, sums):
    """sums[2 i] += the sum over a warp's 8 coordinates of hi * 4^i * code, sums[2 i + 1] of lo: 10 instructions.

    Of lane 4 g + t: the codes of channel 4 t + i of the words of its g.

    word, other_word: (lanes,) int32 - 16 codes of 2 bits of a coordinate each; the lanes of a g share its channels
    x, other_x:       (lanes,) int32 - `byte_of_lane` of the same coordinates' x' = 256 hi + lo
    sums:             8 tensors (lanes,) int32
    """
    return tl.inline_asm_elementwise(
        _ASSEMBLY, _CONSTRAINTS, (word, other_word, x, other_x) + sums, dtype=_DTYPES, is_pure=True, pack=1
    )


@triton.jit
def add_codes_plain(word, other_word, x, other_x, sums):
    """The twin of `add_codes_asm`; it knows the lanes by their places."""
    result = ()
    for i in tl.static_range(4):
        added = _product((word >> 2 * i) & 0x03030303, x) + _product((other_word >> 2 * i) & 0x03030303, other_x)
        hi, lo = tl.split(tl.reshape(added << 2 * i, (word.shape[0] // 32, 8, 4, 2)))
        result = result + (sums[2 * i] + tl.reshape(hi, word.shape), sums[2 * i + 1] + tl.reshape(lo, word.shape))
    return result


@triton.jit
def _product(left, right):
    """(lanes,) twice -> (warps, 8, 8): row g of the left matrix, 16 bytes in 4 lanes, times row n of the right one."""
    total = tl.zeros((left.shape[0] // 32, 8, 8), tl.int32)
    for byte in tl.static_range(4):
        row = tl.reshape((left << (24 - 8 * byte)) >> 24, (left.shape[0] // 32, 8, 1, 4))
        column = tl.reshape((right << (24 - 8 * byte)) >> 24, (left.shape[0] // 32, 1, 8, 4))
        total += tl.sum(row * column, axis=3)
    return total


@triton.jit
def byte_of_lane_asm(listed, selector):
    """The right matrix: hi (g even) or lo (g odd) of x' as byte g / 2 of lane 4 g + t, 0 as its others.

    listed:   (lanes,) int32 - x' = 256 hi + lo, both signed, lo in the lowest byte and hi in the next
    selector: (lanes,) int32 - `selector_of_lane`
    """
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [listed, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def byte_of_lane_plain(listed, selector):
    """The twin of `byte_of_lane_asm`."""
    result = listed & 0
    for byte in tl.static_range(4):
        source = (selector >> 4 * byte) & 15
        result |= tl.where(source < 4, (listed >> 8 * (source & 3)) & 255, 0) << 8 * byte
    return result


@triton.jit
def selector_of_lane(lane):
    """Which byte goes where, for `byte_of_lane`: 4 is a zero."""
    g = lane // 4
    return 0x4444 ^ ((4 ^ (1 - g % 2)) << (g // 2 * 4))


@triton.jit
def count_bits_asm(word):
    """How many bits of an int32 are 1."""
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def count_bits_plain(word):
    """The twin of `count_bits_asm`: sums of 2, 4, 8, and all bits."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return (word + (word >> 16)) & 0x3F


@triton.jit
def ballot_asm(condition):
    """(lanes,) bool -> int32: bit i of a lane's word is that of lane i of its warp."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xFFFFFFFF; }",
        "=r,r", [condition.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ballot_plain(condition):
    """The twin of `ballot_asm`; it knows the lanes by their places."""
    bits = tl.reshape(condition.to(tl.int32), (condition.shape[0] // 32, 32)) << tl.arange(0, 32)[None, :]
    return tl.reshape(tl.broadcast_to(tl.sum(bits, axis=1)[:, None], bits.shape), condition.shape)


@triton.jit
def count_equals_asm(number):
    """How many lanes of a warp have the same int32, in the first of them, and 0 in the others.

    All lanes have to come by: it is said to have effects so that the compiler moves it into no branch.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 equal, lower; .reg .pred first; match.any.sync.b32 equal, $1, 0xFFFFFFFF; popc.b32 $0, equal; "
        "mov.u32 lower, %lanemask_lt; and.b32 lower, lower, equal; setp.eq.u32 first, lower, 0; "
        "selp.b32 $0, $0, 0, first; }",
        "=&r,r", [number], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def count_equals_plain(number):
    """The twin of `count_equals_asm` to whoever adds them up: 1 in each lane."""
    return number * 0 + 1


# The interpreter and GPUs that are not NVIDIA's run the twins.
_PLAIN = triton.knobs.runtime.interpret or torch.version.hip
add_codes = add_codes_plain if _PLAIN else add_codes_asm
byte_of_lane = byte_of_lane_plain if _PLAIN else byte_of_lane_asm
count_bits = count_bits_plain if _PLAIN else count_bits_asm
ballot = ballot_plain if _PLAIN else ballot_asm
count_equals = count_equals_plain if _PLAIN else count_equals_asm

_INTEGERS = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 beside it are integers, and their lowest bits say which
_INTEGER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def nearest_integer(number):
    """The integer nearest to a float32 below 2^22, ties to the even one, as int32: 2 instructions."""
    return (number + _INTEGERS).to(tl.int32, bitcast=True) - _INTEGER_BITS


@triton.jit
def as_float(integer):
    """An int32 below 2^22 as float32: 2 instructions at full speed, where a conversion runs at an eighth of it."""
    return (integer + _INTEGER_BITS).to(tl.float32, bitcast=True) - _INTEGERS


@triton.jit
def is_less(a, b):
    """a < b as 1 or 0, of int32 whose difference is one: 2 instructions to add one up, where a comparison takes 3."""
    return ((a - b).to(tl.uint32, bitcast=True) >> 31).to(tl.int32, bitcast=True)


CACHED = tl.constexpr("")  # the cache modifier of a plain load


@triton.jit
def load_together(pointers, NUMBER: tl.constexpr, CACHE: tl.constexpr = CACHED):
    """NUMBER tensors (lanes,) of 4 bytes each, that lie in a row at a lane's pointer: 1, 2 or 4."""
    if NUMBER == 1:
        numbers = (tl.load(pointers, cache_modifier=CACHE),)
    elif NUMBER == 2:
        numbers = _split_two(tl.load(vector(pointers, 2, 4), cache_modifier=CACHE))
    else:
        numbers = _split_four(tl.load(vector(pointers, 4, 4), cache_modifier=CACHE))
    return numbers


@triton.jit
def vector(pointers, LENGTH: tl.constexpr, BYTES: tl.constexpr):
    """(lanes,) pointers -> (lanes, LENGTH): what a lane loads or stores at once, numbers of BYTES."""
    every = pointers[:, None] + tl.arange(0, LENGTH)[None, :]
    return tl.max_contiguous(tl.multiple_of(every, [1, LENGTH * BYTES]), [1, LENGTH])


@triton.jit
def _split_two(two):
    """(lanes, 2) -> 2 tensors (lanes,)."""
    first, second = tl.split(two)
    return first, second


@triton.jit
def _split_four(four):
    """(lanes, 4) -> 4 tensors (lanes,)."""
    even, odd = tl.split(tl.reshape(four, (four.shape[0], 2, 2)))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return s0, s1, s2, s3


@triton.jit
def fetch_to_l2(pointers, number, condition, DEPENDENT: tl.constexpr):
    """Ask for `number` elements from (lanes,) pointers on, where the condition holds, and wait for none of them.

    Nothing on GPUs before Hopper: they have neither the instruction nor a time before a kernel waits.
    """
    if DEPENDENT:
        start, size = whole_units(pointers, number)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, $3; }",
            "=r,l,r,r", [start, size, (condition & (size > 0)).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def whole_units(pointers, number):
    """Address and size, multiples of 16 bytes, of what `number` elements from (lanes,) pointers on lie in.

    Up to 15 bytes at the end are left out, and nothing lies outside of a tensor that begins at a multiple of 16.
    """
    return pointers.to(tl.int64) & -16, number * (pointers.dtype.element_ty.primitive_bitwidth // 8) // 16 * 16


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    """Before the first use of what an earlier kernel wrote, and before the first write."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """From here on the next kernel may occupy what this one leaves free; its own wait keeps the order."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier_after(bits, never, DEPENDENT: tl.constexpr):
    """`wait_for_earlier`, once `bits` are known: else the compiler leaves what they come from for later.

    bits:  int32, not negative
    never: -1, which the compiler must not know
    """
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, $2; @p griddepcontrol.wait; mov.b32 $0, $1; }",
            "=r,r,r", [bits, never], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def let_next_start_after(bits, never, DEPENDENT: tl.constexpr):
    """`let_next_start`, once `bits` are known: what the next kernel reads early does not delay what they come from.

    bits:  int32, not negative
    never: -1, which the compiler must not know
    """
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, $2; @p griddepcontrol.launch_dependents; mov.b32 $0, $1; }",
            "=r,r,r", [bits, never], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def launch_options(dependent: bool) -> dict[str, bool]:
    """What a launch is given so that the kernel may start before its predecessor ends; ROCm knows no such option."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


def full_registers(dependent: bool) -> dict[str, int]:
    """What a launch is given whose loads have to be under way all at once: any number of registers, from Hopper on.

    Else the compiler saves registers for the sake of more programs side by side, and loads some only when it has used
    others: a round trip more.
    """
    return {"maxnreg": 255} if dependent else {}


def limited_registers(number: int) -> dict[str, int]:
    """What a launch is given whose threads have so many registers, 0: as many as the compiler likes."""
    return {"maxnreg": number} if number and not torch.version.hip else {}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many of them the GPU has; in the interpreter those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor ends: NVIDIA GPUs from Hopper on."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
