"""The decode block on a GPU: five Triton kernels one after the other, without a word from the host in between.

rotate -> screen -> select -> exact -> finish; what each does and costs: kernels/README.md.
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert
# nb = ceil(H / 128) blocks, T = ceil(I / 64) tiles, M = K * I candidates, P groups of kept channels, r rank in use

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from mreader.errors import UnsupportedError, UsageError
from mreader.formats.codes import Code, count_blocks
from mreader.kernels.activation_kernel import activation_kind
from mreader.kernels.exact_kernel import exact_kernel, finish_kernel
from mreader.kernels.intrinsics import has_dependent_launch
from mreader.kernels.layout import MOST_CANDIDATES, TILE, Tiles, to_tiles
from mreader.kernels.rotate_kernel import rotate_kernel
from mreader.kernels.screen_kernel import screen_kernel
from mreader.kernels.select_kernel import select_kernel
from mreader.kernels.tuning import LayerShape, configuration, device_name
from mreader.reader import ExpertLayer, ReadSettings

# Bins of the scores, by the upper bits of their 31: an eighth and a 64th of an octave.
_COARSE_SHIFT, _FINE_SHIFT = 20, 17
_HISTOGRAM = {
    "COARSE_SHIFT": _COARSE_SHIFT,
    "FINE_SHIFT": _FINE_SHIFT,
    "COARSE": 1 << 31 - _COARSE_SHIFT,
    "FINE": 1 << 31 - _FINE_SHIFT,
}


@dataclass(frozen=True)
class DecodeLayer:
    """One routed layer as the kernels read it.

    gate_up:    (E, 2, I, H) native dtype
    down:       (E, I, H) native dtype
    tiles:      sketch codes, scales and errors
    signs:      (H,) int8
    down_norms: (E, I) float16
    basis:      (H, stored rank) float16
    coeffs:     (E, I, stored rank) float16
    code:       which levels the codes mean
    activation: its name, as in mreader.activations
    """

    gate_up: Tensor
    down: Tensor
    tiles: Tiles
    signs: Tensor
    down_norms: Tensor
    basis: Tensor
    coeffs: Tensor
    code: Code
    activation: str


def repack(layer: ExpertLayer) -> DecodeLayer:
    """The layer as the kernels read it: native weights, norms and recovery map as they are, the sketch in tiles."""
    return DecodeLayer(
        gate_up=layer.gate_up,
        down=layer.down,
        tiles=to_tiles(layer.codes, layer.scales, layer.errors, layer.code),
        signs=layer.signs,
        down_norms=layer.down_norms,
        basis=layer.basis.contiguous(),
        coeffs=layer.coeffs.contiguous(),
        code=layer.code,
        activation=layer.activation.name,
    )


@dataclass(frozen=True)
class Blocks:
    """Meta-parameters, <kernel>_<parameter> of tuning.toml: warps of a program, and how much it takes on.

    screen_loads:   groups of 4 loads that a thread has under way at a time
    recovery_rows:  channels that a program of the recovery sum takes at a time
    exact_channels: kept channels that a program takes side by side, exact_steps times
    finish_columns: of the output
    """

    rotate_warps: int = 4
    screen_warps: int = 8
    screen_loads: int = 5
    select_warps: int = 8
    recovery_rows: int = 128
    exact_channels: int = 4
    exact_steps: int = 1
    exact_warps: int = 8
    finish_columns: int = 16
    finish_warps: int = 4


def tuned_blocks(device: torch.device, shape: LayerShape, batch: int) -> Blocks:
    """What is known to suit the GPU, the layer and the batch."""
    name = device_name(device)
    return Blocks(
        **{
            f"{kernel}_{parameter}": value
            for kernel in ("rotate", "screen", "select", "recovery", "exact", "finish")
            for parameter, value in configuration(kernel, name, shape, batch).items()
        }
    )


def decode(
    x: Tensor, ids: Tensor, weights: Tensor, layer: DecodeLayer, settings: ReadSettings, blocks: Blocks | None = None
) -> Tensor:
    """y = sum over kept j of w_e * a_j * d_j + U . sum over skipped j of w_e * p_j * b_j, as `mreader.reader.read`.

    x:       (N, H) any float, contiguous
    ids:     (N, K) int - anything outside 0..E-1 contributes nothing
    weights: (N, K) any float
    returns: (N, H) dtype of x

    Estimates are summed in FP16 over a quarter of a block's coordinates, and in float32 beyond. The same input gives
    the same bits; a token's result depends on its neighbours only where `blocks` does.
    """
    E, I, H = layer.down.shape
    blocks = blocks or tuned_blocks(x.device, LayerShape(E, ids.shape[1], H, I), len(x))
    return Stages(x, ids, weights, layer, settings, blocks).run()


class Stages:
    """One call of the decode block, stage by stage; `run` for all of them. Tests and benchmarks look between."""

    def __init__(
        self, x: Tensor, ids: Tensor, weights: Tensor, layer: DecodeLayer, settings: ReadSettings, blocks: Blocks
    ) -> None:
        self.x, self.ids, self.weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        self.layer, self.settings, self.blocks = layer, settings, blocks
        self.experts, self.channels, self.hidden = layer.down.shape
        self.tokens, self.slots = ids.shape
        self.candidates = self.slots * self.channels
        if self.candidates > MOST_CANDIDATES:
            raise UnsupportedError(f"{self.candidates} channels of a token's experts: the kernels count to 65,535")
        if settings.rank > layer.basis.shape[1]:
            raise UsageError(f"rank {settings.rank} asked for, but rank {layer.basis.shape[1]} is stored")
        self.k = min(settings.k, self.candidates)
        self.nb = count_blocks(self.hidden)
        self.rank, self.stored_rank = settings.rank, layer.basis.shape[1]
        self.rank_up = triton.next_power_of_2(max(self.rank, 1))
        self.groups = max(triton.cdiv(self.k, blocks.exact_channels * blocks.exact_steps), 1)
        self.dependent = has_dependent_launch(x.device)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=x.device)

        N, K, I = self.tokens, self.slots, self.channels
        self.offsets = empty(N, self.nb, 8, 4, 4, dtype=torch.int32)
        self.values = empty(N, self.nb, 8, 4, 4, dtype=torch.int32)
        self.block_info = empty(N, self.nb, 4)
        self.histogram = empty(N, _HISTOGRAM["COARSE"] + _HISTOGRAM["FINE"], dtype=torch.int32)
        self.keys = empty(N, K, I, dtype=torch.int32)
        self.skipped = empty(N, K, I)
        self.members = empty(N, K, I, dtype=torch.int32)
        self.rows = empty(N, max(self.k, 1), dtype=torch.int64)
        self.recovery = empty(N, K, self.rank_up)
        self.outputs = empty(N, self.groups, self.hidden)
        self.y = empty(N, self.hidden, dtype=x.dtype)

    def run(self) -> Tensor:
        """All stages; y (N, H)."""
        for stage in (self.rotate, self.screen, self.select, self.exact, self.finish):
            stage()
        return self.y

    def rotate(self) -> None:
        """offsets, values, block_info; clears the histogram."""
        self._launch(
            rotate_kernel,
            (self.nb, self.tokens),
            self.blocks.rotate_warps,
            *(self.x, self.layer.signs, self.offsets, self.values, self.block_info, self.histogram),
            *(self.hidden, self.layer.tiles.codes.stride(1)),
            COORDINATES=self.settings.coordinates,
            HISTOGRAM=self.histogram.shape[1],
            CLEARED=triton.cdiv(self.histogram.shape[1], self.nb),
        )

    def screen(self) -> None:
        """keys, skipped, histogram."""
        layer, code, score = self.layer, self.layer.code, self.settings.score
        tiles = layer.tiles
        self._launch(
            screen_kernel,
            (triton.cdiv(self.channels, TILE), self.slots, self.tokens),
            self.blocks.screen_warps,
            *(tiles.codes, tiles.scales, tiles.errors if score == "rho" else tiles.scales),
            *(self.offsets, self.values, self.block_info, self.ids, self.weights, layer.down_norms, layer.coeffs),
            *(self.keys, self.skipped, self.histogram, self.experts, self.channels, self.stored_rank, 0),
            nb=self.nb,
            NB_UP=max(triton.next_power_of_2(self.nb), 16),
            ZERO=code.levels[0] / (code.levels[0] - code.levels[1]),
            NOISE_READ=1.0 if score == "rho" else code.noise_read,
            NOISE_UNREAD=1.0 if score == "rho" else code.noise_unread,
            SCORE=score,
            ACTIVATION=activation_kind(layer.activation),
            RANK=self.rank,
            COORDINATES=self.settings.coordinates,
            LOADED=self.blocks.screen_loads,
            BLOCKS=self.blocks.screen_warps,
            **_HISTOGRAM,
        )

    def select(self) -> None:
        """rows; zeros in skipped."""
        self._launch(
            select_kernel,
            (self.slots, self.tokens),
            self.blocks.select_warps,
            *(self.keys, self.histogram, self.ids, self.weights, self.rows, self.skipped, self.members),
            *(self.experts, self.k),
            channels=self.channels,
            CANDIDATES_UP=triton.next_power_of_2(self.candidates),
            CHANNELS_UP=triton.next_power_of_2(self.channels),
            **_HISTOGRAM,
        )

    def exact(self) -> None:
        """outputs, recovery."""
        layer = self.layer
        self._launch(
            exact_kernel,
            (self.groups + (self.slots if self.rank else 0), self.tokens),
            self.blocks.exact_warps,
            *(self.x, self.rows, self.ids, self.skipped, layer.gate_up, layer.down, layer.coeffs),
            *(self.outputs, self.recovery, self.experts, self.slots, self.k, self.groups, self.stored_rank),
            hidden=self.hidden,
            channels=self.channels,
            ACTIVATION=activation_kind(layer.activation),
            RANK=self.rank,
            RANK_UP=self.rank_up,
            HIDDEN_UP=triton.next_power_of_2(self.hidden),
            CHANNELS=self.blocks.exact_channels,
            STEPS=self.blocks.exact_steps,
            ROWS=self.blocks.recovery_rows,
        )

    def finish(self) -> None:
        """y."""
        self._launch(
            finish_kernel,
            (triton.cdiv(self.hidden, self.blocks.finish_columns), self.tokens),
            self.blocks.finish_warps,
            *(self.outputs, self.recovery, self.layer.basis, self.y),
            *(self.hidden, self.groups, self.slots, self.stored_rank),
            RANK=self.rank,
            RANK_UP=self.rank_up,
            GROUPS_UP=triton.next_power_of_2(self.groups),
            SLOTS_UP=triton.next_power_of_2(self.slots),
            COLUMNS=self.blocks.finish_columns,
        )

    def _launch(self, kernel: Any, grid: tuple[int, ...], warps: int, *arguments: Any, **constants: Any) -> None:
        launch: Callable[..., Any] = kernel[grid]
        launch(*arguments, **constants, DEPENDENT=self.dependent, launch_pdl=self.dependent, num_warps=warps)
