"""What scores look at: the tokens of a call, and a routed layer with what follows from its weights alone."""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert, M rows, R rank of factors

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from mreader.budget import BlockShape
from mreader.errors import UsageError
from mreader.formats.codes import get_code
from mreader.formats.coding import fit, values
from mreader.kernels.screen import tokens_by_expert
from mreader.reader import ExpertLayer
from mreader.selectors.kept import Kept
from mreader.selectors.reads import PROXY_BITS
from mreader.selectors.sketching import Native, Sketching, sketch_layer

_ELEMENTS_AT_ONCE = 1 << 24

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Tokens at the input of a routed layer.

    x:       (N, H) float32
    ids:     (N, K) int - routed experts
    weights: (N, K) float32 - routing weights
    """

    x: Tensor
    ids: Tensor
    weights: Tensor

    @cached_property
    def routes(self) -> list[tuple[int, Tensor, Tensor]]:
        """Each distinct expert with the (token, slot) pairs that it serves."""
        return list(tokens_by_expert(self.ids, int(self.ids.max()) + 1)) if len(self.ids) else []

    def parts(self, width: int) -> Iterator[Batch]:
        """The same tokens, so many at a time that N * K * width values fit."""
        step = max(1, _ELEMENTS_AT_ONCE // (self.ids.shape[1] * width))
        for start in range(0, len(self.x), step):
            some = slice(start, start + step)
            yield Batch(self.x[some], self.ids[some], self.weights[some])

    def strided(self, tokens: int) -> Batch:
        """At most so many of the tokens, evenly spread."""
        step = max(1, -(-len(self.x) // tokens))
        return Batch(self.x[::step], self.ids[::step], self.weights[::step])


@dataclass(frozen=True)
class Layer:
    """A routed layer, and what selectors derive from its weights: made when asked for, and kept as long as it fits.

    ordinal:     its place among the routed layers
    shape:       sizes, and the layout that the reader is charged in
    sketching:   how the reader's sketch is made
    stored:      sketch and recovery map where a checkpoint holds them, for its own way of sketching
    calibration: tokens at its input in the dense model, for what needs some; None is none
    """

    native: Native
    ordinal: int
    shape: BlockShape
    kept: Kept
    sketching: Sketching
    stored: tuple[Sketching, Mapping[str, Tensor]] | None = None
    calibration: Batch | None = None

    @property
    def gate_up(self) -> Tensor:
        """(E, 2, I, H)."""
        return self.native.gate_up

    @property
    def down(self) -> Tensor:
        """(E, I, H)."""
        return self.native.down

    def sketched_as(self, sketching: Sketching) -> Layer:
        """The same layer with another sketch, and its reads charged for that."""
        shape = replace(self.shape, rank=sketching.rank, code=sketching.options.code)
        return replace(self, sketching=sketching, shape=shape)

    @property
    def sketched(self) -> ExpertLayer:
        """The layer as the reader reads it."""
        return ExpertLayer.of(
            self.gate_up, self.down, self._sketch(), self.sketching.options.code, self.native.activation
        )

    def _sketch(self) -> Mapping[str, Tensor]:
        if self.stored is not None and self.stored[0] == self.sketching:
            return self.stored[1]
        return self._derived(self.sketching, lambda: sketch_layer(self.native, self.sketching, self.ordinal))

    def _derived(self, kind: Hashable, make: Callable[[], T]) -> T:
        return self.kept.get(kind, self.ordinal, make)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """phi(gate) * up."""
        activated: Tensor = self.native.activation.function(gate) * up
        return activated

    @property
    def input_norms(self) -> Tensor:
        """(E, 2, H) float32 - norm of each input coordinate's column of gate and up."""
        return self._derived("input norms", lambda: torch.stack([w.float().norm(dim=1) for w in self.gate_up]))

    @property
    def down_norms(self) -> Tensor:
        """(E, I) float32 - ||d_j||."""
        return self._derived("down norms", lambda: torch.stack([w.float().norm(dim=1) for w in self.down]))

    @property
    def calibrated(self) -> Batch:
        """The calibration tokens. UsageError where there are none."""
        if self.calibration is None:
            raise UsageError("this selector needs calibration data", "give --calibration FILE")
        return self.calibration

    @property
    def up_energy(self) -> Tensor:
        """(E, I) float32 - E[(v_j . x)^2] over an expert's calibration tokens; over everybody's where it has none."""
        return self._derived("up energy", self._measure_up)

    def _measure_up(self) -> Tensor:
        batch = self.calibrated
        energy = project(batch, batch.x, lambda expert: self.gate_up[expert, 1]).square()
        means = energy.mean((0, 1)).repeat(len(self.down), 1)
        for expert, tokens, slots in batch.routes:
            means[expert] = energy[tokens, slots].mean(0)
        return means

    @property
    def proxies(self) -> Rounded:
        """Gate and up in INT4, a scale a row."""
        return self._derived("INT4", lambda: Rounded.of(self.gate_up, lambda rows: round_rows(rows, PROXY_BITS)))

    @property
    def nominators(self) -> Rounded:
        """Gate and up in 2 bits, a scale a row: +-0.5 and +-1.5 times it."""
        code = get_code("quaternary")

        def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
            indices, scales, _ = fit(rows.float(), code)
            return values(indices.to(torch.uint8), code), scales.float()

        return self._derived("2 bits", lambda: Rounded.of(self.gate_up, rounded))

    def factors(self, rank: int) -> Factors:
        """The best rank-R factors of every matrix."""
        return self._derived(("factors", rank), lambda: Factors.of(self, rank))


