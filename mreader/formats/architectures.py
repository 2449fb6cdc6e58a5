"""What a model's routed experts are called, and where each expert's matrices lie: the data is architectures.toml.

E experts, K routed experts of a token, H hidden size, I channels of one expert.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from mreader.errors import MreaderError, SourceError, UnsupportedError
from mreader.formats.checkpoint import Checkpoint
from mreader.formats.safetensors_file import TensorSpec

_DEFAULT_KEYS: dict[str, list[str]] = {
    "num_experts": ["num_experts", "num_local_experts"],
    "num_routed": ["num_experts_per_tok"],
    "channels": ["moe_intermediate_size"],
    "activation": ["hidden_act"],
    "hidden_size": ["hidden_size"],
    "num_layers": ["num_hidden_layers"],
}
_WEIGHT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Matrix:
    """One expert's gate, up or down matrix: `tensor`, or rows first..last-1 of its slice `expert` of a fused one."""

    tensor: str
    expert: int | None = None
    first: int = 0
    last: int | None = None

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """gate, up: (I, H); down: (H, I), in the tensor's own dtype; a view."""
        tensor = tensors[self.tensor]
        return (tensor if self.expert is None else tensor[self.expert])[self.first : self.last]


@dataclass(frozen=True)
class RoutedLayer:
    """A layer's routed experts.

    number:        the layer's number in the model
    ordinal:       its place among the layers with routed experts, from 0 (chooses its rotation signs)
    prefix:        what its augmented tensors are named under
    dtype:         safetensors' name of the weights' dtype
    gate, up, down: one matrix an expert
    """

    number: int
    ordinal: int
    prefix: str
    experts: int
    channels: int
    hidden: int
    dtype: str
    gate: tuple[Matrix, ...]
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]

    @property
    def tensors(self) -> list[str]:
        """The source tensors that it is made of."""
        return list(dict.fromkeys(m.tensor for m in (*self.gate, *self.up, *self.down)))


@dataclass(frozen=True)
class Architecture:
    """A checkpoint seen as a model with routed experts."""

    model_type: str
    layers: tuple[RoutedLayer, ...]
    routed: int
    activation: str

    @property
    def transformed(self) -> frozenset[str]:
        """The source tensors that the augmented format stores in another form; all others are copied."""
        return frozenset(name for layer in self.layers for name in layer.tensors)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("mreader.formats").joinpath("architectures.toml").read_text(encoding="utf-8"))


def known_model_types() -> list[str]:
    return sorted(_table()["models"])


