"""The routed experts that a checkpoint promises, and the way of their tensors past vLLM's loaders.

vLLM's models drop tensors whose names they do not know, or fail on them, each in a way of its own. All of them take
their tensors from one iterator: here those of the format leave it, for the layers that want them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from mreader.errors import UnsupportedError
from mreader.formats.architectures import routing
from mreader.formats.augmented import FormatOptions, open_augmented, tensor_specs

_PARTS = tuple(tensor_specs(1, 1, 1, "F32", FormatOptions()))
_INPUT, _OUTPUT = "embed_tokens.weight", "lm_head.weight"  # how the names of embeddings end


@dataclass(frozen=True)
class StoredLayer:
    """A routed layer of the checkpoint.

    prefix:   of its tensors
    experts:  E
    channels: I
    hidden:   H
    dtype:    of the native weights, as safetensors calls it
    """

    prefix: str
    experts: int
    channels: int
    hidden: int
    dtype: str


@dataclass(frozen=True)
class RoutedCheckpoint:
    """What a checkpoint holds of routed experts: the number of a layer -> the layer, and their activation."""

    layers: Mapping[int, StoredLayer]
    activation: str

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[int, str]]:
        """Whole name -> number of the layer, name below its prefix."""
        return {f"{layer.prefix}.{part}": (number, part) for number, layer in self.layers.items() for part in _PARTS}


class TakesTensors(Protocol):
    """The routed experts of one layer of a model."""

    def take(self, part: str, tensor: Tensor) -> None:
        """Keep what the rank needs of the tensor `part`."""


def open_routed(folder: Path) -> RoutedCheckpoint:
    """The routed experts of the checkpoint in `folder`. Raises what `open_augmented` raises, for whatever is wrong."""
    opened = open_augmented(folder)
    _, activation = routing(opened.source.config)
    layers = {
        layer.number: StoredLayer(layer.prefix, layer.experts, layer.channels, layer.hidden, layer.dtype)
        for layer in opened.architecture.layers
    }
    return RoutedCheckpoint(layers, activation)


def divert_tensors(model_class: Any) -> None:
    """Have the models of a class hand the format's tensors to their routed experts, where these are the format's.

    May be called again. Other models of the class load as always.
    """
    load = model_class.load_weights
    if hasattr(load, "diverts_tensors"):
        return

    @functools.wraps(load)
    def load_weights(self: nn.Module, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        takers = _takers(self)
        left = _undelivered(weights, takers)
        return load(self, _tied(self, left) if takers else left, *args, **kwargs)

    load_weights.diverts_tensors = True  # type: ignore[attr-defined]
    model_class.load_weights = load_weights


def _takers(model: nn.Module) -> dict[str, tuple[TakesTensors | None, str]]:
    """Name of a tensor of the format -> who takes it, and as which part; nobody where another rank has the layer."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.models.utils import PPMissingLayer

    from mreader.vllm.config import MreaderConfig
    from mreader.vllm.experts import RoutedExpertsMethod

    config = get_current_vllm_config().quant_config
    if not isinstance(config, MreaderConfig):
        return {}
    found: dict[int, TakesTensors | None] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, RoutedExpertsMethod):
            found[method.number] = method
        elif isinstance(module, PPMissingLayer) and (number := layer_number(name)) is not None:
            found[number] = None
    checkpoint = config.checkpoint
    if missing := sorted(set(checkpoint.layers) - set(found)):
        raise UnsupportedError(
            f"vLLM's {type(model).__name__} computes the experts of layer {missing[0]} in a way of its own",
            "serve the source checkpoint: `mreader restore` gives it back",
        )
    return {name: (found[number], part) for name, (number, part) in checkpoint.tensors.items()}


def _tied(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights`, and the input embeddings as the output's too, where the config ties the two and the model does not.

    vLLM's OLMoE has an output embedding of its own, which nothing fills then: all logits are zero. A model that ties
    them has one parameter, under the name of the other. Raises UnsupportedError where no embeddings were found.
    """
    from vllm.config import get_current_vllm_config

    tied = getattr(get_current_vllm_config().model_config.hf_text_config, "tie_word_embeddings", False)
    lacking = tied and any(name.endswith(_OUTPUT) for name, _ in model.named_parameters())
    embeddings: Tensor | None = None
    for name, tensor in weights:
        yield name, tensor
        lacking = lacking and not name.endswith(_OUTPUT)
        if lacking and embeddings is None and name.endswith(_INPUT):
            embeddings = tensor
    if not lacking:
        return
    if embeddings is None:
        raise UnsupportedError(
            f"vLLM's {type(model).__name__} does not tie its {_OUTPUT} to the embeddings, and the checkpoint has none",
            "store the embeddings under that name as well, and convert again",
        )
    yield _OUTPUT, embeddings


def layer_number(name: str) -> int | None:
    """The number in a module's name that says which decoder layer it is, or is in."""
    match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


def _undelivered(
    weights: Iterable[tuple[str, Tensor]], takers: Mapping[str, tuple[TakesTensors | None, str]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are not the format's; the others are handed over on the way."""
    for name, tensor in weights:
        if name not in takers:
            yield name, tensor
            continue
        taker, part = takers[name]
        if taker is not None:
            taker.take(part, tensor)