@dataclass(frozen=True)
class Rounded:
    """Rows in a few levels.

    levels: (E, 2, I, H) int8 - twice the level, so that halves are whole
    scales: (E, 2, I) float32
    """

    levels: Tensor
    scales: Tensor

    @classmethod
    def of(cls, gate_up: Tensor, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Rounded:
        pairs = [rounded(weights) for weights in gate_up]
        return cls(
            torch.stack([(2 * levels).to(torch.int8) for levels, _ in pairs]), torch.stack([s for _, s in pairs])
        )

    def rows(self, expert: int) -> Tensor:
        """(2, I, H) float32."""
        return self.levels[expert].float() * (self.scales[expert] / 2).unsqueeze(-1)


@dataclass(frozen=True)
class Factors:
    """W ~ left @ right of every matrix, the best approximation of its rank.

    left:  3 of (E, I, R) float32 - gate, up, and down with a channel's weights as a row
    right: 3 of (E, R, H) float32
    """

    left: tuple[Tensor, Tensor, Tensor]
    right: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, layer: Layer, rank: int) -> Factors:
        matrices = (layer.gate_up[:, 0], layer.gate_up[:, 1], layer.down)
        pairs = [[factorise(weights, rank) for weights in matrix] for matrix in matrices]
        left, right = ([torch.stack([pair[side] for pair in pairs[i]]) for i in range(3)] for side in (0, 1))
        return cls((left[0], left[1], left[2]), (right[0], right[1], right[2]))


def factorise(weights: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """W ~ Q (Q^T W), Q the top R left singular vectors: (M, R) and (R, H) float32."""
    wide = weights.float()
    basis = torch.linalg.eigh(wide @ wide.mT).eigenvectors[:, -rank:]
    return basis, basis.mT @ wide


def round_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole levels up to 2^(bits-1) - 1 in size, the largest weight of a row on the last of them.

    rows:    (..., H) floating point
    returns: (..., H) float32 levels, (...) float32 scales
    """
    last = 2 ** (bits - 1) - 1
    scales = rows.float().abs().amax(-1) / last
    levels = (rows.float() / scales.clamp_min(1e-30).unsqueeze(-1)).round().clamp(-last, last)
    return levels, scales


def project(batch: Batch, x: Tensor, rows: Callable[[int], Tensor]) -> Tensor:
    """rows(e) . x for the expert e of every slot: (N, K, M) float32.

    x:    (N, H) the same for all slots, or (N, K, H)
    rows: expert -> (M, H)
    """
    parts = [
        (tokens, slots, (x[tokens] if x.dim() == 2 else x[tokens, slots]) @ rows(expert).float().mT)
        for expert, tokens, slots in batch.routes
    ]
    out = x.new_empty(*batch.ids.shape, parts[0][2].shape[-1])
    for tokens, slots, products in parts:
        out[tokens, slots] = products
    return out


def combine(batch: Batch, values: Tensor, rows: Callable[[int], Tensor]) -> Tensor:
    """sum over routed e, j of w_e * values_j * rows(e)_j: (N, M) float32.

    values: (N, K, I) float32
    rows:   expert -> (I, M)
    """
    weighted = values * batch.weights.unsqueeze(-1)
    parts = [(tokens, weighted[tokens, slots] @ rows(expert).float()) for expert, tokens, slots in batch.routes]
    out = batch.x.new_zeros(len(batch.x), parts[0][1].shape[-1])
    for tokens, part in parts:
        out.index_add_(0, tokens, part)
    return out


def by_slot(batch: Batch, table: Tensor) -> Tensor:
    """table[ids], (N, K, ...)."""
    return table[batch.ids]


def exact(batch: Batch, layer: Layer) -> tuple[Tensor, Tensor]:
    """g_j . x and v_j . x of every candidate, from the native weights: (N, K, I) each."""
    channels = layer.shape.channels
    both = project(batch, batch.x, lambda expert: layer.gate_up[expert].flatten(0, 1))
    return both[..., :channels], both[..., channels:]
