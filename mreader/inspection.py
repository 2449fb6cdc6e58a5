"""What an augmented checkpoint holds: shapes, bytes by kind, how good sketch and recovery map are, what a budget buys.

E experts, K routed experts of a token, I channels of an expert, H hidden size, r rank.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mreader.budget import BlockShape, channels_to_k, count_reads
from mreader.formats.architectures import RoutedLayer
from mreader.formats.augmented import Augmented, layer_tensors, open_augmented
from mreader.formats.codes import BLOCK, Code
from mreader.formats.coding import unpack, values
from mreader.progress import Progress

# (channels f, coordinates), from the smallest reads to the largest: the three budgets of the published results (full
# screening with the largest) and, between them, the largest number of channels with partial screening.
_BUDGETS = ((0.0725, 80), (0.122, 80), (0.2, 80), (0.2, BLOCK))
_KINDS = {
    "native": ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
    "sketch": ("sketch_codes", "sketch_scales", "sketch_errors", "sketch_signs"),
    "norms": ("down_norms",),
    "recovery": ("recovery_basis", "recovery_coeffs"),
}


@dataclass(frozen=True)
class LayerQuality:
    """One layer's sketch and recovery map.

    energy:        sum over channels of ||b_j||^2 / ||d_j||^2: the share of the down weights' energy that U keeps
    sketch_error:  mean squared error of the sketch over mean squared weight
    """

    number: int
    energy: float
    sketch_error: float


@dataclass(frozen=True)
class BudgetLine:
    """What a budget buys; reads are fractions of the dense reads of the routed experts."""

    channels: float
    coordinates: int
    score: str
    k: int
    candidates: int
    sketch: float
    exact: float
    recovery: float
    reads: float
    bytes_per_token: int


@dataclass(frozen=True)
class Inspection:
    """All that `mreader inspect` shows."""

    model_type: str
    options: dict[str, Any]
    layers: int
    experts: int
    routed: int
    channels: int
    hidden: int
    dtype: str
    bytes: dict[str, int]
    added: float
    energy: float
    sketch_error: float
    quality: list[LayerQuality]
    budgets: list[BudgetLine]


def inspect_checkpoint(path: str | Path, *, progress: Progress | None = None) -> Inspection:
    """Inspect the augmented checkpoint in `path`; reads its sketch and its recovery maps, not its native weights."""
    progress = progress or Progress()
    augmented = open_augmented(Path(path))
    layers = augmented.architecture.layers
    sizes = _bytes_by_kind(augmented)
    progress.begin("inspecting", sizes["sketch"] + sizes["norms"] + sizes["recovery"])
    quality = [_quality(augmented, layer, progress) for layer in layers]
    first = layers[0]
    added = sizes["sketch"] + sizes["norms"] + sizes["recovery"]
    return Inspection(
        augmented.architecture.model_type,
        augmented.options.config_entry(),
        len(layers),
        first.experts,
        augmented.architecture.routed,
        first.channels,
        first.hidden,
        first.dtype,
        sizes,
        added / (sizes["native"] + sizes["other"]),
        sum(q.energy for q in quality) / len(quality),
        sum(q.sketch_error for q in quality) / len(quality),
        quality,
        budget_lines(augmented),
    )


def block_shape(augmented: Augmented) -> BlockShape:
    """A routed layer as a token sees it, in the layout on disk."""
    layer, options = augmented.architecture.layers[0], augmented.options
    element_size = layer_tensors(layer, options)["down_proj"].alignment
    routed = augmented.architecture.routed
    return BlockShape(
        layer.hidden, layer.channels, routed, options.rank, options.code, element_size, biased=layer.is_biased
    )


def budget_lines(augmented: Augmented) -> list[BudgetLine]:
    """The known budgets and the checkpoint's own default."""
    shape, options = block_shape(augmented), augmented.options
    budgets = dict.fromkeys([*_BUDGETS, (options.channels, options.coordinates)])
    layers = len(augmented.architecture.layers)
    lines = []
    for channels, coordinates in sorted(budgets):
        k = channels_to_k(shape, channels)
        reads = count_reads(shape, k, coordinates, options.score, options.rank)
        lines.append(
            BudgetLine(
                channels, coordinates, options.score, k, shape.candidates,
                reads.sketch, reads.exact, reads.recovery, reads.total, reads.bytes * layers,
            )
        )  # fmt: skip
    return lines


def _bytes_by_kind(augmented: Augmented) -> dict[str, int]:
    specs = [layer_tensors(layer, augmented.options) for layer in augmented.architecture.layers]
    sizes = {
        kind: sum(layer[part].nbytes for layer in specs for part in parts if part in layer)
        for kind, parts in _KINDS.items()
    }
    total = sum(spec.nbytes for spec in augmented.checkpoint.tensors.values())
    return {**sizes, "other": total - sum(sizes.values())}


def _quality(augmented: Augmented, layer: RoutedLayer, progress: Progress) -> LayerQuality:
    with augmented.tensors() as tensors:
        stored = augmented.layer(layer, tensors)
        kept = float(stored["recovery_coeffs"].float().square().sum())
        energy = float(stored["down_norms"].float().square().sum())
        error, weight = 0.0, 0.0
        for codes, scales, errors in zip(
            stored["sketch_codes"], stored["sketch_scales"], stored["sketch_errors"], strict=True
        ):
            error += float(errors.double().mean())
            weight += float(_mean_square(codes, scales, errors, augmented.options.code, layer.channels))
    progress.advance(sum(t.nbytes for part, t in stored.items() if part not in _KINDS["native"]))
    # A layer of zeros, or of weights below FP16's least number, loses nothing
    return LayerQuality(layer.number, kept / energy if energy else 1.0, error / weight if weight else 0.0)


def _mean_square(codes: Tensor, scales: Tensor, errors: Tensor, code: Code, channels: int) -> Tensor:
    """Mean of rho + s^2 mean(c^2): the mean squared weight, as s is the least-squares scale of its codes."""
    levels = values(unpack(codes, code, channels), code).view(2, -1, BLOCK, channels)
    squares = levels.square().mean(dim=2).double()
    return torch.mean(errors.double() + scales.double().square() * squares)
