"""The model under test: a source checkpoint, sketched in memory layer by layer, or an augmented one."""

# N windows, T tokens of a window, V vocabulary

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from mreader.activations import get_activation
from mreader.backend import layout_on
from mreader.budget import BlockShape
from mreader.device import pick_device
from mreader.errors import SourceError, UnsupportedError
from mreader.experts import stored_weights
from mreader.formats.architectures import Architecture, find_architecture
from mreader.formats.augmented import is_augmented, open_augmented
from mreader.formats.checkpoint import open_checkpoint
from mreader.formats.tensors import TORCH_DTYPES
from mreader.runtime import auto_class, experts_modules, load, reader_mode, runtime_of, text_part
from mreader.selectors.kept import Kept
from mreader.selectors.layers import Batch, Layer
from mreader.selectors.sketching import Native, Sketching

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Texts:
    """What selectors are run on, and calibrated on: windows (N, T) int64 each; None for no calibration."""

    evaluated: Tensor
    calibration: Tensor | None = None


def windows_sha256(windows: Tensor) -> str:
    """Of the token ids; it knows nothing of the shape."""
    return hashlib.sha256(windows.cpu().contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Subject:
    """A dense model and, for each of its routed layers in order, the module to replace and what selectors need.

    kept: what follows from weights or windows alone
    """

    model: PreTrainedModel
    modules: list[Any] = field(repr=False)
    layers: list[Layer] = field(repr=False)
    kept: Kept = field(repr=False)

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

    @contextmanager
    def decode_steps(self, forwards: list[Forward]) -> Iterator[None]:
        """Within the block, the same in the decode steps of a generation, whose prefill is dense."""
        prefill = _Prefill()
        dense = [module.forward for module in self.modules]
        handle = self.model.register_forward_pre_hook(prefill.note, with_kwargs=True)
        try:
            with self.experts([prefill.choose(*pair) for pair in zip(dense, forwards, strict=True)]):
                yield
        finally:
            handle.remove()

    def dense_steps(self) -> AbstractContextManager[None]:
        """Within the block, decode steps are dense also where the checkpoint is an augmented one."""
        return reader_mode(self.model, "never") if hasattr(self.model, "mreader") else nullcontext()

    def logits(self, ids: Tensor) -> Tensor:
        """(N, T, V) of windows (N, T), nothing cached."""
        logits: Tensor = self.model(input_ids=ids.to(self.model.device), use_cache=False).logits
        return logits

    def calibrated(self, windows: Tensor) -> Subject:
        """The same, with the tokens at the input of every layer of the dense model: those of all windows (N, T)."""
        batches: list[Batch] = []
        self._note_inputs(windows, batches)
        kept = Kept()
        layers = [
            replace(layer, calibration=batch, kept=kept) for layer, batch in zip(self.layers, batches, strict=True)
        ]
        return replace(self, layers=layers, kept=kept)

    def _note_inputs(self, windows: Tensor, seen: list[Batch]) -> None:
        """Run the dense model, and note what each routed layer gets."""
        handles = [module.register_forward_pre_hook(_noting(seen), with_kwargs=True) for module in self.modules]
        try:
            self.model.base_model(input_ids=windows.to(self.model.device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()


class _Prefill:
    """Whether the model's current call is one: it has more than one token of a sequence."""

    def __init__(self) -> None:
        self._running = False

    def note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("inputs_embeds")
        tokens = kwargs.get("input_ids") if tokens is None else tokens
        self._running = tokens is not None and tokens.shape[1] > 1

    def choose(self, within: Forward, outside: Forward) -> Forward:
        return lambda *inputs: (within if self._running else outside)(*inputs)


def _noting(seen: list[Batch]) -> Callable[..., None]:
    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, ids, weights = (*args, *kwargs.values())
        seen.append(Batch(x.float(), ids, weights.float()))

    return note


def open_subject(path: Path, dtype: str, device: str) -> Subject:
    """The model in a folder. Raises what opening a source or an augmented checkpoint raises."""
    return _of_augmented(path, dtype, device) if is_augmented(path) else _of_source(path, dtype, device)


def _refuse_unknown(architecture: Architecture) -> None:
    """UnsupportedError for experts whose channels are not phi(g . x) * (v . x), which is all that selectors know."""
    if architecture.layers[0].is_biased or not get_activation(architecture.activation).is_linear_in_up:
        raise UnsupportedError(
            f"selectors do not know the biases or the activation of {architecture.model_type}'s experts",
            "`mreader eval` without --selector measures the reader",
        )


def _of_source(path: Path, dtype: str, device: str) -> Subject:
    architecture = find_architecture(open_checkpoint(path))
    _refuse_unknown(architecture)
    model = auto_class(path).from_pretrained(path, dtype=dtype).to(pick_device(device)).eval()
    modules = [module for _, module in experts_modules(model)]
    if len(modules) != len(architecture.layers):
        raise SourceError(
            f"{type(model).__name__} has {len(modules)} layers of routed experts, the weights "
            f"{len(architecture.layers)}",
            "load the checkpoint's own model class",
        )
    first, sketching, kept = architecture.layers[0], Sketching(), Kept()
    shape = BlockShape(
        first.hidden,
        first.channels,
        architecture.routed,
        sketching.rank,
        sketching.options.code,
        TORCH_DTYPES[first.dtype].itemsize,
        layout_on(model.device),
    )
    layers = [
        Layer(_native(module, architecture.activation), number, shape, kept, sketching)
        for number, module in enumerate(modules)
    ]
    return Subject(text_part(model), modules, layers, kept)


def _of_augmented(path: Path, dtype: str, device: str) -> Subject:
    augmented = open_augmented(path)
    _refuse_unknown(augmented.architecture)
    sketching, kept = Sketching.of(augmented.options), Kept()
    model = load(path, dtype=dtype, device=device)
    shape, modules = runtime_of(model).shape, [module for _, module in experts_modules(model)]
    layers = [
        Layer(
            _native(module, module.mreader_activation.name),
            number,
            shape,
            kept,
            sketching,
            (sketching, module.sketch.on(model.device)),
        )
        for number, module in enumerate(modules)
    ]
    return Subject(text_part(model), modules, layers, kept)


def _native(module: Any, activation: str) -> Native:
    gate_up, down = (weights.detach() for weights in stored_weights(module))
    return Native(gate_up, down, get_activation(activation))
