"""What a model's routed experts are called, and where each expert's matrices lie: the data is architectures.toml.

E experts, K routed experts of a token, H hidden size, I channels of one expert.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from mreader.errors import MreaderError, QuantizedError, SourceError, UnsupportedError
from mreader.formats.checkpoint import Checkpoint
from mreader.formats.quantized import METHODS, quantization
from mreader.formats.safetensors_file import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from mreader.formats.bits import Bits

Array = TypeVar("Array", "Tensor", "Bits")  # weights to compute with, or to move

# Keys of config.json: layers before this one are dense; of so many layers the last is routed.
_FIRST_LAYER = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_EVERY_SO_MANY = ("decoder_sparse_step", "moe_layer_interval")
SOURCE_DTYPES = ("BF16", "F16", "F32")
# How quantized weights are told that config.json does not announce. The first that fits names the method: ends of the
# names of the experts' tensors that only one method has, files beside the weights, then what several methods have.
_QUANTIZED_NAMES = (
    *((".g_idx", "gptq"), ("_blocks", "mxfp4"), ("_scale_inv", "fp8")),
    *((".weight_scale_2", "nvfp4"), (".weight_global_scale", "nvfp4"), (".weight_packed", "compressed-tensors")),
    *((".absmax", "bitsandbytes"), (".SCB", "bitsandbytes"), ("__nf4", "bitsandbytes"), ("__fp4", "bitsandbytes")),
)
_QUANTIZED_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_QUANTIZED_DTYPES = {
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), "fp8"),
    **dict.fromkeys(("I8", "U8"), "int8"),
}


@dataclass(frozen=True)
class Matrix:
    """One expert's gate, up or down matrix, or its bias: `tensor`, or every step-th of the rows first..last-1 of its
    slice `expert` of a fused one, with the slice's axes swapped where it is `transposed`.
    """

    tensor: str
    expert: int | None = None
    first: int = 0
    last: int | None = None
    transposed: bool = False
    step: int = 1

    def read(self, tensors: Mapping[str, Array]) -> Array:
        """gate, up: (I, H); down: (H, I); biases of them: (I,) and (H,), in the tensor's own dtype; a view."""
        whole = tensors[self.tensor] if self.expert is None else slice_of(tensors, self.tensor, self.expert)
        return (whole.T if self.transposed else whole)[self.first : self.last : self.step]

    def row(self, number: int) -> int:
        """The row of the slice that is this matrix's row `number`."""
        return self.first + self.step * number


@runtime_checkable
class Sliceable(Protocol):
    """Tensors that can be had slice by slice, where a whole one would have to be computed first."""

    def slice(self, name: str, index: int) -> Any: ...


def slice_of(tensors: Mapping[str, Array], name: str, index: int) -> Array:
    """`tensors[name][index]`, without the rest of it where that can be."""
    slices: Any = tensors if isinstance(tensors, Sliceable) else None
    part: Array = tensors[name][index] if slices is None else slices.slice(name, index)
    return part


