"""All channels of a token's experts, on a GPU: grouped matrix products straight from the augmented layout.

y_n = sum over slots s of w_ns * sum_j phi(g_j . x_n) * (v_j . x_n) * d_j
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert
# P = N * K slots; a block is up to m slots that name the same expert

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from mreader.activations import Activation
from mreader.kernels.activation_kernel import activation_kind
from mreader.kernels.dense_kernel import combine_kernel, down_kernel, gate_up_kernel, plan_kernel
from mreader.kernels.intrinsics import has_dependent_launch, launch_options
from mreader.kernels.screen import tokens_by_expert
from mreader.kernels.tuning import LayerShape, configuration, device_name

FEW_SLOTS = 64  # up to so many slots a program finds its block by itself, which is faster than one more launch
_LARGEST_DECODE_BATCH = 128
_PLAN_CHUNK = 4096  # slots that a program of the plan reads at a time
_MOST_TOKENS = 16384  # at a time: K = 8 intermediate rows of each, with H = 2048, fill half a GB


@dataclass(frozen=True)
class Tile:
    """Meta-parameters of one matrix product.

    n, k:   columns of the product, and terms that a step of the loop adds
    warps:  of a program
    stages: of the software pipeline
    """

    n: int
    k: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        """What a launch takes of it."""
        return {"BLOCK_N": self.n, "BLOCK_K": self.k, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Blocks:
    """Meta-parameters of a call.

    m:             slots of a block
    gate_up, down: the two products
    splits:        programs that share the channels of a tile of the second one; their sums are added in order
    ahead:         steps of the second one whose weights are fetched into the L2 cache while the first one ends; 0 or a
                   power of two
    """

    m: int
    gate_up: Tile
    down: Tile
    splits: int = 1
    ahead: int = 0

    def shared_bytes(self, element_size: int) -> int:
        """Shared memory of a program, at most: the operands of every stage."""
        gate_up = self.gate_up.stages * self.gate_up.k * (self.m + 2 * self.gate_up.n)
        down = self.down.stages * self.down.k * (self.m + self.down.n)
        return max(gate_up, down) * element_size


@dataclass(frozen=True)
class Plan:
    """Which slots are computed together.

    order:  (P,) int32 - slots, expert by expert, those that no expert serves left out; None: programs find their block
    blocks: (3, count) int32 - a block's expert (-1: idle), its first position in `order`, the one behind the expert's
            last; None likewise
    count:  blocks, idle ones included
    """

    order: Tensor | None
    blocks: Tensor | None
    count: int


def dense(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    blocks: Blocks | None = None,
) -> Tensor:
    """y_n = sum over slots s of w_ns * sum_j a_j * d_j, a_j = phi(g_j . x_n) * (v_j . x_n) rounded to x's dtype.

    x:          (N, H) dtype of the weights
    ids:        (N, K) int - anything outside 0..E-1 contributes nothing
    weights:    (N, K) any float
    gate_up:    (E, 2, I, H) BF16, FP16 or FP32, contiguous - gate first
    down:       (E, I, H) the same dtype, contiguous - transposed: a channel's down weights are one row
    activation: a name of mreader.activations
    returns:    (N, H) dtype of x

    Sums are float32, in a fixed order: the same input gives the same bits. A token's result depends on its neighbours
    only by their number, which picks `blocks`, and beyond FEW_SLOTS slots has a slot's output rounded to x's dtype
    before the sum over slots. Nothing is asked of the device, so a CUDA graph can hold a call.

    Raises UnsupportedError for an activation that has no GPU kernel.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    if len(x) > _MOST_TOKENS:
        pieces = [slice(start, start + _MOST_TOKENS) for start in range(0, len(x), _MOST_TOKENS)]
        return torch.cat([dense(x[p], ids[p], weights[p], gate_up, down, activation, blocks) for p in pieces])
    (N, H), K, (E, I, _) = x.shape, ids.shape[1], down.shape
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    blocks = blocks or _tuned(_blocks(N * K, E, x.element_size()), x, LayerShape(E, K, H, I))
    P, splits = N * K, blocks.splits
    few = P <= FEW_SLOTS
    a, y = x.new_empty(P, I), torch.empty_like(x)
    # Few rows cost nothing in float32; many are traffic, and are rounded as stock implementations round them.
    rows = torch.empty((P, splits, H), dtype=torch.float32 if few else x.dtype, device=x.device)

    launch = _Launcher(x.device)
    plan = Plan(None, None, P) if few else _plan(launch, ids, E, blocks.m)
    place = (ids, plan.order, plan.blocks, P, plan.count)
    shape = {"E": E, "H": H, "I": I, "SLOTS": triton.next_power_of_2(P) if few else 1, "BLOCK_M": blocks.m}
    launch(
        gate_up_kernel,
        plan.count * triton.cdiv(I, blocks.gate_up.n),
        *(x, gate_up, a, *place),
        **shape,
        **blocks.gate_up.constants(),
        K=K,
        ACTIVATION=activation_kind(activation),
    )
    launch(
        down_kernel,
        plan.count * splits * triton.cdiv(H, blocks.down.n),
        *(a, down, weights, rows, *place),
        **shape,
        **blocks.down.constants(),
        SPLITS=splits,
        AHEAD=blocks.ahead,
        SECTOR=32 // down.element_size(),
    )
    columns, warps = (128, 1) if few else (512, 2)
    launch(
        combine_kernel,
        N * triton.cdiv(H, columns),
        *(rows, ids, y),
        **{"E": E, "K": K, "H": H, "SPLITS": splits, "TERMS_UP": triton.next_power_of_2(K * splits)},
        **{"BLOCK_N": columns, "num_warps": warps},
    )
    return y