def find_architecture(checkpoint: Checkpoint) -> Architecture:
    """The routed experts of `checkpoint`.

    Raises UnsupportedError for a model type, weight format or layout outside the table, and SourceError where experts
    are missing, have the wrong shape, or come with tensors that no rule places.
    """
    config = checkpoint.config
    _refuse_quantized(config)
    entry = _entry(config)
    text = text_config(config)
    tensors = checkpoint.tensors
    prefix = _fitting_prefix(entry["experts"], tensors)
    if prefix is None:
        raise _no_experts(config, entry, text)
    grouped = _by_layer(prefix, tensors)
    _compare_layers(sorted(grouped), _routed_layers(entry, text))
    layers = tuple(
        _layer(entry, text, prefix.format(layer=number), number, ordinal, grouped[number])
        for ordinal, number in enumerate(sorted(grouped))
    )
    return Architecture(config["model_type"], layers, *routing(config))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json: the whole of it, or its `text_config` for a multimodal model."""
    key = _entry(config).get("text")
    return (_inner(config, key) if key else {}) or config


def routing(config: Mapping[str, Any]) -> tuple[int, str]:
    """(K, name of the activation) of a parsed config.json."""
    entry, text = _entry(config), text_config(config)
    return _count(entry, text, "num_routed"), str(_config_value(entry, text, "activation"))


def _entry(config: Mapping[str, Any]) -> dict[str, Any]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise SourceError("config.json has no model_type", "take the config.json that belongs to the weights")
    models: dict[str, dict[str, Any]] = _table()["models"]
    if model_type not in models:
        if not any("expert" in key for part in (config, _inner(config, "text_config")) for key in part):
            raise _dense(model_type)
        raise UnsupportedError(
            f"model_type {model_type} is not supported; known: {', '.join(known_model_types())}",
            "an MoE model needs one entry in formats/architectures.toml, see CONTRIBUTING.md",
        )
    return models[model_type]


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = config.get(key)
    return inner if isinstance(inner, dict) else {}


def _dense(model_type: str) -> UnsupportedError:
    return UnsupportedError(
        f"this is a dense model ({model_type}): config.json promises no routed experts", "there is nothing to convert"
    )


def _config_value(entry: Mapping[str, Any], text: Mapping[str, Any], what: str) -> Any:
    named = entry.get(what, _DEFAULT_KEYS[what])
    keys = [named] if isinstance(named, str) else list(named)
    for key in keys:
        if text.get(key) is not None:
            return text[key]
    raise SourceError(f"config.json has no {' or '.join(keys)}", "take the config.json that belongs to the weights")


def _count(entry: Mapping[str, Any], text: Mapping[str, Any], what: str) -> int:
    """A size that config.json gives; SourceError where it is missing or no positive number."""
    value = _config_value(entry, text, what)
    if type(value) is not int or value < 1:
        raise SourceError(
            f"config.json says {value!r} for {what}, which is no size",
            "take the config.json that belongs to the weights",
        )
    return value


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    for part in (config, _inner(config, "text_config")):
        quantization = part.get("quantization_config") or part.get("compression_config")
        if not quantization:
            continue
        named = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        method = str(named or "unknown").lower()
        if method == "mreader":
            raise UnsupportedError("this checkpoint is augmented already", "`mreader restore` gives its source back")
        raise UnsupportedError(
            f"the weights are quantized ({method}), which is not supported yet", "convert the BF16 checkpoint instead"
        )


def _fitting_prefix(prefixes: Sequence[str], tensors: Mapping[str, TensorSpec]) -> str | None:
    return next((prefix for prefix in prefixes if _by_layer(prefix, tensors)), None)


def _by_layer(prefix: str, tensors: Mapping[str, TensorSpec]) -> dict[int, dict[str, tuple[str, TensorSpec]]]:
    """layer -> name below the experts' prefix -> (whole name, spec)."""
    pattern = re.compile(re.escape(prefix).replace(re.escape("{layer}"), r"(\d+)") + r"\.(.+)")
    grouped: dict[int, dict[str, tuple[str, TensorSpec]]] = {}
    for name, spec in tensors.items():
        if match := pattern.fullmatch(name):
            grouped.setdefault(int(match[1]), {})[match[2]] = (name, spec)
    return grouped


def _routed_layers(entry: Mapping[str, Any], text: Mapping[str, Any]) -> set[int]:
    """The layers with routed experts by config.json: these keys mean the same in every architecture that has them."""
    layers = _count(entry, text, "num_layers")
    step, first = text.get("decoder_sparse_step") or 1, text.get("first_k_dense_replace") or 0
    dense = set(text.get("mlp_only_layers") or ())
    return {i for i in range(layers) if i not in dense and (i + 1) % step == 0 and i >= first}


def _no_experts(config: Mapping[str, Any], entry: Mapping[str, Any], text: Mapping[str, Any]) -> MreaderError:
    counts = [text.get(key) for key in _DEFAULT_KEYS["num_experts"]]
    if text.get("enable_moe_block") is False or not any(counts) or not _routed_layers(entry, text):
        return _dense(config["model_type"])
    return SourceError(f"no tensor is named {entry['experts'][0]}...", "download it again, or see CONTRIBUTING.md")


