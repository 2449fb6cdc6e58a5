"""The model under test: a source checkpoint, sketched in memory layer by layer, or an augmented one."""

# E experts, H hidden size, I channels of an expert

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from mreader.activations import get_activation
from mreader.augment import LayerAugmenter, experts_side_by_side
from mreader.backend import layout_on
from mreader.budget import BlockShape
from mreader.device import pick_device
from mreader.errors import SourceError, UnsupportedError, UsageError
from mreader.experts import stored_weights
from mreader.formats.architectures import Architecture, Matrix, RoutedLayer, find_architecture
from mreader.formats.augmented import DEFAULT_OPTIONS, FormatOptions, is_augmented, open_augmented
from mreader.formats.checkpoint import open_checkpoint
from mreader.formats.tensors import TORCH_DTYPES
from mreader.progress import Progress
from mreader.reader import ExpertLayer
from mreader.runtime import auto_class, experts_modules, load, runtime_of
from mreader.selectors.layers import Batch, Layer

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A dense model and, for each of its routed layers in order, the module to replace and what selectors need."""

    model: PreTrainedModel
    modules: list[Any] = field(repr=False)
    layers: list[Layer] = field(repr=False)

    @property
    def shape(self) -> BlockShape:
        return self.layers[0].shape

    @contextmanager
    def experts(self, forwards: list[Forward]) -> Iterator[None]:
        """Within the block, the routed experts of each layer are computed by these."""
        for module, forward in zip(self.modules, forwards, strict=True):
            module.forward = forward
        try:
            yield
        finally:
            for module in self.modules:
                del module.forward

    def logits(self, ids: Tensor) -> Tensor:
        """(N, T, V) of windows (N, T), nothing cached."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    def calibrated(self, windows: Tensor) -> Subject:
        """The same, with the tokens at the input of every layer of the dense model: those of all windows (N, T)."""
        batches: list[Batch] = []
        self._note_inputs(windows, batches)
        layers = [replace(layer, calibration=batch) for layer, batch in zip(self.layers, batches, strict=True)]
        return replace(self, layers=layers)

    def _note_inputs(self, windows: Tensor, seen: list[Batch]) -> None:
        """Run the dense model, and note what each routed layer gets."""
        handles = [module.register_forward_pre_hook(_noting(seen), with_kwargs=True) for module in self.modules]
        try:
            self.model.base_model(input_ids=windows.to(self.model.device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()


def _noting(seen: list[Batch]) -> Callable[..., None]:
    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, ids, weights = (*args, *kwargs.values())
        seen.append(Batch(x.float(), ids, weights.float()))

    return note


def open_subject(
    path: Path, dtype: str, device: str, options: FormatOptions | None = None, progress: Progress | None = None
) -> Subject:
    """The model in a folder. Raises what opening a source or an augmented checkpoint raises.

    options: how a source is sketched, None as a conversion does by default; for an augmented one it has to be None
    """
    progress = progress or Progress()
    _refuse_unknown(
        open_augmented(path).architecture if is_augmented(path) else find_architecture(open_checkpoint(path))
    )
    if is_augmented(path):
        if options is not None:
            raise UsageError(
                f"{path} has a sketch already",
                "name the source for other codes, or for a recovery map of a higher rank",
            )
        return _of_augmented(load(path, dtype=dtype, device=device))
    options = options or DEFAULT_OPTIONS
    architecture = find_architecture(open_checkpoint(path))
    model = auto_class(path).from_pretrained(path, dtype=dtype).to(pick_device(device)).eval()
    first = architecture.layers[0]
    shape = BlockShape(
        first.hidden,
        first.channels,
        architecture.routed,
        options.rank,
        options.code,
        TORCH_DTYPES[first.dtype].itemsize,
        layout_on(model.device),
    )
    modules = [module for _, module in experts_modules(model)]
    if len(modules) != len(architecture.layers):
        raise SourceError(
            f"{type(model).__name__} has {len(modules)} layers of routed experts, the weights "
            f"{len(architecture.layers)}",
            "load the checkpoint's own model class",
        )
    progress.begin("sketching", len(modules), "layers")
    layers = []
    for ordinal, module in enumerate(modules):
        layers.append(Layer(_sketch(module, ordinal, architecture.activation, options), shape))
        progress.advance(1)
    return Subject(model, modules, layers)


def _refuse_unknown(architecture: Architecture) -> None:
    """UnsupportedError for experts whose channels are not phi(g . x) * (v . x), which is all that selectors know."""
    if architecture.layers[0].is_biased or not get_activation(architecture.activation).is_linear_in_up:
        raise UnsupportedError(
            f"selectors do not know the biases or the activation of {architecture.model_type}'s experts",
            "`mreader eval` without --selector measures the reader",
        )


def _of_augmented(model: PreTrainedModel) -> Subject:
    runtime, modules = runtime_of(model), [module for _, module in experts_modules(model)]
    layers = [
        Layer(
            _expert_layer(module, module.sketch.on(model.device), module.mreader_activation.name, runtime.stored.code),
            runtime.shape,
        )
        for module in modules
    ]
    return Subject(model, modules, layers)


def _sketch(module: Any, ordinal: int, activation: str, options: FormatOptions) -> ExpertLayer:
    """What a conversion would compute from the module's weights."""
    gate_up, down = stored_weights(module)
    E, _, I, H = gate_up.shape
    layer = RoutedLayer(
        number=ordinal,
        ordinal=ordinal,
        prefix="",
        experts=E,
        channels=I,
        hidden=H,
        dtype="",
        gate=tuple(Matrix("gate_up", expert, 0, I) for expert in range(E)),
        up=tuple(Matrix("gate_up", expert, I, 2 * I) for expert in range(E)),
        down=tuple(Matrix("down", expert) for expert in range(E)),
    )
    tensors = {"gate_up": gate_up.detach().flatten(1, 2), "down": down.detach().mT}
    device = module.down_proj.device
    with experts_side_by_side(device) as pool:
        augmenter = LayerAugmenter(layer, tensors, options, device, pool)
        parts = {name: part.to(device) for name, part in {**augmenter.sketch, **augmenter.recovery}.items()}
    return _expert_layer(module, parts, activation, options.code)


def _expert_layer(module: Any, parts: Mapping[str, Tensor], activation: str, code: Any) -> ExpertLayer:
    gate_up, down = (weights.detach() for weights in stored_weights(module))
    return ExpertLayer.of(gate_up, down, parts, code, get_activation(activation))
