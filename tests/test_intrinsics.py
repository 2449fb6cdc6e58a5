"""Sums of 2-bit codes by products of integer matrices, and numbers as integers and back: the assembly and its twin."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mreader.kernels.intrinsics import (
    add_codes,
    add_codes_asm,
    add_codes_plain,
    as_float,
    ballot_asm,
    ballot_plain,
    byte_of_lane_asm,
    byte_of_lane_plain,
    count_bits_asm,
    count_bits_plain,
    count_equals_asm,
    count_equals_plain,
    has_dependent_launch,
    nearest_integer,
    selector_of_lane,
    whole_units,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARPS = 4
LANES = 32 * WARPS  # all of one program


@triton.jit
def _add_kernel(words, listed, sums, out, LANES: tl.constexpr, ASSEMBLY: tl.constexpr):
    i = tl.arange(0, LANES)
    word, other_word = tl.load(words + i), tl.load(words + i + LANES)
    x, other_x, selector = tl.load(listed + i), tl.load(listed + i + LANES), selector_of_lane(i % 32)
    a = ()
    for c in tl.static_range(8):
        a = a + (tl.load(sums + c * LANES + i),)
    if ASSEMBLY:
        x, other_x = byte_of_lane_asm(x, selector), byte_of_lane_asm(other_x, selector)
        a = add_codes_asm(word, other_word, x, other_x, a)
    else:
        x, other_x = byte_of_lane_plain(x, selector), byte_of_lane_plain(other_x, selector)
        a = add_codes_plain(word, other_word, x, other_x, a)
    for c in tl.static_range(8):
        tl.store(out + c * LANES + i, a[c])


@triton.jit
def _count_kernel(words, bits, plain_bits, equals, odd, LANES: tl.constexpr, ASSEMBLY: tl.constexpr):
    i = tl.arange(0, LANES)
    word = tl.load(words + i)
    tl.store(plain_bits + i, count_bits_plain(word))
    if ASSEMBLY:
        tl.store(bits + i, count_bits_asm(word))
        tl.store(equals + i, count_equals_asm(word))
        tl.store(odd + i, ballot_asm(word % 2 != 0))
    else:
        tl.store(bits + i, count_bits_plain(word))
        tl.store(equals + i, count_equals_plain(word))
        tl.store(odd + i, ballot_plain(word % 2 != 0))


@triton.jit
def _integers_kernel(numbers, integers, floats, LENGTH: tl.constexpr):
    i = tl.arange(0, LENGTH)
    integer = nearest_integer(tl.load(numbers + i))
    tl.store(integers + i, integer)
    tl.store(floats + i, as_float(integer))


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def add(words: Tensor, x: Tensor, sums: Tensor, assembly: bool) -> Tensor:
    """words (2, LANES) int32, x (2, WARPS, 4) integers, sums (8, LANES) int32 -> (8, LANES) int32.

    x: of the four lanes of a g; all g of a warp list the same
    """
    lo = (x + 128) % 256 - 128
    listed = ((x - lo) | (x & 255))[:, :, None, :].expand(-1, -1, 8, -1).reshape(2, LANES)
    listed = listed & 0xFFFF | integers(0, 128, 2, LANES, seed=0) << 16  # the coordinate, which is no part of x'
    moved = [tensor.int().contiguous().to(DEVICE) for tensor in (words, listed, sums)]
    out = torch.empty_like(moved[2])
    _add_kernel[(1,)](*moved, out, LANES=LANES, ASSEMBLY=assembly)
    return out.cpu()


def add_by_definition(words: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    """sums[2 i] of lane 4 g + t += the sum over lanes u of g and both coordinates of hi_u 4^i (code 4 t + i of u)."""
    lo = (x + 128) % 256 - 128
    bytes_of_x = ((x - lo) // 256, lo)
    result = sums.long().clone().view(8, WARPS, 8, 4)
    of_lane = words.long().view(2, WARPS, 8, 4)
    for i in range(4):
        for byte in range(2):
            for t in range(4):
                codes = (of_lane >> 2 * (4 * t + i) & 3) * 4**i
                result[2 * i + byte, ..., t] += (codes * bytes_of_x[byte][:, :, None, :]).sum((0, 3))
    return result.view(8, LANES).int()


def usual(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a block meets: words of every pattern (the sign bit too), x' of either sign, sums below 2^22."""
    words = integers(-(2**31), 2**31, 2, LANES, seed=seed)
    x = integers(-(2**14), 2**14 + 1, 2, WARPS, 4, seed=seed + 1)
    return words, x, integers(-(2**22), 2**22, 8, LANES, seed=seed + 2)


ASSEMBLY = pytest.mark.parametrize("assembly", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["plain", "asm"])


# ---------------------------------------------------------------- add_codes


@ASSEMBLY
def test_codes_are_added_exactly(assembly: bool) -> None:
    words, x, sums = usual(seed=1)
    assert torch.equal(add(words, x, sums, assembly), add_by_definition(words, x, sums))


@pytest.mark.parametrize("x", [-(2**14), -129, -128, -1, 127, 128, 255, 2**14])
@ASSEMBLY
def test_both_bytes_of_any_number_count(assembly: bool, x: int) -> None:
    words, _, sums = usual(seed=4)
    of_lanes = torch.full((2, WARPS, 4), x)
    assert torch.equal(add(words, of_lanes, sums, assembly), add_by_definition(words, of_lanes, sums))