@dataclass(frozen=True)
class RoutedLayer:
    """A layer's routed experts.

    number:        the layer's number in the model
    ordinal:       its place among the layers with routed experts, from 0 (chooses its rotation signs)
    prefix:        what its augmented tensors are named under
    dtype:         safetensors' name of the weights' dtype
    gate, up, down: one matrix an expert
    gate_bias, up_bias, down_bias: one an expert; empty where experts have none
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
    gate_bias: tuple[Matrix, ...] = ()
    up_bias: tuple[Matrix, ...] = ()
    down_bias: tuple[Matrix, ...] = ()

    @property
    def is_biased(self) -> bool:
        return bool(self.down_bias)

    @property
    def matrices(self) -> dict[str, tuple[Matrix, ...]]:
        """What it is made of, by kind: "gate", "up", "down", and where experts have biases "gate_bias" and so on."""
        biases = {"gate_bias": self.gate_bias, "up_bias": self.up_bias, "down_bias": self.down_bias}
        return {"gate": self.gate, "up": self.up, "down": self.down, **(biases if self.is_biased else {})}

    @property
    def tensors(self) -> list[str]:
        """The source tensors that it is made of."""
        return list(dict.fromkeys(m.tensor for matrices in self.matrices.values() for m in matrices))


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


@dataclass(frozen=True)
class Layout:
    """One way of naming a layer's experts on disk.

    tensors:     "gate", "up", "gate_up" or "down", or a bias of it -> name below the experts' prefix
    transposed:  whether the last two axes of fused tensors are swapped
    interleaved: whether gate and up rows take turns in `gate_up`
    """

    name: str
    tensors: dict[str, str]
    transposed: bool
    interleaved: bool


@dataclass(frozen=True)
class ModelType:
    """What the table says of a model type.

    experts: prefixes of a layer's routed experts, and
    layouts: names of the layouts in use; both empty for a type that is refused
    reason:  why it is refused, None where it is supported
    """

    model_type: str
    experts: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def supported(self) -> bool:
        return self.reason is None


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("mreader.formats").joinpath("architectures.toml").read_text(encoding="utf-8"))


def known_model_types() -> list[str]:
    return sorted(_table()["models"])


def model_types() -> list[ModelType]:
    """All that the table has, supported or refused, by name."""
    entries = {name: {**_table()["defaults"], **entry} for name, entry in _table()["models"].items()}
    found = [ModelType(name, tuple(entry["experts"]), tuple(entry["layouts"])) for name, entry in entries.items()]
    found += [ModelType(name, reason=reason) for name, reason in _table()["refused"].items()]
    return sorted(found, key=lambda model_type: model_type.model_type)


def layouts() -> list[Layout]:
    """All that the table has."""
    return [
        Layout(name, _tensor_names(entry), bool(entry.get("transposed")), bool(entry.get("interleaved")))
        for name, entry in _table()["layouts"].items()
    ]


def _tensor_names(layout: Mapping[str, Any]) -> dict[str, str]:
    """What a layout calls its tensors, by part."""
    return {part: name for part, name in layout.items() if isinstance(name, str)}


def find_architecture(checkpoint: Checkpoint) -> Architecture:
    """The routed experts of `checkpoint`.

    Raises UnsupportedError for a model type, weight format or layout outside the table, and SourceError where experts
    are missing, have the wrong shape, or come with tensors that no rule places.
    """
    config = checkpoint.config
    _refuse_known(config)
    _refuse_quantized(config)
    entry = _entry(config)
    text = text_config(config)
    tensors = checkpoint.tensors
    prefix = next((prefix for prefix in entry["experts"] if _by_layer(prefix, entry, tensors)), None)
    grouped = {} if prefix is None else _by_layer(prefix, entry, tensors)
    _refuse_unannounced([named for layer in grouped.values() for named in layer.values()], checkpoint.files)
    if prefix is None:
        raise _no_experts(config, entry, text)
    grouped = {number: names for number, names in grouped.items() if number not in predicting_layers(config)}
    _compare_layers(grouped, entry, text)
    if not grouped:
        raise _no_experts(config, entry, text)
    routed, activation = routing(config)
    if routed > _count(entry, text, "num_experts"):
        raise SourceError(
            f"config.json routes a token to {routed} experts of {_count(entry, text, 'num_experts')}",
            "take the config.json that belongs to the weights",
        )
    layers = tuple(
        _layer(entry, text, prefix.format(layer=number), number, ordinal, grouped[number])
        for ordinal, number in enumerate(sorted(grouped))
    )
    return Architecture(config["model_type"], layers, routed, activation)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json: the whole of it, or one like `text_config` of a multimodal model."""
    text = config
    for key in _entry(config).get("text", "").split("."):
        text = _inner(text, key)
    return text or config


def routing(config: Mapping[str, Any]) -> tuple[int, str]:
    """(K, name of the activation, with its parameters where it has some) of a parsed config.json."""
    entry, text = _entry(config), text_config(config)
    routed, activation = _count(entry, text, "num_routed"), _config_value(entry, text, "activation")
    if not isinstance(activation, str):
        raise _wrong(_key(entry, text, "activation"), activation, "activation")
    parameters = [f"{name}={_parameter(text, *rule)}" for name, rule in entry.get("parameters", {}).items()]
    return routed, f"{activation}({', '.join(parameters)})" if parameters else activation


