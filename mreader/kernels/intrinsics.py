"""What Triton has no words for: inline assembly with a plain twin that means the same, and dependent launch."""

# mypy: ignore-errors

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Codes of 2 bits stay where they are: a masked word, read as two FP16, holds two codes times 2^-24 4^i (subnormals).
# Bits 10 and up of each half are no mantissa, so the last three codes of a half are shifted down first.
_MASKS = (0x00030003, 0x000C000C, 0x00300030, 0x00C000C0, 0x03000300)
_SHIFT = 10


def _multiply_add(output: int, mask: int, word: str) -> str:
    return f"and.b32 m, {word}, {mask:#010x}; fma.rn.f16x2 ${output}, m, $9, ${10 + output};"


_ASSEMBLY = tl.constexpr(
    "\n".join(
        [
            "{ .reg .b32 m, h;",
            *[_multiply_add(i, mask, "$8") for i, mask in enumerate(_MASKS)],
            f"shr.u32 h, $8, {_SHIFT};",
            *[_multiply_add(i + 5, mask, "h") for i, mask in enumerate(_MASKS[:3])],
            "}",
        ]
    )
)
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 10))
_DTYPES = tl.constexpr((tl.int32,) * 8)


@triton.jit
def add_codes_asm(word, x2, a0, a1, a2, a3, a4, a5, a6, a7):
    """a_i += x * (code i of both halves of the word) * 2^-24 * 4^(i mod 5), each a_i two FP16: 17 instructions.

    word:       int32 - 16 codes of 2 bits, code c at bit 2 c
    x2:         int32 - twice the same FP16
    a0, ... a7: int32 - the sums of codes i (low half) and 8 + i (high half)
    """
    return tl.inline_asm_elementwise(
        _ASSEMBLY, _CONSTRAINTS, [word, x2, a0, a1, a2, a3, a4, a5, a6, a7], dtype=_DTYPES, is_pure=True, pack=1
    )


@triton.jit
def add_codes_plain(word, x2, a0, a1, a2, a3, a4, a5, a6, a7):
    """The twin of `add_codes_asm`."""
    x = low_half(x2)
    return (
        _plain_sum(word, x, a0, 0, 5.9604644775390625e-08),
        _plain_sum(word, x, a1, 2, 2.384185791015625e-07),
        _plain_sum(word, x, a2, 4, 9.5367431640625e-07),
        _plain_sum(word, x, a3, 6, 3.814697265625e-06),
        _plain_sum(word, x, a4, 8, 1.52587890625e-05),
        _plain_sum(word, x, a5, 10, 5.9604644775390625e-08),
        _plain_sum(word, x, a6, 12, 2.384185791015625e-07),
        _plain_sum(word, x, a7, 14, 9.5367431640625e-07),
    )


@triton.jit
def _plain_sum(word, x, sums, BIT: tl.constexpr, UNIT: tl.constexpr):
    low = low_half(sums) + ((word >> BIT) & 3).to(tl.float32) * UNIT * x
    high = high_half(sums) + ((word >> (BIT + 16)) & 3).to(tl.float32) * UNIT * x
    return pack_halves(low, high)


@triton.jit
def low_half(word):
    """The FP16 in the low 16 bits of an int32, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    """The FP16 in the high 16 bits of an int32, as float32."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pack_halves(low, high):
    """Two floats, rounded to FP16, in one int32."""
    low_bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


# The interpreter and GPUs that are not NVIDIA's run the twin.
add_codes = add_codes_plain if triton.knobs.runtime.interpret or torch.version.hip else add_codes_asm


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


def launch_options(dependent: bool) -> dict[str, bool]:
    """What a launch is given so that the kernel may start before its predecessor ends; ROCm knows no such option."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor ends: NVIDIA GPUs from Hopper on."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
