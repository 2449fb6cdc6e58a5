"""The sketch of an expert: its gate and up rows, rotated and coded in a few levels a weight."""

# E experts, H hidden size, I channels of an expert, R rows, B = 128, nb = ceil(H / B), C = nb * B rotated coordinates

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.formats.codes import BLOCK, Code, pack_used

# Elements worked on at once. A CPU's chunk and the three buffers of the fit stay in the second-level cache (2 MB);
# a GPU wants enough elements to fill it.
_CPU_CHUNK = 128 * 1024
_GPU_CHUNK = 64 * 1024 * 1024
_ROW_STEP = 20  # channels: whole bytes in every code (5 and 4 channels a byte)


@dataclass(frozen=True)
class Sketch:
    """Codes of gate and up (gate first), coordinate-major.

    codes:  (..., 2, C, row_bytes) uint8 - for each rotated coordinate the packed codes of all channels
    scales: (..., 2, nb, I) float16 - s of each block
    errors: (..., 2, nb, I) bfloat16 - rho, the mean squared error of each block
    """

    codes: Tensor
    scales: Tensor
    errors: Tensor


def count_blocks(hidden: int) -> int:
    """nb = ceil(H / 128)."""
    return math.ceil(hidden / BLOCK)


def draw_signs(hidden: int, seed: int, layer: int) -> Tensor:
    """signs of the layer-th MoE layer (from 0): a fair draw from {-1, +1} by a generator seeded with seed + layer.

    returns: (H,) int8
    Source: reader.md, "Built once, offline", 1.
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
    Source: reader.md, "Built once, offline", 1.
    """
    blocks = _signed_hadamard(signs.to(weights.device))
    return _rotate_blocks(weights, blocks).permute(2, 0, 1).contiguous()


def sketch_expert(gate: Tensor, up: Tensor, signs: Tensor, code: Code) -> Sketch:
    """codes, s, rho = fit of every block of R g_j and R v_j.

    gate:    (I, H) floating point - gate rows of one expert, on any device
    up:      (I, H) floating point - up rows
    signs:   (H,) int8
    returns: Sketch with no leading axes, on the weights' device; the same on any number of threads
    Working memory: a few chunks of 0.5 MB on a CPU, of 256 MB on a GPU. Fastest on a CPU with one expert a thread
    and torch.set_num_threads(1).
    Raises UnsupportedError where a block's scale does not fit FP16.
    """
    channels, hidden = gate.shape
    sketch = _empty_sketch(channels, hidden, code, gate.device)
    blocks = _signed_hadamard(signs.to(gate.device))
    for matrix, weights in enumerate((gate, up)):
        for span, rows in _chunks(channels, len(blocks), gate.device):
            # Rows are the fast axis here, so that sums over a block and packing along channels both run along memory.
            rotated = _rotate_blocks(weights[rows, span.start * BLOCK : span.stop * BLOCK], blocks[span])
            indices, scales, errors = code.fit(rotated.transpose(1, 2))
            packed = pack_used(indices.transpose(1, 2).flatten(0, 1), code)
            first = rows.start // code.per_byte
            coordinates = slice(span.start * BLOCK, span.stop * BLOCK)
            sketch.codes[matrix, coordinates, first : first + packed.shape[1]] = packed
            sketch.scales[matrix, span, rows] = scales
            sketch.errors[matrix, span, rows] = errors
    return sketch


def _empty_sketch(channels: int, hidden: int, code: Code, device: torch.device) -> Sketch:
    blocks = count_blocks(hidden)
    return Sketch(
        codes=torch.zeros(2, blocks * BLOCK, code.row_bytes(channels), dtype=torch.uint8, device=device),
        scales=torch.empty(2, blocks, channels, dtype=torch.float16, device=device),
        errors=torch.empty(2, blocks, channels, dtype=torch.bfloat16, device=device),
    )


def _chunks(channels: int, blocks: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Spans of blocks and of channels of about one chunk's elements, channels in whole bytes."""
    room = (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // BLOCK
    row_step = min(channels, max(room // _ROW_STEP * _ROW_STEP, _ROW_STEP))
    span = max(room // row_step, 1)
    for block in range(0, blocks, span):
        for row in range(0, channels, row_step):
            yield slice(block, min(block + span, blocks)), slice(row, min(row + row_step, channels))


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
    rows = rows.float().unflatten(1, (-1, BLOCK))
    return torch.bmm(blocks, rows.permute(1, 2, 0)).mul_(1 / math.sqrt(BLOCK))