@torch.no_grad()
def dense_reference(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """`dense` in plain torch, in float32 or the wider dtype of x: one expert after the other."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros_like(x, dtype=wide)
    for expert, tokens, slots in tokens_by_expert(ids, down.shape[0]):
        gate, up = x[tokens].to(wide) @ gate_up[expert].to(wide).mT
        a = (activation.function(gate) * up).to(x.dtype).to(wide)
        y.index_add_(0, tokens, weights[tokens, slots].to(wide).unsqueeze(-1) * (a @ down[expert].to(wide)))
    return y.to(x.dtype)


class _Launcher:
    """Starts kernels one after the other, each as soon as the one before leaves room where the GPU can do that."""

    def __init__(self, device: torch.device) -> None:
        self.dependent = has_dependent_launch(device)

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        start: Callable[..., Any] = kernel[(programs,)]
        start(*arguments, **constants, **launch_options(self.dependent))


def _plan(launch: _Launcher, ids: Tensor, experts: int, m: int) -> Plan:
    """The slots of ids (N, K) sorted by expert, and cut into blocks of up to m."""
    slots = ids.numel()
    # Enough for any ids, since each expert leaves at most one block partly filled.
    count = slots // m + experts
    order = torch.empty(slots, dtype=torch.int32, device=ids.device)
    blocks = torch.empty((3, count), dtype=torch.int32, device=ids.device)
    chunk = min(triton.next_power_of_2(slots), _PLAN_CHUNK)
    warps = 8 if chunk > 1024 else 4
    launch(plan_kernel, experts, ids, order, blocks, slots, count, E=experts, BLOCK_M=m, CHUNK=chunk, num_warps=warps)
    return Plan(order, blocks, count)


def _tuned(blocks: Blocks, x: Tensor, shape: LayerShape) -> Blocks:
    """`blocks`, and over it what tuning.toml says for decode steps in 16 bits; prefill and float32 keep to the rule."""
    if len(x) > _LARGEST_DECODE_BATCH or x.element_size() != 2:
        return blocks

    def found(kernel: str) -> dict[str, int]:
        return configuration(kernel, device_name(x.device), shape, len(x))

    gate_up, down = replace(blocks.gate_up, **found("dense_gate_up")), replace(blocks.down, **found("dense_down"))
    return replace(blocks, gate_up=gate_up, down=down, **found("dense"))


def _blocks(slots: int, experts: int, element_size: int) -> Blocks:
    """Meta-parameters that suit a Hopper GPU, with no more than 96 KiB of shared memory, so that they run on others.

    slots: P, of which an expert gets P / E on average; the number that it does get varies about that
    """
    wide = 2 if element_size <= 2 else 1
    average = slots / experts
    if average <= 9:
        # Weights are a stream past a few tokens: many programs, deep pipelines.
        gate_up = Tile(32, 64 * wide, 4, 4)
        return Blocks(16, gate_up, Tile(128, 32 * wide, 4, 4), splits=2 if slots <= 16 else 1)
    if average <= 20:
        return Blocks(32, Tile(64, 32 * wide, 4, 4), Tile(128, 32 * wide, 4, 4))
    if average <= 48:
        return Blocks(64, Tile(64, 32 * wide, 4, 4), Tile(128, 32 * wide, 4, 4))
    return Blocks(128, Tile(64, 32 * wide, 8, 3), Tile(128, 32 * wide, 8, 3))
