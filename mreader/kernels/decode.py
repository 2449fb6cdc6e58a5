"""The decode block on a GPU: six Triton kernels one after the other, without a word from the host in between.

rotate -> screen -> score -> select -> exact -> finish; what each does and costs: kernels/README.md.
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert
# nb = ceil(H / 128) blocks, T = ceil(I / 64) tiles, M = K * I candidates, P groups of kept channels, r rank in use

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import triton
from torch import Tensor

from mreader.errors import UnsupportedError, UsageError
from mreader.formats.codes import Code, count_blocks
from mreader.kernels.activation_kernel import activation_kind
from mreader.kernels.exact_kernel import exact_kernel, finish_kernel
from mreader.kernels.intrinsics import (
    full_registers,
    has_dependent_launch,
    launch_options,
    limited_registers,
    multiprocessors,
)
from mreader.kernels.layout import MOST_CANDIDATES, TILE, Tiles, to_norms, to_tiles
from mreader.kernels.rotate_kernel import rotate_kernel
from mreader.kernels.route import MOST_EXPERTS
from mreader.kernels.score_kernel import score_kernel
from mreader.kernels.screen_kernel import screen_kernel
from mreader.kernels.select_kernel import select_kernel
from mreader.kernels.tuning import LayerShape, configuration, device_name, user_file
from mreader.reader import ExpertLayer, ReadSettings

# Bins of the scores, by the upper bits of their 31: half an octave, and a 512th in a window of 32 octaves.
_HISTOGRAM = {"COARSE_SHIFT": 22, "FINE_SHIFT": 14, "COARSE": 1 << 9, "FINE": 1 << 14}

_MOST_CHUNKS = 64  # of a token: a program of `select` looks at the keys of all that are earlier
_MOST_KEYS = 32  # that a lane of `select` looks at side by side, a multiple of 4
_MOST_GROUPS = 256  # whose outputs a program of `finish` has under way at once, a multiple of 32
_GATE_NUMBERS = 1 << 12  # that a program of the gate multiplies
_MOST_GATED = 128  # tokens whose logits the kernels make
_MOST_PROGRAMS = 65_535  # in the second and third direction of a grid


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
    arrived:    (128,) int32 zeros, between calls: what the programs of a gate count by, token by token, so that calls
                with one do not overlap
    norms:      rank in use -> what `to_norms` makes of it: of the stored rank from the start, of others from the first
                call on, and for good, as captured graphs hold their address
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
    arrived: Tensor
    norms: dict[int, Tensor] = field(init=False, repr=False, compare=False, default_factory=dict)

    def norms_for(self, rank: int) -> Tensor:
        """(E, I) int32 - what the score reads of a channel, with that rank in use."""
        if rank in self.norms:
            return self.norms[rank]
        norms = to_norms(self.down_norms, self.coeffs[..., :rank])
        if norms.is_cuda and torch.cuda.is_current_stream_capturing():  # made anew by each replay
            return norms
        return self.norms.setdefault(rank, norms)


def repack(layer: ExpertLayer) -> DecodeLayer:
    """The layer as the kernels read it: native weights, norms and recovery map as they are, the sketch in tiles.

    Raises UnsupportedError for what they do not compute: biases, or an activation that is not phi(gate) * up.
    """
    if layer.down_bias is not None or not layer.activation.is_linear_in_up:
        raise UnsupportedError("the kernels do not know the experts' biases or activation", "read them with torch")
    repacked = DecodeLayer(
        gate_up=layer.gate_up,
        down=layer.down,
        tiles=to_tiles(layer.codes, layer.scales, layer.errors, layer.code),
        signs=layer.signs,
        down_norms=layer.down_norms,
        basis=layer.basis.contiguous(),
        coeffs=layer.coeffs.contiguous(),
        code=layer.code,
        activation=layer.activation.name,
        arrived=torch.zeros(_MOST_GATED, dtype=torch.int32, device=layer.down.device),
    )
    repacked.norms_for(layer.coeffs.shape[-1])
    return repacked


@dataclass(frozen=True)
class Blocks:
    """Meta-parameters, <kernel>_<parameter> of tuning.toml: warps of a program, and how much it takes on.

    Warps are a power of 2 up to 32.

    screen_parts:     warps that share the coordinates of a block: 1, 2, 4 or 8
    screen_warps:     of a program; each has a block, a part of its coordinates and a strip of channels
    screen_words:     words of 16 codes that a lane loads of a coordinate: 1, 2 or 4
    screen_loads:     coordinates whose codes a warp has under way at a time, a multiple of 8
    screen_ahead:     1 to send what is read of experts to the L2 cache while rotate is at work, else 0; from Hopper on
    screen_registers: of a thread, 0 as many as the compiler likes; fewer let more warps be under way side by side
    score_channels:   of a program: 32 or 64, and 32 or more a warp
    select_chunk:     candidates of a program, a power of 2 from 32 to 1024; more where a token has very many
    select_warps:     fewer where a warp would have less than 32 candidates
    recovery_rows:    channels that a program of the recovery sum takes, a power of 2
    exact_channels:   kept channels that a program takes side by side, a power of 2
    exact_steps:      how many times it does; 0 as often as lets all programs be under way at once
    exact_programs:   that are under way at once on a multiprocessor
    exact_ahead:      tokens whose certain rows are sent to the L2 cache while select is at work; from Hopper on
    finish_columns:   of the output, a power of 2
    """

    rotate_warps: int = 4
    screen_parts: int = 1
    screen_warps: int = 2
    screen_words: int = 4
    screen_loads: int = 40
    screen_ahead: int = 0
    screen_registers: int = 0
    score_channels: int = 32
    score_warps: int = 1
    select_chunk: int = 256
    select_warps: int = 8
    recovery_rows: int = 1024
    exact_channels: int = 4
    exact_steps: int = 0
    exact_programs: int = 2
    exact_warps: int = 8
    exact_ahead: int = 0
    finish_columns: int = 32
    finish_warps: int = 1

    def __post_init__(self) -> None:
        for name in _WARPS:
            if getattr(self, name) not in (1, 2, 4, 8, 16, 32):
                raise UsageError(_said(self, name), "choose a power of 2 up to 32 in the tuning file")
        for name in _POWERS_OF_2:
            if getattr(self, name) < 1 or getattr(self, name).bit_count() != 1:
                raise UsageError(_said(self, name), "choose a power of 2 in the tuning file")
        if self.screen_parts not in (1, 2, 4, 8):
            raise UsageError(f"screen parts = {self.screen_parts}", "choose 1, 2, 4 or 8 in the tuning file")
        if self.screen_words not in (1, 2, 4):
            raise UsageError(f"screen words = {self.screen_words}", "choose 1, 2 or 4 in the tuning file")
        if self.screen_loads < 8 or self.screen_loads % 8:
            raise UsageError(f"screen loads = {self.screen_loads}", "choose a multiple of 8 in the tuning file")
        if self.screen_ahead not in (0, 1):
            raise UsageError(f"screen ahead = {self.screen_ahead}", "choose 0 or 1 in the tuning file")
        if self.screen_registers not in (0, *range(32, 256, 8)):
            raise UsageError(
                f"screen registers = {self.screen_registers}",
                "choose 0, or a multiple of 8 from 32 to 248, in the tuning file",
            )
        if self.exact_steps < 0 or self.exact_programs < 1:
            raise UsageError(
                f"exact steps = {self.exact_steps}, programs = {self.exact_programs}",
                "choose 1 or more programs in the tuning file, and 0 or more steps",
            )
        if self.exact_ahead < 0:
            raise UsageError(f"exact ahead = {self.exact_ahead}", "choose 0 or more tokens in the tuning file")
        if self.score_channels not in (32, 64) or self.score_channels < 32 * self.score_warps:
            raise UsageError(
                f"score channels = {self.score_channels}, warps = {self.score_warps}",
                "choose 32 or 64 channels in the tuning file, and 32 or more a warp",
            )
        if self.select_chunk not in (32, 64, 128, 256, 512, 1024):
            raise UsageError(
                f"select chunk = {self.select_chunk}", "choose a power of 2 from 32 to 1024 in the tuning file"
            )


_PARAMETERS = frozenset(field.name for field in fields(Blocks))
_WARPS = tuple(sorted(name for name in _PARAMETERS if name.endswith("_warps")))
_POWERS_OF_2 = ("recovery_rows", "exact_channels", "finish_columns")  # Triton has no other ranges


def _said(blocks: Blocks, name: str) -> str:
    return f"{name.replace('_', ' ')} = {getattr(blocks, name)}"


def tuned_blocks(device: torch.device, shape: LayerShape, batch: int) -> Blocks:
    """What is known to suit the GPU, the layer and the batch. UsageError for what no kernel has or can run with."""
    name = device_name(device)
    found = {
        f"{kernel}_{parameter}": value
        for kernel in ("rotate", "screen", "score", "select", "recovery", "exact", "finish")
        for parameter, value in configuration(kernel, name, shape, batch).items()
    }
    if unknown := found.keys() - _PARAMETERS:
        what = ", ".join(sorted(unknown)).replace("_", " ")
        raise UsageError(f"{user_file()} has {what}, which this version does not know", "run `mreader tune` again")
    try:
        return Blocks(**found)
    except UsageError as error:  # the shipped file has nothing that they refuse
        raise UsageError(f"{user_file()} has {error.cause}", error.remedy) from error


@dataclass(frozen=True)
class Gate:
    """What makes logits of tokens before their norm: rows . x', x' = norm * x / sqrt(mean of x^2 + epsilon).

    The quotient is rounded to x's dtype, and so is x', which the experts take. Both tensors are read while an earlier
    kernel of the stream may be at work: they are nothing that it writes.

    rows:    (E, H) any float, contiguous
    norm:    (H,) any float, contiguous
    epsilon: of the mean
    """

    rows: Tensor
    norm: Tensor
    epsilon: float


@dataclass(frozen=True)
class Router:
    """How a token's experts follow from its logits, as `mreader.kernels.route.route`.

    logits:      (N, E) any float; with a gate written, and what they hold before does not matter
    routed:      K
    renormalize: whether weights are a softmax over the K, else over all E
    padding:     (N,) bool - tokens that have no experts, whose result is zero; None where all have
    gate:        what makes the logits, of up to 128 tokens before their norm; None where they are there
    """

    logits: Tensor
    routed: int
    renormalize: bool
    padding: Tensor | None = None
    gate: Gate | None = None

    def __post_init__(self) -> None:
        if not 0 < self.routed <= self.logits.shape[1] <= MOST_EXPERTS:
            raise UnsupportedError(
                f"{self.routed} of {self.logits.shape[1]} experts: the kernels choose among {MOST_EXPERTS} at most"
            )


def decode(
    x: Tensor, ids: Tensor, weights: Tensor, layer: DecodeLayer, settings: ReadSettings, blocks: Blocks | None = None
) -> Tensor:
    """y = sum over kept j of w_e * a_j * d_j + U . sum over skipped j of w_e * p_j * b_j, as `mreader.reader.read`.

    x:       (N, H) any float, contiguous
    ids:     (N, K) int - anything outside 0..E-1 contributes nothing
    weights: (N, K) any float
    returns: (N, H) dtype of x

    Estimates are sums of integers, exact within a block but for x' and the FP16 that each is stored as. The same input
    gives the same bits; a token's result depends on its neighbours only by their number, where `blocks`, or the steps
    that follow from it, do: sums in float32 have another order then.
    """
    if len(x) == 0:
        return torch.empty_like(x)
    return Stages(x, ids, weights, layer, settings, blocks or _blocks_for(x, ids, layer)).run()


def decode_share(
    x: Tensor, ids: Tensor, weights: Tensor, layer: DecodeLayer, settings: ReadSettings, blocks: Blocks | None = None
) -> Tensor:
    """`decode` of the experts of one rank among several: a token that has n of its K experts here keeps k n / K.

    ids:     (N, K) int - anything outside 0..E-1 is on another rank
    returns: (N, H) dtype of x - what all ranks return adds up to the token's output
    """
    if len(x) == 0:
        return torch.empty_like(x)
    return Stages(x, ids, weights, layer, settings, blocks or _blocks_for(x, ids, layer), shared=True).run()


def decode_routed(
    x: Tensor, router: Router, layer: DecodeLayer, settings: ReadSettings, blocks: Blocks | None = None
) -> Tensor:
    """`decode` of tokens whose experts are chosen on the way, by the first of the kernels: a launch less.

    x:       (N, H) any float, contiguous
    returns: (N, H) dtype of x
    """
    if len(x) == 0:
        return torch.empty_like(x)
    ids = torch.empty(len(x), router.routed, dtype=torch.int32, device=x.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
    return Stages(x, ids, weights, layer, settings, blocks or _blocks_for(x, ids, layer), router=router).run()


def _blocks_for(x: Tensor, ids: Tensor, layer: DecodeLayer) -> Blocks:
    E, I, H = layer.down.shape
    return tuned_blocks(x.device, LayerShape(E, ids.shape[1], H, I), len(x))


def _steps_at_once(k: int, tokens: int, blocks: Blocks, multiprocessors: int) -> int:
    """The fewest steps with which all groups are under way at once: a few programs more would take a second round."""
    groups = max(multiprocessors * blocks.exact_programs // tokens, 1)
    return max(-(-k // (blocks.exact_channels * groups)), 1)


class Stages:
    """One call of the decode block, stage by stage; `run` for all of them. Tests and benchmarks look between.

    shared: whether `settings.k` is that of a token with all its K experts here; one with n of them keeps k n / K
    router: what `rotate` writes ids (int32) and weights (float32) by; None where they are there
    """

    def __init__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        layer: DecodeLayer,
        settings: ReadSettings,
        blocks: Blocks,
        *,
        shared: bool = False,
        router: Router | None = None,
    ) -> None:
        self.x, self.ids, self.weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        self.layer, self.settings, self.blocks = layer, settings, blocks
        self.shared, self.router = shared, router
        self.experts, self.channels, self.hidden = layer.down.shape
        self.tokens, self.slots = ids.shape
        self.candidates = self.slots * self.channels
        if self.candidates > MOST_CANDIDATES:
            raise UnsupportedError(f"{self.candidates} channels of a token's experts: the kernels count to 65,535")
        if self.tokens * self.slots > _MOST_PROGRAMS:
            raise UnsupportedError(f"{self.tokens} tokens of {self.slots} experts: send fewer at a time")
        if settings.rank > layer.basis.shape[1]:
            raise UsageError(f"rank {settings.rank} asked for, but rank {layer.basis.shape[1]} is stored")
        if router is not None and router.logits.shape != (self.tokens, self.experts):
            raise UsageError(
                f"logits of shape {tuple(router.logits.shape)} for {self.tokens} tokens and {self.experts} experts"
            )
        if router is not None and router.gate is not None:
            self._check_gate(router, router.gate)
        gated = router is not None and router.gate is not None
        self.normed = torch.empty_like(self.x) if gated else self.x
        self.k = min(settings.k, self.candidates)
        self.nb = count_blocks(self.hidden)
        self.strips = triton.cdiv(triton.cdiv(self.channels, TILE), blocks.screen_words)
        self.rank, self.stored_rank = settings.rank, layer.basis.shape[1]
        self.norms = layer.norms_for(self.rank)
        self.rank_up = triton.next_power_of_2(max(self.rank, 1))
        self.chunk = max(blocks.select_chunk, triton.next_power_of_2(triton.cdiv(self.candidates, _MOST_CHUNKS)))
        self.chunks = triton.cdiv(self.candidates, self.chunk)
        self.steps = blocks.exact_steps or _steps_at_once(self.k, self.tokens, blocks, multiprocessors(x.device))
        group = blocks.exact_channels * self.steps
        self.groups = max(triton.cdiv(self.k, group), 1)
        self.piece = min(blocks.recovery_rows, triton.next_power_of_2(self.channels))
        self.pieces = triton.cdiv(self.channels, self.piece)
        self.dependent = has_dependent_launch(x.device)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=x.device)

        N, K, I = self.tokens, self.slots, self.channels
        self.picked = empty(N, self.nb, 128, dtype=torch.int32)
        self.block_info = empty(N, 3, self.nb)
        self.histogram = empty(N, _HISTOGRAM["COARSE"] + _HISTOGRAM["FINE"], dtype=torch.int32)
        tiles = self.strips * blocks.screen_words  # the last ones are no tiles where strips are not full
        self.sums = empty(N, K, self.nb, blocks.screen_parts, tiles, 2, TILE, dtype=torch.float16)
        self.keys = empty(N, K, I, dtype=torch.int32)
        self.estimates = empty(N, K, I)
        # A multiple of 16, which launches tell the compiler: else it loads entries one by one.
        self.rows = empty(N, 16 * triton.cdiv(self.groups * group, 16), dtype=torch.int64)
        self.recovery = empty(N, K * self.pieces, self.rank_up)
        self.outputs = empty(N, self.groups, self.hidden)
        self.y = empty(N, self.hidden, dtype=x.dtype)

    def _check_gate(self, router: Router, gate: Gate) -> None:
        shapes = (tuple(gate.rows.shape), tuple(gate.norm.shape))
        if shapes != ((self.experts, self.hidden), (self.hidden,)) or self.tokens > len(self.layer.arrived):
            raise UsageError(
                f"a gate of shape {shapes[0]} and a norm of {shapes[1]} for {self.tokens} tokens of {self.hidden} "
                f"numbers and {self.experts} experts, up to {len(self.layer.arrived)} tokens"
            )
        if not all(tensor.is_contiguous() for tensor in (router.logits, gate.rows, gate.norm)):
            raise UsageError("logits, a gate or a norm that are not contiguous")

    def run(self) -> Tensor:
        """All stages; y (N, H)."""
        for stage in (self.rotate, self.screen, self.score, self.select, self.exact, self.finish):
            stage()
        return self.y

    def rotate(self) -> None:
        """picked, block_info; clears the histogram and the list. With a router ids and weights, with a gate normed."""
        errors_known, router = self.settings.score == "rho", self.router
        logits = padding = rows = norm = None
        programs, rows_at_once, epsilon = 0, 1, 0.0
        if router is not None:
            logits, padding, programs = router.logits.contiguous(), router.padding, 1
        if router is not None and router.gate is not None:
            rows, norm, epsilon = router.gate.rows, router.gate.norm, router.gate.epsilon
            rows_at_once = max(_GATE_NUMBERS // triton.next_power_of_2(self.hidden), 1)
            programs = triton.cdiv(self.experts, rows_at_once)
        self._launch(
            rotate_kernel,
            (programs + self.nb, self.tokens),
            self.blocks.rotate_warps,
            *(self.x, self.layer.signs, self.picked, self.block_info, self.histogram, self.rows),
            *(logits, rows, norm, self.normed, self.layer.arrived, self.ids, self.weights, padding),
            *(epsilon, self.rows.shape[1], self.slots, -1),
            hidden=self.hidden,
            COORDINATES=self.settings.coordinates,
            NOISE_READ=1.0 if errors_known else self.layer.code.noise_read,
            NOISE_UNREAD=1.0 if errors_known else self.layer.code.noise_unread,
            HISTOGRAM=self.histogram.shape[1],
            nb=self.nb,
            EXPERTS=self.experts,
            RENORMALIZE=router is not None and router.renormalize,
            ROUTERS=programs,
            ROWS=rows_at_once,
        )

    def screen(self) -> None:
        """sums."""
        parts, code, layer = self.blocks.screen_parts, self.layer.code, self.layer
        self._launch(
            screen_kernel,
            (triton.cdiv(self.nb * parts * self.strips, self.blocks.screen_warps), self.tokens * self.slots),
            self.blocks.screen_warps,
            *(layer.tiles.codes, self.picked, self.block_info, self.ids),
            *(layer.tiles.scales, layer.tiles.errors, self.norms, layer.coeffs, self.sums),
            *(self.experts, self.slots, 0, -1),
            channels=self.channels,
            nb=self.nb,
            stored_rank=self.stored_rank,
            ZERO=code.levels[0] / (code.levels[0] - code.levels[1]),
            SHARE=8 * triton.cdiv(triton.cdiv(self.settings.coordinates, parts), 8),
            PARTS=parts,
            WORDS=self.blocks.screen_words,
            STRIPS=self.strips,
            LOADED=self.blocks.screen_loads,
            EAGER=self.blocks.screen_registers > 0,  # few registers do not hold what is under way
            SCORE=self.settings.score,
            RANK=self.rank,
            ROUTED=self.router is not None,
            AHEAD=self.blocks.screen_ahead if self.dependent else 0,
            WARPS=self.blocks.screen_warps,
            **limited_registers(self.blocks.screen_registers),
        )

    def score(self) -> None:
        """keys, estimates, histogram."""
        layer, tiles = self.layer, self.layer.tiles
        self._launch(
            score_kernel,
            (triton.cdiv(self.channels, self.blocks.score_channels), self.slots, self.tokens),
            self.blocks.score_warps,
            *(self.sums, tiles.scales, tiles.errors, self.block_info, self.ids, self.weights),
            *(self.norms, self.keys, self.estimates, self.histogram),
            *(self.experts, -1),
            channels=self.channels,
            nb=self.nb,
            PARTS=self.blocks.screen_parts,
            TILES=self.sums.shape[4],
            SCORE=self.settings.score,
            ACTIVATION=activation_kind(layer.activation),
            CHANNELS=self.blocks.score_channels,
            **full_registers(self.dependent),
            **_HISTOGRAM,
        )

    def select(self) -> None:
        """rows; zeros in estimates."""
        warps = min(self.blocks.select_warps, self.chunk // 32)
        self._launch(
            select_kernel,
            (self.chunks, self.tokens),
            warps,
            *(self.keys, self.histogram, self.ids, self.weights, self.rows, self.estimates),
            *(self.experts, self.slots, self.k, self.rows.shape[1], -1),
            channels=self.channels,
            CHUNK=self.chunk,
            AT_ONCE=min(4 * triton.cdiv(self.candidates, 4 * 32 * warps), _MOST_KEYS),
            SHARED=self.shared,
            SLOTS_UP=triton.next_power_of_2(self.slots),
            WARPS=warps,
            **_HISTOGRAM,
        )

    def exact(self) -> None:
        """outputs, recovery."""
        layer = self.layer
        self._launch(
            exact_kernel,
            (self.groups + (self.slots * self.pieces if self.rank else 0), self.tokens),
            self.blocks.exact_warps,
            *(self.normed, self.keys, self.histogram, self.rows, self.ids, self.estimates),
            *(layer.gate_up, layer.down, layer.coeffs),
            *(self.outputs, self.recovery),
            *(self.experts, self.slots, self.k, self.groups, self.steps, self.rows.shape[1], self.stored_rank),
            hidden=self.hidden,
            channels=self.channels,
            SHARED=self.shared,
            SLOTS_UP=triton.next_power_of_2(self.slots),
            ACTIVATION=activation_kind(layer.activation),
            RANK=self.rank,
            RANK_UP=self.rank_up,
            HIDDEN_UP=triton.next_power_of_2(self.hidden),
            CHANNELS=self.blocks.exact_channels,
            PIECE=self.piece,
            PIECES=self.pieces,
            AHEAD=min(self.blocks.exact_ahead, self.tokens) if self.dependent else 0,
            COARSE_SHIFT=_HISTOGRAM["COARSE_SHIFT"],
            COARSE=_HISTOGRAM["COARSE"],
            HISTOGRAM=self.histogram.shape[1],
            WARPS=self.blocks.exact_warps,
        )

    def finish(self) -> None:
        """y."""
        self._launch(
            finish_kernel,
            (triton.cdiv(self.hidden, self.blocks.finish_columns), self.tokens),
            self.blocks.finish_warps,
            *(self.outputs, self.recovery, self.layer.basis, self.y),
            self.stored_rank,
            hidden=self.hidden,
            groups=self.groups,
            GROUPS=min(32 * triton.cdiv(self.groups, 32), _MOST_GROUPS),
            RANK=self.rank,
            RANK_UP=self.rank_up,
            PIECES=self.slots * self.pieces,
            COLUMNS=self.blocks.finish_columns,
            **full_registers(self.dependent),
        )

    def _launch(self, kernel: Any, grid: tuple[int, ...], warps: int, *arguments: Any, **constants: Any) -> None:
        launch: Callable[..., Any] = kernel[grid]
        launch(*arguments, **constants, **launch_options(self.dependent), num_warps=warps)
