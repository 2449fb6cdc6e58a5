"""Two FP16 in a word, and the sums of 2-bit codes in them: the arithmetic, and the assembly against its plain twin."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mreader.kernels.intrinsics import (
    add_codes,
    add_codes_asm,
    add_codes_plain,
    has_dependent_launch,
    high_half,
    low_half,
    pack_halves,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORDS = 512  # all of one program


@triton.jit
def _add_kernel(words, xs, sums, out, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr):
    i = tl.arange(0, WORDS)
    word, x2 = tl.load(words + i), tl.load(xs + i)
    a0, a1, a2, a3 = (
        tl.load(sums + i),
        tl.load(sums + i + WORDS),
        tl.load(sums + i + 2 * WORDS),
        tl.load(sums + i + 3 * WORDS),
    )
    sums += 4 * WORDS
    a4, a5, a6, a7 = (
        tl.load(sums + i),
        tl.load(sums + i + WORDS),
        tl.load(sums + i + 2 * WORDS),
        tl.load(sums + i + 3 * WORDS),
    )
    if ASSEMBLY:
        a = add_codes_asm(word, x2, a0, a1, a2, a3, a4, a5, a6, a7)
    else:
        a = add_codes_plain(word, x2, a0, a1, a2, a3, a4, a5, a6, a7)
    for c in tl.static_range(8):
        tl.store(out + c * WORDS + i, a[c])


@triton.jit
def _halves_kernel(words, low, high, packed, WORDS: tl.constexpr):
    i = tl.arange(0, WORDS)
    word = tl.load(words + i)
    tl.store(low + i, low_half(word))
    tl.store(high + i, high_half(word))
    tl.store(packed + i, pack_halves(low_half(word), high_half(word)))


@triton.jit
def _pack_kernel(low, high, packed, WORDS: tl.constexpr):
    i = tl.arange(0, WORDS)
    tl.store(packed + i, pack_halves(tl.load(low + i), tl.load(high + i)))


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def as_words(low: Tensor, high: Tensor) -> Tensor:
    """(...) FP16 twice -> (...) int32."""
    return torch.stack([low, high], -1).view(torch.int32).squeeze(-1)


def as_halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """(...) int32 -> low and high, (...) FP16."""
    low, high = words.view(torch.float16).unflatten(-1, (-1, 2)).unbind(-1)
    return low, high


def add(words: Tensor, x: Tensor, sums: Tensor, assembly: bool) -> Tensor:
    """words (WORDS,) int32, x (WORDS,) FP16, sums (8, WORDS) int32 -> (8, WORDS) int32."""
    moved = [tensor.contiguous().to(DEVICE) for tensor in (words, as_words(x, x), sums)]
    out = torch.empty_like(moved[2])
    _add_kernel[(1,)](*moved, out, WORDS=WORDS, ASSEMBLY=assembly)
    return out.cpu()


def add_by_definition(words: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    """a_i + x * (code i of either half) * 2^-24 * 4^(i mod 5) in float64, rounded to FP16 once."""
    result = []
    for i, (low, high) in enumerate(zip(*as_halves(sums), strict=True)):
        unit = 2.0**-24 * 4 ** (i % 5)
        codes = [(words >> 2 * c & 3).double() for c in (i, 8 + i)]
        halves = [a.double() + x.double() * code * unit for a, code in zip((low, high), codes, strict=True)]
        result.append(as_words(*(half.half() for half in halves)))
    return torch.stack(result)


# What a block meets: words of every pattern (the sign bit too), x' below 2^15 and sums of either sign. x' is an integer
# here and sums are below 0.9, so that float32 holds the result as it is: below 1 where it is a multiple of 2^-24, below
# 4 where of 2^-22 or more. Then the twin rounds once, as the assembly does.
def usual(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    words = integers(-(2**31), 2**31, WORDS, seed=seed).int()
    x = integers(-(2**15) + 16, 2**15 - 16, WORDS, seed=seed + 1).half()
    sums = integers(-1800, 1801, 2, 8, WORDS, seed=seed + 2).half() / 2**11
    return words, x, as_words(sums[0], sums[1])


# Every FP16 but infinities and NaN: subnormals too, and zeros of both signs.
def any_bits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    def finite(bits: Tensor) -> Tensor:
        halves = bits.to(torch.int16).view(torch.float16)
        return torch.where(halves.isfinite(), halves, 1.0)

    words = integers(-(2**31), 2**31, WORDS, seed=seed).int()
    x = finite(integers(-(2**15), 2**15, WORDS, seed=seed + 1))
    sums = finite(integers(-(2**15), 2**15, 2, 8, WORDS, seed=seed + 2))
    return words, x, as_words(sums[0], sums[1])


def places_apart(first: Tensor, second: Tensor) -> int:
    """The largest number of FP16 from one to the other, over all halves."""

    def place(words: Tensor) -> Tensor:
        bits = torch.stack(as_halves(words)).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((place(first) - place(second)).abs().max())


ASSEMBLY = pytest.mark.parametrize("assembly", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["plain", "asm"])


# ---------------------------------------------------------------- add_codes


@ASSEMBLY
def test_codes_are_added_and_rounded_once(assembly: bool) -> None:
    words, x, sums = usual(seed=1)
    assert torch.equal(add(words, x, sums, assembly), add_by_definition(words, x, sums))


@ASSEMBLY
def test_any_number_is_added_within_a_rounding(assembly: bool) -> None:
    """Exactly half way between two FP16, a sum that was rounded to float32 first may fall to the other side."""
    words, x, sums = any_bits(seed=2)
    assert places_apart(add(words, x, sums, assembly), add_by_definition(words, x, sums)) <= 1


@pytest.mark.parametrize("code", range(16))
@ASSEMBLY
def test_a_code_reaches_its_own_sum_and_no_other(assembly: bool, code: int) -> None:
    words = torch.full((WORDS,), 3).bitwise_left_shift(2 * code).int()  # code 15 sets the sign
    x = torch.full((WORDS,), 2.0**14, dtype=torch.float16)
    out = torch.stack(as_halves(add(words, x, torch.zeros(8, WORDS, dtype=torch.int32), assembly)))[..., 0]
    expected = torch.zeros(2, 8, dtype=torch.float16)
    expected[code // 8, code % 8] = 3 * 2.0**-10 * 4 ** (code % 8 % 5)
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_assembly_is_what_runs_and_has_the_bits_of_its_twin() -> None:
    assert add_codes is add_codes_asm
    for seed in range(10, 20):
        assert torch.equal(add(*usual(seed), assembly=True), add(*usual(seed), assembly=False))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU: it has the assembly")
def test_the_interpreter_runs_the_twin() -> None:
    assert add_codes is add_codes_plain


# ---------------------------------------------------------------- halves


def test_every_fp16_comes_out_of_either_half_and_goes_back() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    numbers = torch.where(every.isnan(), 0.0, every)  # a NaN may come back as another
    for some in numbers.split(WORDS):
        words = as_words(some, some.flip(0)).to(DEVICE)
        low, high = (torch.empty(WORDS, device=DEVICE) for _ in range(2))
        packed = torch.empty_like(words)
        _halves_kernel[(1,)](words, low, high, packed, WORDS=WORDS)
        assert torch.equal(low.cpu(), some.float())
        assert torch.equal(high.cpu(), some.flip(0).float())
        assert torch.equal(packed, words)


def test_floats_are_packed_to_the_nearest_fp16() -> None:
    low, high = torch.randn(2, WORDS, generator=torch.Generator().manual_seed(3)) * torch.logspace(-8, 4, WORDS)
    low[0], high[0] = 1 + 2.0**-11, 1 + 3 * 2.0**-11  # half way: to the even one
    packed = torch.empty(WORDS, dtype=torch.int32, device=DEVICE)
    _pack_kernel[(1,)](low.to(DEVICE), high.to(DEVICE), packed, WORDS=WORDS)
    assert torch.equal(packed.cpu(), as_words(low.half(), high.half()))


# ---------------------------------------------------------------- dependent launch


def test_a_cpu_has_no_dependent_launch() -> None:
    assert not has_dependent_launch(torch.device("cpu"))


@pytest.mark.gpu
def test_nvidia_gpus_have_dependent_launch_from_hopper_on() -> None:
    hopper = torch.cuda.get_device_capability() >= (9, 0) and not torch.version.hip
    assert has_dependent_launch(DEVICE) == hopper
