"""The sketch of an expert: its gate and up rows, rotated and coded in a few levels a weight."""

# E experts, H hidden size, I channels of an expert, B = 128, nb = ceil(H / B), C = nb * B rotated coordinates,
# M matrices, R of their rows, n channels a byte, b = ceil(R / n) bytes

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.formats.codes import BLOCK, Code, count_blocks
from mreader.formats.coding import fit, pack_digits

# Elements rotated and fitted at once. On a CPU that is four float32 arrays of 3.3 MB a thread. A quarter of this, which
# a second-level cache would hold, takes 40 % longer in two threads, in calls and in waiting for the interpreter lock. A
# GPU wants to be filled.
_CPU_CHUNK = 800 * 1024
_GPU_CHUNK = 64 * 1024 * 1024
_UNIT = 1 / math.sqrt(BLOCK)  # makes the Hadamard matrix orthogonal
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
    padded = torch.nn.functional.pad(weights.float(), (0, -weights.shape[1] % BLOCK))
    rotation = _signed_hadamard(signs.to(weights.device))
    rotated = _rotate(padded.view(len(weights), -1, BLOCK).transpose(0, 1), rotation)
    return rotated.permute(2, 0, 1).contiguous()


def sketch_matrices(matrices: Sequence[Tensor], signs: Tensor, code: Code) -> Sketch:
    """codes, s, rho = fit of every block of every rotated row R w.

    matrices: M of (I, H) floating point - gate and up projections of one layer, on any one device
    signs:    (H,) int8
    returns:  Sketch with the leading axis M, on the weights' device; the same on any number of threads
    Working memory on a CPU: 13 MB; on a GPU: about 2 GB. On a CPU call it under torch.set_num_threads(1), from two
    threads if cores are free: torch's own threads gain less, and lose ten times that where other work shares the cores.
    On a GPU call it with many matrices: they are coded side by side.
    NaN or infinity in a row makes the errors of its block non-finite. Raises UnsupportedError where a block's scale
    does not fit FP16.
    """
    return _sketch(matrices, _signed_hadamard(signs.to(matrices[0].device)), code)


def sketch_unrotated(matrices: Sequence[Tensor], code: Code) -> Sketch:
    """The same fit to the rows as they are: what rotation is measured against. No checkpoint holds such a sketch."""
    blocks = count_blocks(matrices[0].shape[1])
    rotation = torch.eye(BLOCK, device=matrices[0].device).expand(blocks, -1, -1) / _UNIT
    return _sketch(matrices, rotation, code)


def _sketch(matrices: Sequence[Tensor], rotation: Tensor, code: Code) -> Sketch:
    """rotation: (nb, B, B) float32, sqrt(128) times an orthogonal matrix a block."""
    channels, hidden = matrices[0].shape
    device = matrices[0].device
    sketch = _empty_sketch(len(matrices), channels, hidden, code, device)
    groups = _row_groups(channels, device)
    at_once = max(_chunk(device) // (groups[0].stop * hidden), 1)
    for first in range(0, len(matrices), at_once):
        some = slice(first, min(first + at_once, len(matrices)))
        for rows in groups:
            part = Sketch(
                sketch.codes[some, :, code.used_bytes(rows.start) : code.used_bytes(rows.stop)],
                sketch.scales[some, :, rows],
                sketch.errors[some, :, rows],
            )
            _fill(part, [matrix[rows] for matrix in matrices[some]], rotation, code)
    return sketch


def _deal(matrices: Sequence[Tensor], code: Code) -> Tensor:
    """(nb, M, n, b, B) float32: block k of channel n b + i of matrix m at [k, m, i, b].

    So the same digit of all bytes lies side by side, and packing runs along memory. Beyond H there are zeros; beyond I
    a channel is repeated, since zeros would make blocks of their own kind.
    """
    (rows, hidden), n = matrices[0].shape, code.per_byte
    joined = torch.stack(list(matrices)) if len(matrices) > 1 else matrices[0].unsqueeze(0)
    if hidden % BLOCK:
        joined = torch.nn.functional.pad(joined, (0, -hidden % BLOCK))
    blocks = joined.reshape(len(matrices), rows, -1, BLOCK).permute(2, 0, 1, 3)
    shape = (len(blocks), len(matrices), n, code.used_bytes(rows), BLOCK)
    dealt = joined.new_empty(shape, dtype=torch.float32)
    whole = rows // n
    in_bytes = blocks[:, :, : whole * n].reshape(len(blocks), len(matrices), whole, n, BLOCK)
    dealt[:, :, :, :whole] = in_bytes.transpose(2, 3)
    if rows % n:
        dealt[:, :, : rows % n, whole] = blocks[:, :, whole * n :]
        dealt[:, :, rows % n :, whole] = dealt[:, :, :1, whole]
    return dealt


def _fill(sketch: Sketch, matrices: Sequence[Tensor], rotation: Tensor, code: Code) -> None:
    """Deal, rotate and fit some matrices, a few blocks at a time, and write their sketch."""
    rows = len(matrices[0])
    step = max(_chunk(rotation.device) // (len(matrices) * rows * BLOCK), 1)
    fits = []
    for first in range(0, len(rotation), step):
        columns = slice(first * BLOCK, (first + step) * BLOCK)
        dealt = _deal([matrix[:, columns] for matrix in matrices], code)
        rotated = _rotate(dealt.flatten(1, 3), rotation[first : first + step])
        indices, *found = fit(rotated.view(-1, BLOCK, *dealt.shape[1:4]).movedim(1, -1), code)
        fits.append(found)
        digits = indices.movedim(-1, 1)
        if missing := -rows % code.per_byte:
            digits[..., -missing:, -1] = 0
        packed = pack_digits(digits, code).flatten(0, 1)
        sketch.codes[:, first * BLOCK : first * BLOCK + len(packed)] = packed.transpose(0, 1)
    for target, values in zip((sketch.scales, sketch.errors), zip(*fits, strict=True), strict=True):
        target[:] = torch.cat(values).transpose(2, 3).flatten(2)[..., :rows].transpose(0, 1)


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


def _signed_hadamard(signs: Tensor) -> Tensor:
    """(nb, B, B) float32: Hadamard_128 . diag(signs of the block), 0 where the block is padding."""
    padded = torch.nn.functional.pad(signs.float(), (0, -len(signs) % BLOCK))
    return hadamard(BLOCK).to(signs.device) * padded.view(-1, 1, BLOCK)


def _rotate(rows: Tensor, rotation: Tensor) -> Tensor:
    """(nb, R, B) -> (nb, B, R), float32: the blocks of all rows times Hadamard_128 . diag(signs) / sqrt(128).

    rotation: (nb, B, B) float32 - Hadamard_128 . diag(signs), or sqrt(128) times the identity
    The products are exact, +-w, whatever precision the device's float32 product has for weights of 16 bits; only
    the sums round. The factor 1 / sqrt(128) comes last for that reason.
    """
    return torch.bmm(rotation, rows.transpose(1, 2)).mul_(_UNIT)