def compare_configs(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """SourceError where a config.json does not say of the routed experts what another one says."""
    _compare_said("model_type", found.get("model_type"), expected["model_type"])
    entry = _entry(expected)
    texts = text_config(found), text_config(expected)
    for what in ("num_layers", "num_experts", "num_routed", "hidden_size", "channels"):
        _compare_said(_key(entry, texts[0], what), *(_count(entry, text, what) for text in texts))
    _compare_said(_key(entry, texts[0], "activation"), routing(found)[1], routing(expected)[1])


def _compare_said(key: str, found: object, expected: object) -> None:
    if found != expected:
        raise SourceError(
            f"config.json says {found!r} for {key}, and that of the source says {expected!r}",
            "take the config.json that belongs to the weights",
        )


def _parameter(text: Mapping[str, Any], key: str, otherwise: float) -> float:
    """A parameter of the activation by config.json, which may take it for granted."""
    value = text.get(key)
    if value is None:
        return otherwise
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _wrong(key, value, "number above 0")
    return float(value)


def predicting_layers(config: Mapping[str, Any]) -> range:
    """The layers after the last, which predict further tokens: no part of decoding, so that they are copied."""
    entry, text = _entry(config), text_config(config)
    layers = _count(entry, text, "num_layers")
    return range(layers, layers + _layer_number(text, "num_nextn_predict_layers", 0))


def routed_part(config: Mapping[str, Any]) -> str:
    """The part of a loaded model that has the routed experts: "" for all of it."""
    return str(_entry(config).get("within", ""))


def _entry(config: Mapping[str, Any]) -> dict[str, Any]:
    model_type = _model_type(config)
    models: dict[str, dict[str, Any]] = _table()["models"]
    if model_type not in models:
        if not any("expert" in key for part in (config, _inner(config, "text_config")) for key in part):
            raise _dense(model_type)
        raise UnsupportedError(
            f"model_type {model_type} is not supported; known: {', '.join(known_model_types())}",
            "an MoE model needs one entry in formats/architectures.toml, see CONTRIBUTING.md",
        )
    return {**_table()["defaults"], **models[model_type]}


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise SourceError("config.json has no model_type", "take the config.json that belongs to the weights")
    return model_type


def _refuse_known(config: Mapping[str, Any]) -> None:
    """UnsupportedError for a type that the table refuses, with its reason."""
    model_type = _model_type(config)
    if reason := _table()["refused"].get(model_type):
        raise UnsupportedError(f"model_type {model_type} cannot be converted: {reason}", "see `mreader formats`")


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = config.get(key)
    return inner if isinstance(inner, dict) else {}


def _dense(model_type: str) -> UnsupportedError:
    return UnsupportedError(
        f"this is a dense model ({model_type}): config.json promises no routed experts", "there is nothing to convert"
    )


def _config_value(entry: Mapping[str, Any], text: Mapping[str, Any], what: str) -> Any:
    """What config.json says, or the entry for it."""
    if what in entry.get("fixed", {}):
        return entry["fixed"][what]
    key = _key(entry, text, what)
    if text.get(key) is None:
        raise SourceError(f"config.json has no {key}", "take the config.json that belongs to the weights")
    return text[key]


def _key(entry: Mapping[str, Any], text: Mapping[str, Any], what: str) -> str:
    """The key of config.json that says it; all that may, where none does."""
    keys = _keys(entry, what)
    return next((key for key in keys if text.get(key) is not None), " or ".join(keys))


def _keys(entry: Mapping[str, Any], what: str) -> list[str]:
    """The keys of config.json that may say it."""
    named = entry[what]
    return [named] if isinstance(named, str) else list(named)


def _count(entry: Mapping[str, Any], text: Mapping[str, Any], what: str) -> int:
    """A size that config.json gives; SourceError where it is missing or no positive number.

    A list gives it layer by layer, and has to give the same for all.
    """
    value = _config_value(entry, text, what)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if type(value) is not int or value < 1:
        raise _wrong(_key(entry, text, what), value, "size")
    return value


def _wrong(what: str, value: Any, kind: str) -> SourceError:
    return SourceError(
        f"config.json says {value!r} for {what}, which is no {kind}", "take the config.json that belongs to the weights"
    )


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    if announced := quantization(config):
        method, _ = announced
        if method == "mreader":
            raise UnsupportedError("this checkpoint is augmented already", "`mreader restore` gives its source back")
        if method in METHODS:
            raise QuantizedError(method)
        raise _quantized(method)


def _quantized(method: str, because: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"the weights are quantized ({method}), which is not supported yet{because}",
        "convert the BF16 checkpoint instead",
    )


def _refuse_unannounced(experts: Sequence[tuple[str, TensorSpec]], files: Collection[str]) -> None:
    """UnsupportedError where the experts' tensors (name, spec) or a file tell of a quantization that config.json does
    not: judged by names and shapes alone, such a checkpoint would pass for an incomplete one.
    """
    for end, method in _QUANTIZED_NAMES:
        if named := next((name for name, _ in experts if name.endswith(end)), None):
            raise _quantized(method, f": there is {named}")
    for file, method in _QUANTIZED_FILES.items():
        if file in files:
            raise _quantized(method, f": there is {file}")
    if "hf_quant_config.json" in files:  # of either; the packed nibbles are U8
        dtypes = {spec.dtype for _, spec in experts}
        method = "fp8" if "F8_E4M3" in dtypes and "U8" not in dtypes else "nvfp4"
        raise _quantized(method, ": there is hf_quant_config.json")
    for name, spec in experts:
        if name.endswith((".qweight", ".qzeros")):
            raise _quantized("gptq or awq", f": there is {name}")
        if spec.dtype in _QUANTIZED_DTYPES:
            raise _quantized(_QUANTIZED_DTYPES[spec.dtype], f": {name} is stored as {spec.dtype}")


def _by_layer(
    prefix: str, entry: Mapping[str, Any], tensors: Mapping[str, TensorSpec]
) -> dict[int, dict[str, tuple[str, TensorSpec]]]:
    """layer -> name below the experts' prefix, or with ../ beside it -> (whole name, spec)."""
    beside = [
        name.removeprefix("../")
        for layout in entry["layouts"]
        for name in _tensor_names(_table()["layouts"][layout]).values()
        if name.startswith("../")
    ]
    below = re.compile(rf"{_numbered(prefix)}\.(.+)")
    outside = re.compile(rf"{_numbered(prefix.rpartition('.')[0])}\.({'|'.join(map(re.escape, beside))})")
    grouped: dict[int, dict[str, tuple[str, TensorSpec]]] = {}
    for name, spec in tensors.items():
        if match := below.fullmatch(name):
            if match[2] not in entry.get("kept", ()):
                grouped.setdefault(int(match[1]), {})[match[2]] = (name, spec)
        elif beside and (match := outside.fullmatch(name)):
            grouped.setdefault(int(match[1]), {})[f"../{match[2]}"] = (name, spec)
    return grouped


def _numbered(prefix: str) -> str:
    return re.escape(prefix).replace(re.escape("{layer}"), r"(\d+)")


def _whole(prefix: str, name: str) -> str:
    """The whole name of a tensor that a layout names."""
    return f"{prefix.rpartition('.')[0]}.{name[3:]}" if name.startswith("../") else f"{prefix}.{name}"


def _routed_layers(entry: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[range, frozenset[int]]:
    """The layers with routed experts by config.json: those of the range that are not in the set.

    These keys mean the same in every architecture that has them. A range, as a wrong number of layers may be any.
    """
    layers = _count(entry, text, "num_layers")
    if (end := _layer_number(text, "moe_layer_end_index", -1, least=-1)) >= 0:
        layers = min(layers, end + 1)
    first = max(_layer_number(text, key, 0) for key in _FIRST_LAYER)
    if text.get("expert_layer_period"):
        step = _layer_number(text, "expert_layer_period", 1, least=1)
        phase = _layer_number(text, "expert_layer_offset", 0) % step
    else:
        step = max(_layer_number(text, key, 1, least=1) for key in _EVERY_SO_MANY)
        phase = step - 1
    return range(phase + -(-max(first - phase, 0) // step) * step, layers, step), _dense_layers(text)


def _layer_number(text: Mapping[str, Any], key: str, default: int, least: int = 0) -> int:
    value = text.get(key) or default
    if type(value) is not int or value < least:
        raise _wrong(key, value, "number of layers")
    return value


def _dense_layers(text: Mapping[str, Any]) -> frozenset[int]:
    """The layers that config.json names as dense, one by one or in a list of what every layer is."""
    named = text.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(number) is int for number in named):
        raise _wrong("mlp_only_layers", named, "list of layers")
    types = text.get("mlp_layer_types") or []
    if not isinstance(types, list):
        raise _wrong("mlp_layer_types", types, "list of layers")
    every = text.get("moe_layer_freq")  # a number in some types, which nothing follows
    dense = [number for number, is_routed in enumerate(every if isinstance(every, list) else []) if not is_routed]
    return frozenset([*named, *dense, *(number for number, kind in enumerate(types) if kind == "dense")])


def _no_experts(config: Mapping[str, Any], entry: Mapping[str, Any], text: Mapping[str, Any]) -> MreaderError:
    counts = [text.get(key) for key in _keys(entry, "num_experts")]
    if text.get("enable_moe_block") is False or not any(counts):
        return _dense(config["model_type"])
    numbers, dense = _routed_layers(entry, text)
    if all(number in dense for number in numbers):  # ends at the first that is not
        return _dense(config["model_type"])
    return SourceError(f"no tensor is named {entry['experts'][0]}...", "download it again, or see CONTRIBUTING.md")


def _compare_layers(found: Collection[int], entry: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    numbers, dense = _routed_layers(entry, text)
    missing = next((number for number in numbers if number not in dense and number not in found), None)
    surplus = min((number for number in found if number not in numbers or number in dense), default=None)
    for number in sorted(number for number in (missing, surplus) if number is not None):
        what = "has no routed experts" if number == missing else "has routed experts"
        raise SourceError(
            f"layer {number} {what}, config.json says otherwise",
            "take config.json and weights from the same checkpoint",
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
    layout = _layout(entry["layouts"], tensors, experts, channels, hidden)
    expected = set()
    for name, shape in _expected(layout, experts, channels, hidden):
        if name not in tensors:
            raise SourceError(f"{_whole(prefix, name)} is missing", "download the checkpoint again")
        if tensors[name][1].shape != shape:
            raise SourceError(
                f"{tensors[name][0]} has shape {list(tensors[name][1].shape)}, config.json says {list(shape)}",
                "take config.json and weights from the same checkpoint",
            )
        expected.add(name)
    for name, (whole, spec) in tensors.items():
        if name not in expected:
            raise SourceError(
                f"{whole} belongs to the routed experts, and no rule says what to do with it",
                "if it should be kept, add it to the model's layout in formats/architectures.toml",
            )
        if spec.dtype not in SOURCE_DTYPES:
            raise UnsupportedError(
                f"{whole} is stored as {spec.dtype}, which is not supported yet", "convert the BF16 checkpoint instead"
            )
    dtypes = sorted({spec.dtype for _, spec in tensors.values()})
    if len(dtypes) > 1:
        raise UnsupportedError(f"the experts of layer {number} mix {' and '.join(dtypes)}", "save them in one dtype")
    matrices = _matrices(layout, prefix, experts, channels)
    return RoutedLayer(number, ordinal, prefix, experts, channels, hidden, dtypes[0], **matrices)


def _layout(
    names: Sequence[str], tensors: Mapping[str, tuple[str, TensorSpec]], experts: int, channels: int, hidden: int
) -> dict[str, Any]:
    """The layout most of whose names are there: one missing tensor must not hide which layout it is missing from.

    Of two with the same names the first whose shapes are those of the tensors, which is how transformers tells them.
    """
    layouts: dict[str, dict[str, Any]] = _table()["layouts"]

    def fit(layout: Mapping[str, Any]) -> tuple[int, bool]:
        patterns = [re.escape(n).replace(re.escape("{expert}"), r"\d+") for n in _tensor_names(layout).values()]
        name, shape = next(_expected(layout, experts, channels, hidden))
        there = sum(bool(re.fullmatch("|".join(patterns), tensor)) for tensor in tensors)
        return there, name in tensors and tensors[name][1].shape == shape

    return max((layouts[name] for name in names), key=fit)


def _expected(
    layout: Mapping[str, Any], experts: int, channels: int, hidden: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors of a layer; one by one, as a wrong number of experts may be any."""
    gate_up, down = (channels, hidden), (hidden, channels)
    if "gate_up" in layout:
        for part, (rows, columns) in (("gate_up", (2 * channels, hidden)), ("down", down)):
            yield layout[part], (experts, columns, rows) if layout.get("transposed") else (experts, rows, columns)
            if bias := layout.get(f"{part}_bias"):
                yield bias, (experts, rows)
        return
    for e in range(experts):
        for part, shape in (("gate", gate_up), ("up", gate_up), ("down", down)):
            yield layout[part].format(expert=e), shape


def _matrices(layout: Mapping[str, Any], prefix: str, experts: int, channels: int) -> dict[str, tuple[Matrix, ...]]:
    """`RoutedLayer.matrices`."""
    numbers = range(experts)

    if "gate_up" not in layout:
        return {
            part: tuple(Matrix(_whole(prefix, layout[part].format(expert=e))) for e in numbers)
            for part in ("gate", "up", "down")
        }
    in_turns, both = bool(layout.get("interleaved")), 2 * channels
    rows: dict[str, tuple[str, slice]] = {
        "gate": ("gate_up", slice(0, both, 2) if in_turns else slice(0, channels, 1)),
        "up": ("gate_up", slice(1, both, 2) if in_turns else slice(channels, both, 1)),
        "down": ("down", slice(0, None, 1)),
    }

    def fused(part: str, some: slice, transposed: bool) -> tuple[Matrix, ...]:
        name = _whole(prefix, layout[part])
        return tuple(Matrix(name, e, some.start, some.stop, transposed, some.step) for e in numbers)

    found = {kind: fused(part, some, bool(layout.get("transposed"))) for kind, (part, some) in rows.items()}
    if "down_bias" in layout:
        found |= {f"{kind}_bias": fused(f"{part}_bias", some, False) for kind, (part, some) in rows.items()}
    return found