@pytest.mark.parametrize("code", range(16))
@ASSEMBLY
def test_a_code_reaches_its_own_sum_and_no_other(assembly: bool, code: int) -> None:
    """Of one lane's word, times 257: the two sums of its channel, in the lane of the channel's byte."""
    words = torch.zeros(2, LANES, dtype=torch.int64)
    words[1, 37] = 3 << 2 * code  # code 15 sets the sign; lane 37 is lane 5 of warp 1: g = 1, t = 1
    words = torch.where(words >= 2**31, words - 2**32, words)
    out = add(words, torch.full((2, WARPS, 4), 257), torch.zeros(8, LANES), assembly)
    expected = torch.zeros(8, LANES, dtype=torch.int32)
    i = code % 4
    expected[2 * i : 2 * i + 2, 36 + code // 4] = 3 * 4**i
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_assembly_is_what_runs_and_has_the_bits_of_its_twin() -> None:
    assert add_codes is add_codes_asm
    for seed in range(10, 20):
        assert torch.equal(add(*usual(seed), assembly=True), add(*usual(seed), assembly=False))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU: it has the assembly")
def test_the_interpreter_runs_the_twin() -> None:
    assert add_codes is add_codes_plain


# ---------------------------------------------------------------- what is fetched ahead


@triton.jit
def _units_kernel(numbers, first, number, starts, sizes):
    lane = tl.arange(0, 32)
    start, size = whole_units(numbers + first + lane * number, number)
    tl.store(starts + lane, start - numbers.to(tl.int64))
    tl.store(sizes + lane, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("first", "number"), [(0, 64), (5, 33), (8, 3), (24, 8), (1, 15)])
def test_rows_are_fetched_in_whole_units(first: int, number: int, dtype: torch.dtype) -> None:
    """From the unit of their first byte on, as many as fit; of 32 rows of a tensor."""
    numbers = torch.zeros(first + 32 * number, dtype=dtype, device=DEVICE)
    starts, sizes = torch.zeros(32, dtype=torch.int64, device=DEVICE), torch.zeros(32, dtype=torch.int64, device=DEVICE)
    _units_kernel[(1,)](numbers, first, number, starts, sizes, num_warps=1)
    row = number * numbers.element_size()
    begin = first * numbers.element_size() + row * torch.arange(32, device=DEVICE)
    assert torch.equal(starts, begin // 16 * 16)
    assert torch.equal(sizes, torch.full_like(sizes, row // 16 * 16))


# ---------------------------------------------------------------- counts


def count(words: Tensor, assembly: bool) -> tuple[Tensor, Tensor, Tensor]:
    """words (LANES,) int32 -> bits of each, as both say; equals of a warp; which lanes of a warp have odd ones."""
    bits, plain_bits, equals, odd = (torch.empty(LANES, dtype=torch.int32, device=DEVICE) for _ in range(4))
    _count_kernel[(1,)](words.to(DEVICE), bits, plain_bits, equals, odd, LANES=LANES, ASSEMBLY=assembly)
    assert torch.equal(bits, plain_bits)
    return bits.cpu(), equals.cpu(), odd.cpu()


@ASSEMBLY
def test_bits_are_counted(assembly: bool) -> None:
    words = integers(-(2**31), 2**31, LANES, seed=5).int()
    words[:4] = torch.tensor([0, -1, 1, -(2**31)])
    bits, _, _ = count(words, assembly)
    assert bits.tolist() == [(word & 0xFFFFFFFF).bit_count() for word in words.tolist()]


@ASSEMBLY
@pytest.mark.parametrize("values", [1, 5, 1000])
def test_equals_of_a_warp_add_up(assembly: bool, values: int) -> None:
    """To how many lanes of the warp have the number, whichever of them says it; the assembly says it once."""
    words = integers(0, values, LANES, seed=values).int() - 1
    _, equals, _ = count(words, assembly)
    for warp, found in zip(words.split(32), equals.split(32), strict=True):
        for value in warp.unique():
            assert int(found[warp == value].sum()) == int((warp == value).sum())
            assert not assembly or int((found[warp == value] > 0).sum()) == 1


@ASSEMBLY
def test_every_lane_knows_which_of_its_warp_agree(assembly: bool) -> None:
    words = integers(-(2**31), 2**31, LANES, seed=6).int()
    _, _, odd = count(words, assembly)
    for warp, found in zip(words.split(32), odd.split(32), strict=True):
        expected = sum((word & 1) << lane for lane, word in enumerate(warp.tolist()))
        assert {word & 0xFFFFFFFF for word in found.tolist()} == {expected}


# ---------------------------------------------------------------- integers


def test_numbers_become_the_nearest_integers_and_integers_numbers() -> None:
    """Ties to the even one, both signs, up to 2^22."""
    numbers = torch.randn(512, generator=torch.Generator().manual_seed(3)) * torch.logspace(-8, 6, 512)
    numbers[:6] = torch.tensor([0.5, 1.5, -2.5, 4194303.0, -4194303.0, -0.0])
    found = torch.empty(512, dtype=torch.int32, device=DEVICE)
    back = torch.empty(512, device=DEVICE)
    _integers_kernel[(1,)](numbers.to(DEVICE), found, back, LENGTH=512)
    assert torch.equal(found.cpu(), numbers.round().int())
    assert torch.equal(back.cpu(), numbers.round() + 0.0)


# ---------------------------------------------------------------- dependent launch


def test_a_cpu_has_no_dependent_launch() -> None:
    assert not has_dependent_launch(torch.device("cpu"))


@pytest.mark.gpu
def test_nvidia_gpus_have_dependent_launch_from_hopper_on() -> None:
    hopper = torch.cuda.get_device_capability() >= (9, 0) and not torch.version.hip
    assert has_dependent_launch(DEVICE) == hopper
