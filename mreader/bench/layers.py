"""Layers to measure, on the GPU: random ones with a true sketch of their weights, or those of a checkpoint."""

# E experts, K routed experts of a token, H hidden size, I channels of an expert, r rank, N tokens

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.activations import get_activation
from mreader.bench.target import Target
from mreader.errors import UsageError
from mreader.formats.augmented import FormatOptions, open_augmented
from mreader.kernels.tuning import LayerShape
from mreader.progress import Progress
from mreader.reader import ExpertLayer
from mreader.sketch import draw_signs, sketch_matrices

STD = 0.02  # of random weights
# Enough of them that a replay reads several times what the L2 cache holds before it comes to a layer again
_LAYERS, _FEWEST, _ROUTINGS = 6, 4, 4
# Of a layer's native bytes: its sketch, twice while it is repacked, and the contiguous down weights of the peers
_MEMORY = 1.8


@dataclass(frozen=True)
class Call:
    """One call of a block.

    layer:   number of the layer among those measured
    x:       (N, H) - tokens
    ids:     (N, K) int64 - distinct random experts of each token
    weights: (N, K) dtype of x - routing weights, which add up to 1
    """

    layer: int
    x: Tensor
    ids: Tensor
    weights: Tensor


def make_layers(target: Target, device: torch.device, progress: Progress) -> list[ExpertLayer]:
    """As many layers as a measurement takes turns with. UsageError where they do not fit the device's memory."""
    count = count_layers(target, torch.cuda.mem_get_info(device)[0])
    progress.begin("layers", count, "layers")
    make = _draw_layers if target.folder is None else _load_layers
    layers = []
    for layer in make(target, count, device):
        layers.append(layer)
        progress.advance(1)
    return layers


def augment_layer(gate_up: Tensor, down: Tensor, activation: str, options: FormatOptions, ordinal: int) -> ExpertLayer:
    """The layer of random native weights, with a true sketch of them.

    The recovery map is a random orthonormal U with b_j = U^T d_j: random weights have no direction that holds more of
    their energy than another, so singular vectors would be no better, and take minutes.

    gate_up: (E, 2, I, H), down: (E, I, H) - on any one device; not copied
    ordinal: the layer's number, which seeds its signs and its U
    """
    E, _, I, H = gate_up.shape
    device = gate_up.device
    signs = draw_signs(H, options.seed, ordinal).to(device)
    sketch = sketch_matrices(list(gate_up.flatten(0, 1)), signs, options.code)
    generator = torch.Generator().manual_seed(ordinal)
    basis = torch.linalg.qr(torch.randn(H, options.rank, generator=generator)).Q.to(device)
    coeffs = torch.stack([rows.float() @ basis for rows in down])
    return ExpertLayer(
        gate_up=gate_up,
        down=down,
        codes=sketch.codes.view(E, 2, *sketch.codes.shape[1:]),
        scales=sketch.scales.view(E, 2, -1, I),
        errors=sketch.errors.view(E, 2, -1, I),
        signs=signs,
        down_norms=torch.linalg.vector_norm(down, dim=-1, dtype=torch.float32).half(),
        basis=basis.half(),
        coeffs=coeffs.half(),
        code=options.code,
        activation=get_activation(activation),
    )


def draw_layer(
    shape: LayerShape, activation: str, options: FormatOptions, ordinal: int, device: torch.device
) -> ExpertLayer:
    """The layer of normal weights in BF16 that `ordinal` seeds, with a true sketch of them: see `augment_layer`."""
    generator = torch.Generator(device).manual_seed(ordinal)
    sizes = ((shape.experts, 2, shape.channels, shape.hidden), (shape.experts, shape.channels, shape.hidden))
    gate_up, down = (
        torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, STD, generator=generator) for size in sizes
    )
    return augment_layer(gate_up, down, activation, options, ordinal)


def stored_parts(layer: ExpertLayer) -> dict[str, Tensor]:
    """The tensors of a layer without biases by their names in the format: what `ExpertLayer.of` takes."""
    return {
        "gate_up_proj": layer.gate_up,
        "down_proj": layer.down,
        "sketch_codes": layer.codes,
        "sketch_scales": layer.scales,
        "sketch_errors": layer.errors,
        "sketch_signs": layer.signs,
        "down_norms": layer.down_norms,
        "recovery_basis": layer.basis,
        "recovery_coeffs": layer.coeffs,
    }


def draw_calls(shape: LayerShape, batch: int, layers: int, like: Tensor) -> list[Call]:
    """The calls of one replay: every layer once a routing, each with tokens and a routing of its own.

    like: a tensor on the device, in the dtype of the tokens
    """
    calls = []
    for number in range(layers * _ROUTINGS):
        generator = torch.Generator(like.device).manual_seed(number)
        x = like.new_empty(batch, shape.hidden).normal_(generator=generator)
        logits = torch.rand(batch, shape.experts, generator=generator, device=like.device)
        top = logits.topk(shape.routed, dim=-1)
        calls.append(Call(number % layers, x, top.indices, (top.values * 4).softmax(-1).to(like.dtype)))
    return calls


def count_layers(target: Target, free: int) -> int:
    """How many layers fit `free` bytes, up to what is wanted. UsageError where they are too few to be measured."""
    wanted = min(target.layers, _LAYERS)
    fitting = int(0.9 * free / (_MEMORY * target.native_bytes))
    least = min(wanted, _FEWEST)
    if fitting < least:
        need = least * _MEMORY * target.native_bytes / 0.9 / 1e9
        raise UsageError(
            f"{free / 1e9:.1f} GB of GPU memory are free, and {least} layers of {target.name} take {need:.1f} GB",
            "choose a smaller shape, or end what else uses the GPU",
        )
    return min(wanted, fitting)


def _draw_layers(target: Target, count: int, device: torch.device) -> Iterator[ExpertLayer]:
    for ordinal in range(count):
        yield draw_layer(target.layer, target.activation, target.options, ordinal, device)


def _load_layers(target: Target, count: int, device: torch.device) -> Iterator[ExpertLayer]:
    assert target.folder is not None
    augmented = open_augmented(target.folder)
    activation = get_activation(target.activation)
    with augmented.tensors() as tensors:
        for layer in augmented.architecture.layers[:count]:
            stored = {part: tensor.to(device) for part, tensor in augmented.layer(layer, tensors).items()}
            yield ExpertLayer.of(stored["gate_up_proj"], stored["down_proj"], stored, target.options.code, activation)
