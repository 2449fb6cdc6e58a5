"""Bytes that a call has to fetch: tokens of a batch share experts, and what they share comes from DRAM once."""

# N tokens, E experts, K routed experts of a token, I channels of an expert, nb blocks

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mreader.bench.layers import Call
from mreader.budget import BlockShape, count_reads
from mreader.formats.codes import count_blocks
from mreader.kernels.rotate import pick_coordinates, rotate
from mreader.kernels.score import Candidates, score
from mreader.kernels.screen import screen, tokens_by_expert
from mreader.kernels.select import select
from mreader.reader import ExpertLayer, ReadSettings


@dataclass(frozen=True)
class Touched:
    """What the tokens of a call read, each counted once.

    experts:  distinct experts
    rows:     code rows of one matrix: pairs of an expert and a coordinate
    channels: pairs of an expert and a kept channel
    """

    experts: int
    rows: int
    channels: int


@dataclass(frozen=True)
class _Costs:
    """Bytes of each thing that can be read.

    expert:  scales, norms and the like of one expert, and its recovery coefficients
    row:     a coordinate's code rows, of gate and of up
    channel: a kept channel's native rows
    basis:   of the layer's recovery map
    """

    expert: float
    row: float
    channel: float
    basis: float


@torch.no_grad()
def find_touched(layer: ExpertLayer, call: Call, settings: ReadSettings) -> Touched:
    """What a call reads, by the reference of the block."""
    rx = rotate(call.x, layer.signs)
    picked = pick_coordinates(rx, settings.coordinates)
    estimates = screen(rx, picked, call.ids, layer.codes, layer.scales, layer.code)
    candidates = Candidates(
        estimates,
        call.ids,
        call.weights.float(),
        layer.scales,
        layer.errors,
        layer.down_norms,
        layer.coeffs[..., : settings.rank],
        layer.code,
        layer.activation,
    )
    return count_touched(call.ids, picked, select(score(candidates, settings.score), settings.k), len(layer.down))


def count_touched(ids: Tensor, picked: Tensor, kept: Tensor, experts: int) -> Touched:
    """Distinct experts, code rows and channels.

    ids:    (N, K) int - routed experts
    picked: (N, nb, B) bool - coordinates that each token reads
    kept:   (N, K, I) bool - channels that each token reads exactly
    """
    distinct = rows = channels = 0
    for _, tokens, slots in tokens_by_expert(ids, experts):
        distinct += 1
        rows += int(picked[tokens].any(0).sum())
        channels += int(kept[tokens, slots].any(0).sum())
    return Touched(distinct, rows, channels)


def touched_bytes(shape: BlockShape, touched: Touched, settings: ReadSettings) -> int:
    """Their bytes in whole sectors; for one token what `count_reads` counts."""
    costs = _costs(shape, settings)
    return round(
        touched.experts * costs.expert + touched.rows * costs.row + touched.channels * costs.channel + costs.basis
    )


def _costs(shape: BlockShape, settings: ReadSettings) -> _Costs:
    """`count_reads` is linear in experts, coordinates and channels: the cost of one more of each."""

    def bytes_of(experts: int, coordinates: int, k: int, rank: int) -> float:
        some = replace(shape, routed=experts)
        reads = count_reads(some, k, coordinates, settings.score, rank)
        return reads.total * some.native_bytes

    rank = settings.rank
    least = bytes_of(1, 1, 0, rank)
    coordinate = bytes_of(1, 2, 0, rank) - least  # one more in every block
    one_more = bytes_of(2, 1, 0, rank) - least
    return _Costs(
        expert=one_more - coordinate,
        row=coordinate / count_blocks(shape.hidden),
        channel=bytes_of(1, 1, 1, rank) - least,
        basis=least - one_more,
    )