def _compare_layers(found: Sequence[int], expected: set[int]) -> None:
    for number in sorted(expected.symmetric_difference(found)):
        what = "has no routed experts, config.json" if number in expected else "has routed experts, config.json"
        raise SourceError(
            f"layer {number} {what} says otherwise", "take config.json and weights from the same checkpoint"
        )


def _layer(
    entry: Mapping[str, Any],
    text: Mapping[str, Any],
    prefix: str,
    number: int,
    ordinal: int,
    tensors: Mapping[str, tuple[str, TensorSpec]],
) -> RoutedLayer:
    experts, channels, hidden = (_count(entry, text, what) for what in ("num_experts", "channels", "hidden_size"))
    layout = _layout(entry["layouts"], tensors)
    expected = _expected(layout, experts, channels, hidden)
    for name, shape in expected.items():
        if name not in tensors:
            raise SourceError(f"{prefix}.{name} is missing", "download the checkpoint again")
        if tensors[name][1].shape != shape:
            raise SourceError(
                f"{tensors[name][0]} has shape {list(tensors[name][1].shape)}, config.json says {list(shape)}",
                "take config.json and weights from the same checkpoint",
            )
    for name, (whole, spec) in tensors.items():
        if name not in expected:
            raise SourceError(
                f"{whole} belongs to the routed experts, and no rule says what to do with it",
                "if it should be kept, add it to the model's layout in formats/architectures.toml",
            )
        if spec.dtype not in _WEIGHT_DTYPES:
            raise UnsupportedError(
                f"{whole} is stored as {spec.dtype}, which is not supported yet", "convert the BF16 checkpoint instead"
            )
    dtypes = sorted({spec.dtype for _, spec in tensors.values()})
    if len(dtypes) > 1:
        raise UnsupportedError(f"the experts of layer {number} mix {' and '.join(dtypes)}", "save them in one dtype")
    gate, up, down = _matrices(layout, prefix, experts, channels)
    return RoutedLayer(number, ordinal, prefix, experts, channels, hidden, dtypes[0], gate, up, down)


def _layout(names: Sequence[str], tensors: Mapping[str, tuple[str, TensorSpec]]) -> dict[str, str]:
    """The layout most of whose names are there: one missing tensor must not hide which layout it is missing from."""
    layouts: dict[str, dict[str, str]] = _table()["layouts"]
    patterns = {
        name: [re.escape(n).replace(re.escape("{expert}"), r"\d+") for n in layouts[name].values()] for name in names
    }
    fit = {name: sum(bool(re.fullmatch("|".join(p), t)) for t in tensors) for name, p in patterns.items()}
    return layouts[max(names, key=lambda name: fit[name])]


def _expected(layout: Mapping[str, str], experts: int, channels: int, hidden: int) -> dict[str, tuple[int, ...]]:
    gate_up, down = (channels, hidden), (hidden, channels)
    if "gate_up" in layout:
        return {layout["gate_up"]: (experts, 2 * channels, hidden), layout["down"]: (experts, *down)}
    return {
        layout[part].format(expert=e): shape
        for e in range(experts)
        for part, shape in (("gate", gate_up), ("up", gate_up), ("down", down))
    }


def _matrices(
    layout: Mapping[str, str], prefix: str, experts: int, channels: int
) -> tuple[tuple[Matrix, ...], tuple[Matrix, ...], tuple[Matrix, ...]]:
    def name(part: str, expert: int) -> str:
        return f"{prefix}.{layout[part].format(expert=expert)}"

    numbers = range(experts)
    if "gate_up" in layout:
        return (
            tuple(Matrix(name("gate_up", e), e, 0, channels) for e in numbers),
            tuple(Matrix(name("gate_up", e), e, channels, 2 * channels) for e in numbers),
            tuple(Matrix(name("down", e), e) for e in numbers),
        )
    gate, up, down = (tuple(Matrix(name(part, e)) for e in numbers) for part in ("gate", "up", "down"))
    return gate, up, down
