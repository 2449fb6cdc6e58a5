"""The sketch of an expert: its gate and up rows, rotated and coded in a few levels a weight."""

# E experts, H hidden size, I channels of an expert, R rows, B = 128, nb = ceil(H / B), C = nb * B rotated coordinates

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.formats.codes import BLOCK, Code, count_blocks, pack_used

# Elements fitted at once. On a CPU the four float32 arrays of a fit take 1.6 MB, within a second-level cache of 2 MB:
# a quarter of that spends its time in calls, four times as much in memory. A GPU wants to be filled.
_CPU_CHUNK = 104 * 1024
_GPU_CHUNK = 64 * 1024 * 1024
_ROW_STEP = 20  # channels: whole bytes in every code (5 and 4 channels a byte)


@dataclass(frozen=True)
class Sketch:
    """Codes of some matrices, coordinate-major.

    codes:  (..., C, row_bytes) uint8 - for each rotated coordinate the packed codes of all channels
    scales: (..., nb, I) float16 - s of each block
    errors: (..., nb, I) bfloat16 - rho, the mean squared error of each block
    """

    codes: Tensor
    scales: Tensor
    errors: Tensor


def draw_signs(hidden: int, seed: int, layer: int) -> Tensor:
    """signs of the layer-th MoE layer (from 0): a fair draw from {-1, +1} by a generator seeded with seed + layer.

    returns: (H,) int8
    Source: formats/SPEC.md, Rotation.
    """
    generator = torch.Generator().manual_seed(seed + layer)
    return (torch.randint(0, 2, (hidden,), generator=generator) * 2 - 1).to(torch.int8)


@functools.cache
def hadamard(order: int) -> Tensor:
    """H_2m = [[H_m, H_m], [H_m, -H_m]], H_1 = [1]: Sylvester's order, unscaled. Shared: do not write into it.

    returns: (order, order) float32 of +-1; order a power of two
    """
    if order == 1:
        return torch.ones(1, 1)
    half = hadamard(order // 2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])


def rotate_rows(weights: Tensor, signs: Tensor) -> Tensor:
    """R w for every row, R = blockdiag(Hadamard_128 / sqrt(128)) . diag(signs); rows padded with zeros to C.

    weights: (R, H) floating point
    signs:   (H,) int8
    returns: (R, nb, B) float32
    Source: formats/SPEC.md, Rotation.
    """
    blocks = _signed_hadamard(signs.to(weights.device))
    return _rotate_blocks(weights, blocks).permute(2, 0, 1).contiguous()


def sketch_matrices(matrices: Sequence[Tensor], signs: Tensor, code: Code) -> Sketch:
    """codes, s, rho = fit of every block of every rotated row R w.

    matrices: M of (I, H) floating point - gate and up projections of one layer, on any one device
    signs:    (H,) int8
    returns:  Sketch with the leading axis M, on the weights' device; the same on any number of threads
    Working memory on a CPU: two float32 copies of some 800 rows; on a GPU: about 2 GB. On a CPU call it under
    torch.set_num_threads(1), from two threads if cores are free: torch's own threads gain less, and lose ten times that
    where other work shares the cores. On a GPU call it with many matrices: they are coded side by side.
    NaN or infinity in a row makes the errors of its block non-finite. Raises UnsupportedError where a block's scale
    does not fit FP16.
    """
    channels, hidden = matrices[0].shape
    device = matrices[0].device
    sketch = _empty_sketch(len(matrices), channels, hidden, code, device)
    blocks = _signed_hadamard(signs.to(device))
    groups = _row_groups(channels, device)
    at_once = max(_chunk(device) // (groups[0].stop * hidden), 1)
    for first in range(0, len(matrices), at_once):
        some = slice(first, min(first + at_once, len(matrices)))
        for rows in groups:
            weights = _join([matrix[rows] for matrix in matrices[some]])
            indices, scales, errors = _fit_rows(_rotate_blocks(weights, blocks), code, device)
            shape = (some.stop - first, rows.stop - rows.start)
            packed = pack_used(indices.view(*indices.shape[:2], *shape), code).flatten(0, 1).transpose(0, 1)
            start = rows.start // code.per_byte
            sketch.codes[some, :, start : start + packed.shape[2]] = packed
            sketch.scales[some, :, rows] = scales.view(-1, *shape).transpose(0, 1)
            sketch.errors[some, :, rows] = errors.view(-1, *shape).transpose(0, 1)
    return sketch


def _fit_rows(rotated: Tensor, code: Code, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Indices (nb, B, R), scales (nb, R), errors (nb, R) of the blocks of R rows, rotated as (nb, B, R).

    Rows are the fast axis, so that sums over a block and packing along channels both run along memory.
    """
    size = max(_chunk(device) // (rotated.shape[1] * rotated.shape[2]), 1)
    spans = [slice(block, block + size) for block in range(0, len(rotated), size)]
    fits = [code.fit(rotated[span].transpose(1, 2)) for span in spans]
    indices = torch.cat([fit[0].transpose(1, 2) for fit in fits])
    return indices, torch.cat([fit[1] for fit in fits]), torch.cat([fit[2] for fit in fits])


def _empty_sketch(matrices: int, channels: int, hidden: int, code: Code, device: torch.device) -> Sketch:
    blocks = count_blocks(hidden)
    return Sketch(
        codes=torch.zeros(matrices, blocks * BLOCK, code.row_bytes(channels), dtype=torch.uint8, device=device),
        scales=torch.empty(matrices, blocks, channels, dtype=torch.float16, device=device),
        errors=torch.empty(matrices, blocks, channels, dtype=torch.bfloat16, device=device),
    )


def _chunk(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


def _row_groups(channels: int, device: torch.device) -> list[slice]:
    """Rows in even shares, in whole bytes, such that one block of them is at most one chunk."""
    room = _chunk(device) // BLOCK
    size = math.ceil(channels / math.ceil(channels / room) / _ROW_STEP) * _ROW_STEP
    return [slice(row, min(row + size, channels)) for row in range(0, channels, size)]


def _join(matrices: Sequence[Tensor]) -> Tensor:
    """All rows, one matrix below the other; a view where there is one matrix."""
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


def _signed_hadamard(signs: Tensor) -> Tensor:
    """(nb, B, B) float32: Hadamard_128 . diag(signs of the block), 0 where the block is padding."""
    padded = torch.nn.functional.pad(signs.float(), (0, -len(signs) % BLOCK))
    return hadamard(BLOCK).to(signs.device) * padded.view(-1, 1, BLOCK)


def _rotate_blocks(weights: Tensor, blocks: Tensor) -> Tensor:
    """(R, up to nb*B) -> (nb, B, R): the rotated blocks of every row.

    The products are exact, +-w, whatever precision the device's float32 product has for weights of 16 bits; only
    the sums round. The factor 1 / sqrt(128) comes last for that reason.
    """
    width = blocks.shape[0] * BLOCK
    rows = torch.nn.functional.pad(weights, (0, width - weights.shape[1])) if weights.shape[1] < width else weights
    rows = rows.float().reshape(-1, len(blocks), BLOCK)
    return torch.bmm(blocks, rows.permute(1, 2, 0)).mul_(1 / math.sqrt(BLOCK))
