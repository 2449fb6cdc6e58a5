"""Attention of one token against its formula in float64: odd sizes, masks, several parts, keys shared by heads."""

# N sequences, h heads, g key heads, L tokens, D their size, Dv that of their values

import pytest
import torch
from torch import Tensor

from mreader.kernels import attention
from mreader.kernels.attention import attend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative to the norm. float32: dozens of products, rounded at 6e-8 each; the others round the output at 2^-12 and
# 2^-9, and the interpreter cuts BF16 off instead, at 2^-8.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
SHAPES = [(1, 1, 1, 1, 1, 1), (1, 4, 4, 16, 16, 16), (3, 6, 2, 11, 20, 12), (2, 8, 1, 70, 33, 48), (1, 5, 5, 257, 8, 8)]


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    N, h, g, L, D, Dv = shape
    sizes = ((N, h, D), (N, g, L, D), (N, g, L, Dv))
    query, key, value = (gaussian(*size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes))
    return query, key, value


def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(N, h, Dv) float64, one head after the other."""
    y = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64, device=DEVICE)
    for n in range(len(query)):
        for head in range(query.shape[1]):
            of_keys = head * key.shape[1] // query.shape[1]
            score = scale * (key[n, of_keys].double() @ query[n, head].double())
            if mask is not None:
                row = mask[n if len(mask) > 1 else 0]
                score = score.masked_fill(~row, float("-inf")) if row.dtype == torch.bool else score + row.double()
            y[n, head] = score.softmax(0) @ value[n, of_keys].double()
    return y


def masks(N: int, L: int, kind: str) -> Tensor | None:
    """Of one row for all, or a row each; the first token is seen by all."""
    seen = gaussian(N, L, seed=9) > 0.3
    seen[:, 0] = True
    lowest = torch.finfo(torch.float32).min
    forms: dict[str, Tensor | None] = {
        "none": None,
        "of each": seen,
        "of all": seen[:1],
        "addend": torch.where(seen, 0.5, lowest),
        "addend of all": torch.where(seen[:1], 0.0, float("-inf")),
        "in steps": seen.repeat_interleave(2, dim=1)[:, ::2],
    }
    return forms[kind]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["none", "of each", "of all", "addend", "addend of all", "in steps"])
@pytest.mark.parametrize("bytes_at_once", [1 << 16, 1 << 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_is_the_formula(
    shape: tuple[int, ...], bytes_at_once: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens at once, and up to 65 parts, of which some see nothing."""
    monkeypatch.setattr(attention, "_BYTES", bytes_at_once)
    query, key, value = inputs(shape, torch.float32)
    mask = masks(shape[0], shape[3], kind)
    found = attend(query, key, value, mask, 0.3)
    assert found.dtype == query.dtype
    assert relative(found, formula(query, key, value, mask, 0.3)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits(dtype: torch.dtype) -> None:
    query, key, value = inputs((2, 6, 2, 37, 20, 12), dtype)
    found = attend(query, key, value, None, 0.3)
    assert found.dtype == dtype
    assert relative(found, formula(query, key, value, None, 0.3)) < TOLERANCE[dtype]


@pytest.mark.parametrize("scale", [1e-4, 40.0])
def test_scores_of_any_size(scale: float) -> None:
    """exp of a difference to the largest: nothing is too large. Scores of some hundreds are off by 1e-5 each."""
    query, key, value = inputs((1, 2, 1, 37, 20, 20), torch.float32)
    assert relative(attend(query, key, value, None, scale), formula(query, key, value, None, scale)) < 1e-4


def test_views_are_read_where_they_lie() -> None:
    """Heads behind tokens, keys and values of one tensor, and a last axis that is none."""
    query, both = gaussian(2, 1, 6, 20, seed=0).transpose(1, 2)[:, :, 0], gaussian(2, 11, 2, 40, seed=1).transpose(1, 2)
    key, value = both[..., :20], both[..., 20:]
    expected = formula(query, key, value, None, 0.3)
    assert relative(attend(query, key, value, None, 0.3), expected) < TOLERANCE[torch.float32]
    across = query.mT.contiguous().mT
    assert across.stride(-1) != 1
    assert relative(attend(across, key, value, None, 0.3), expected) < TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 1024])
def test_a_graph_of_real_heads_replays_the_same_bits(length: int) -> None:
    """Qwen3-30B-A3B's heads, on a cache of which 100 tokens are seen."""
    query, key, value = inputs((1, 32, 4, length, 128, 128), torch.bfloat16)
    mask = torch.arange(length, device=DEVICE)[None] < 100
    eager = attend(query, key, value, mask, 128**-0.5)
    assert relative(eager, formula(query, key, value, mask, 128**-0.5)) < TOLERANCE[torch.bfloat16]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = attend(query, key, value, mask, 128**-0.5)
    for _ in range(3):
        graph.replay()
        assert torch.equal(replayed, eager)
