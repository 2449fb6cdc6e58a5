"""Step 2 of the decode block: estimate g_j . x and v_j . x of every candidate from the sketch."""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert
# B block, nb = ceil(H/B) blocks, C = nb*B rotated coordinates; n tokens of one expert

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.formats.codes import Code
from mreader.formats.coding import unpack, values


@dataclass(frozen=True)
class Estimates:
    """What the sketch says about the candidates of every token. Slots that no expert serves hold zeros.

    gate:          (N, K, I) float32 - ghat_j, the estimate of g_j . x
    up:            (N, K, I) float32 - vhat_j, the estimate of v_j . x
    energy_read:   (N, nb) float32 - sum of (Rx)^2 of a block over the coordinates that were read
    energy_unread: (N, nb) float32 - the same over those that were not
    """

    gate: Tensor
    up: Tensor
    energy_read: Tensor
    energy_unread: Tensor


def screen(rx: Tensor, read: Tensor, ids: Tensor, codes: Tensor, scales: Tensor, code: Code) -> Estimates:
    """ghat_j = sum_b s_b(g_j) * sum over the read coordinates c of block b of level(g_j, c) * (Rx)_c; vhat_j likewise.

    Coordinates that are not read contribute zero: no rescaling.

    rx:     (N, nb, B) float32 - rotated tokens
    read:   (N, nb, B) bool - the coordinates that are read
    ids:    (N, K) int - routed experts; anything outside 0..E-1 is a slot that no expert serves
    codes:  (E, 2, C, row bytes) uint8 - packed levels, coordinate-major, gate first
    scales: (E, 2, nb, I) float16 - scale of each block
    code:   which levels the codes mean
    """
    channels, block = scales.shape[-1], rx.shape[-1]
    read_rx = torch.where(read, rx, 0.0).flatten(1)

    def sketch_rows(expert: int, coordinates: Tensor) -> Tensor:
        levels = decode(codes[expert].index_select(1, coordinates), code, channels)
        return levels * scales[expert].float().index_select(1, coordinates // block)

    dots = rx.new_zeros(2, *ids.shape, channels)
    for expert, tokens, slots in tokens_by_expert(ids, codes.shape[0]):
        # A row is touched only if one of the expert's tokens reads it; at N = 1 that is exactly the picked ones.
        coordinates = read[tokens].flatten(1).any(0).nonzero().squeeze(1)
        dots[:, tokens, slots] = read_rx[tokens].index_select(1, coordinates) @ sketch_rows(expert, coordinates)
    energy = rx.square()
    energy_read, energy_unread = torch.where(read, energy, 0.0).sum(-1), torch.where(read, 0.0, energy).sum(-1)
    return Estimates(dots[0], dots[1], energy_read, energy_unread)


def decode(packed: Tensor, code: Code, channels: int) -> Tensor:
    """levels[byte // base^i mod base] of the n channels of every byte: values(unpack(...)), through a table of bytes.

    packed:  (..., row bytes) uint8 - stored rows
    returns: (..., I) float32 - the levels of the `channels` channels
    """
    used = packed[..., : code.used_bytes(channels)].int()
    levels = torch.nn.functional.embedding(used, _levels_of_bytes(code, packed.device))
    return levels.flatten(-2)[..., :channels]


@functools.cache
def _levels_of_bytes(code: Code, device: torch.device) -> Tensor:
    """(256, n) float32: what each byte stands for. A look-up is some 30 times as fast on a CPU as dividing bytes."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)
    return values(unpack(every_byte, code, code.per_byte), code)


def tokens_by_expert(ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each distinct routed expert of a call, in ascending order, with the (token, slot) pairs that it serves.

    ids:    (N, K) int - routed experts; anything outside 0..experts-1 is skipped
    yields: expert, (n,) int64 tokens, (n,) int64 slots
    """
    served = ids[(ids >= 0) & (ids < experts)]
    for expert in sorted(set(served.tolist())):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        yield expert, tokens, slots
