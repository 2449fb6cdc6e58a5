"""The sketch as a GPU reads it: 2 bits a code, gate and up side by side, tiles of 64 channels."""

# E experts, H hidden size, I channels of an expert, nb = ceil(H / 128) blocks, T = ceil(I / 64) tiles

from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.budget import Layout
from mreader.formats.codes import Code
from mreader.formats.coding import pack, unpack

MOST_CANDIDATES = (1 << 16) - 1  # of a token: exact packs a chunk and how many it lists into one int32
TILE = 64  # channels: 16 bytes of gate codes and 16 of up codes are one sector of DRAM


def _padded(channels: int) -> int:
    return -(-channels // TILE) * TILE


def _runs(code: Code, channels: int) -> tuple[int, ...]:
    """Gate and up codes of a coordinate, 2 bits each, are one run of whole sectors."""
    return (_padded(channels) // 2,)


GPU = Layout("gpu", _runs, _padded, norm_bytes=4)


@dataclass(frozen=True)
class Tiles:
    """The sketch of one layer in tiles.

    codes:  (E, nb * 128, T, 2, 4) int32 - level index of channel c of the tile at bits 2 (c mod 16) of word c / 16
    scales: (E, nb, T, 2, 64) float16
    errors: (E, nb, T, 2, 64) bfloat16
    """

    codes: Tensor
    scales: Tensor
    errors: Tensor


def to_tiles(codes: Tensor, scales: Tensor, errors: Tensor, code: Code) -> Tiles:
    """The stored sketch, repacked.

    codes:  (E, 2, C, row bytes) uint8
    scales: (E, 2, nb, I) float16
    errors: (E, 2, nb, I) bfloat16
    """
    channels = scales.shape[-1]
    words = torch.stack([_words(expert, code, channels) for expert in codes])
    return Tiles(words, _values_in_tiles(scales), _values_in_tiles(errors))


def to_norms(down_norms: Tensor, coeffs: Tensor) -> Tensor:
    """What the score reads of a channel: ||d_j||, and sqrt(||d_j||^2 - ||b_j||^2), which is what recovery leaves of it.

    down_norms: (E, I) float16
    coeffs:     (E, I, r) float16 - b_j, the rank in use only
    returns:    (E, I) int32 - both as float16, ||d_j|| in the lower half
    """
    recovered = torch.linalg.vector_norm(coeffs, dim=-1, dtype=torch.float32)
    left = (down_norms.float().square() - recovered.square()).clamp_min(0).sqrt()
    words = torch.stack([down_norms, left.half()], -1).view(torch.int32)
    return words.squeeze(-1)


def from_tiles(tiles: Tiles, code: Code, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scales, errors as stored: the inverse of `to_tiles`."""
    codes = torch.stack([pack(_indices(words, channels), code) for words in tiles.codes])
    return codes, _values_as_stored(tiles.scales, channels), _values_as_stored(tiles.errors, channels)


def _words(codes: Tensor, code: Code, channels: int) -> Tensor:
    """One expert: (2, C, row bytes) uint8 -> (C, T, 2, 4) int32."""
    indices = torch.nn.functional.pad(unpack(codes, code, channels), (0, -channels % TILE))
    digits = indices.reshape(*indices.shape[:2], -1, 4).unbind(-1)
    packed = digits[0] | digits[1] << 2 | digits[2] << 4 | digits[3] << 6
    words = packed.view(torch.int32)
    return words.reshape(*words.shape[:2], -1, 4).permute(1, 2, 0, 3).contiguous()


def _indices(words: Tensor, channels: int) -> Tensor:
    """One expert: (C, T, 2, 4) int32 -> (2, C, I) uint8."""
    packed = words.permute(2, 0, 1, 3).flatten(-2).contiguous().view(torch.uint8)
    return torch.stack([(packed >> 2 * i) & 3 for i in range(4)], -1).flatten(-2)[..., :channels].contiguous()


def _values_in_tiles(values: Tensor) -> Tensor:
    """(E, 2, nb, I) -> (E, nb, T, 2, 64), zeros behind the last channel."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % TILE))
    return padded.reshape(*padded.shape[:3], -1, TILE).permute(0, 2, 3, 1, 4).contiguous()


def _values_as_stored(tiles: Tensor, channels: int) -> Tensor:
    return tiles.permute(0, 3, 1, 2, 4).flatten(-2)[..., :channels].contiguous()
