"""Sources whose weights are quantized: which stored tensors make up a weight, and the checkpoint that they stand for.

Headers only; mreader/dequantize.py computes the values. E experts, R rows of a weight, C its columns.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from mreader.errors import SourceError, UnsupportedError
from mreader.formats.checkpoint import CONFIG, INDEX, Checkpoint, Packed
from mreader.formats.safetensors_file import Header, TensorSpec, data_order, encode_header

DEQUANTIZED_DTYPE = "BF16"
# Side files that say how the weights are quantized: of no use beside weights that are not.
SIDE_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_CONFIG_KEYS = ("quantization_config", "compression_config")
# What belongs to quantized activations or caches, which a dequantized model does not have.
_OF_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale"),
    *(".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)
_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F16", "BF16", "F32")
_ORDER = ".weight_g_idx"  # of compressed-tensors, whose own decompression passes over it
_INTEGER_BITS = (2, 4, 8)  # whole in 32 bits
_ONE_CHECKPOINT = "take config.json and weights from the same checkpoint"

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class _Part:
    """A tensor beside the codes.

    end:    how its name ends
    dtypes: that it is stored in
    """

    end: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class _Form:
    """One way of storing a weight in several tensors, whose names begin alike.

    codes:    how the name of the codes ends
    dtypes:   that codes are stored in
    weight:   how the name of the weight ends, which they stand for
    needed:   role -> another tensor
    shape:    role -> spec, settings -> shape of the weight; ValueError, saying why, where there is none
    optional: role -> a tensor that may be there
    """

    codes: str
    dtypes: tuple[str, ...]
    weight: str
    needed: Mapping[str, _Part]
    shape: Callable[[Specs, Mapping[str, Any]], tuple[int, ...]]
    optional: Mapping[str, _Part] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, _Part]:
        """role -> every tensor beside the codes."""
        return {**self.needed, **self.optional}


def quantization(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """(method, what else is said of it) of a parsed config.json; None where it announces no quantization."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        if entry := next((part[key] for key in _CONFIG_KEYS if part.get(key)), None):
            settings = entry if isinstance(entry, dict) else {"quant_method": entry}
            return str(settings.get("quant_method") or "unknown").lower(), settings
    return None


def dequantized(source: Checkpoint) -> Checkpoint:
    """The checkpoint that a quantized `source` stands for, its weights in BF16; `source` itself where it is none, or
    of a method that cannot be dequantized.

    Raises UnsupportedError for a variant of a method that is not known, SourceError for weights without their scales,
    scales without their weights, and shapes that do not fit.
    """
    announced = quantization(source.config)
    if announced is None or announced[0] not in METHODS:
        return source
    method, settings = announced
    if ordered := next((name for name in source.tensors if name.endswith(_ORDER)), None):
        raise _unknown(method, f"{ordered.rpartition('.')[2]}: columns in the order of activations")
    packed = _packed_tensors(source, method, _check(method, settings))
    if not packed:
        raise SourceError(f"config.json announces quantized weights ({method}), and there are none", _ONE_CHECKPOINT)
    return _standing_for(source, packed)


def require_package(method: str) -> None:
    """UnsupportedError where values of a method need a package that is not installed."""
    if method == "compressed-tensors" and find_spec("compressed_tensors") is None:
        raise UnsupportedError(
            "these weights are quantized by compressed-tensors, which is not installed",
            "pip install 'mreader[compressed-tensors]'",
        )


def _check(method: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings. UnsupportedError for a variant that METHODS and dequantize.py do not cover."""
    if method in ("gptq", "awq"):
        bits, form = settings.get("bits"), integer_form(settings)
        if type(bits) is not int or bits not in (_INTEGER_BITS if method == "gptq" else (4,)):
            raise _unknown(method, f"{bits} bits")
        if form not in _INTEGER_FORMS[method]:
            raise _unknown(method, form)
    if method == "compressed-tensors":
        if settings.get("transform_config"):
            raise _unknown(method, "transform_config: activations are transformed as well as weights")
        for group in _groups(settings):
            stored = str(group.get("format") or settings.get("format"))
            if stored not in _COMPRESSED_FORMATS:
                raise _unknown(method, stored)
    return settings


def integer_form(settings: Mapping[str, Any]) -> str:
    """Which variant of GPTQ or AWQ config.json names, in lower case; empty where it names none."""
    return str(next(filter(None, map(settings.get, _FORM_KEYS)), "")).lower()


def _unknown(method: str, variant: str) -> UnsupportedError:
    return UnsupportedError(
        f"the weights are quantized ({method}, {variant}), which is not supported yet",
        "convert the BF16 checkpoint instead",
    )


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config groups of compressed-tensors, each a scheme of quantization."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(_is_group(group) for group in groups.values()):
        raise SourceError(
            f"config.json says {groups!r} for config_groups, which is no set of schemes",
            "take the config.json that belongs to the weights",
        )
    return list(groups.values())


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("targets") or [], list)


def _packed_tensors(source: Checkpoint, method: str, settings: Mapping[str, Any]) -> dict[str, Packed]:
    """weight -> how it is stored, in the order of the source."""
    tensors = source.tensors
    packed: dict[str, Packed] = {}
    used: set[str] = set()
    for name, spec in tensors.items():
        form = next((form for form in METHODS[method] if _is_codes(form, name, spec)), None)
        if form is None:
            continue
        stem = name.removesuffix(form.codes)
        parts = _parts(form, stem, tensors)
        packed[stem + form.weight] = _pack(form, method, stem, parts, tensors, settings)
        used |= set(parts.values())
    _refuse_strays(source, method, packed, used)
    return packed


def _is_codes(form: _Form, name: str, spec: TensorSpec) -> bool:
    return name.endswith(form.codes) and spec.dtype in form.dtypes


def _parts(form: _Form, stem: str, tensors: Specs) -> dict[str, str]:
    """role -> stored tensor, the codes first."""
    for part in form.needed.values():
        if stem + part.end not in tensors:
            missing = f"{stem}{part.end} is missing, without which {stem}{form.codes} cannot be dequantized"
            known = {form.codes, *(part.end for part in form.parts.values())}
            beside = (name for name in tensors if name.startswith(stem + form.codes))
            if other := next((name for name in beside if name.removeprefix(stem) not in known), None):
                raise SourceError(f"{missing}; {other} is there instead", "it is of a kind that is not supported yet")
            raise SourceError(missing, "download the checkpoint again")
    found = {"codes": stem + form.codes}
    for role, part in form.parts.items():
        name = stem + part.end
        if name not in tensors:
            continue
        if (dtype := tensors[name].dtype) not in part.dtypes:
            raise SourceError(f"{name} is stored as {dtype}, not as {' or '.join(part.dtypes)}", _ONE_CHECKPOINT)
        found[role] = name
    return found


def _pack(
    form: _Form, method: str, stem: str, parts: dict[str, str], tensors: Specs, settings: Mapping[str, Any]
) -> Packed:
    if method == "compressed-tensors":
        settings = _scheme(stem, settings)
    try:
        shape = form.shape({role: tensors[name] for role, name in parts.items()}, settings)
    except ValueError as error:
        raise SourceError(f"{parts['codes']} cannot be dequantized: {error}", _ONE_CHECKPOINT) from error
    return Packed(method, TensorSpec(DEQUANTIZED_DTYPE, shape), parts, settings)


def _refuse_strays(source: Checkpoint, method: str, packed: Mapping[str, Packed], used: set[str]) -> None:
    """SourceError for what belongs to a quantized weight that is not there, and for a weight that is there twice."""
    ends = {part.end for form in METHODS[method] for part in form.parts.values()}
    for name, spec in source.tensors.items():
        if name in packed and name not in used:
            raise SourceError(f"{name} is there both quantized and not", "download the checkpoint again")
        if name not in used and (name.endswith(tuple(ends)) or spec.dtype in _FP8):
            raise SourceError(
                f"{name} belongs to a quantized weight ({method}) that is not there", "download the checkpoint again"
            )


def _standing_for(source: Checkpoint, packed: dict[str, Packed]) -> Checkpoint:
    """`source` with each weight in the place of its codes, and nothing left that says how it was quantized."""
    by_codes = {stored.parts["codes"]: weight for weight, stored in packed.items()}
    gone = {part for stored in packed.values() for part in stored.parts.values()}
    headers: dict[str, Header] = {}
    where: dict[str, str] = {}
    for shard, header in source.headers.items():
        tensors: dict[str, TensorSpec] = {}
        for name, spec in header.tensors.items():
            if name in by_codes:
                tensors[by_codes[name]] = packed[by_codes[name]].spec
            elif name not in gone and not name.endswith(_OF_ACTIVATIONS):
                tensors[name] = spec
        if tensors:  # a shard may hold nothing but scales
            tensors = {name: tensors[name] for name in data_order(tensors)}
            headers[shard] = Header(tensors, header.metadata, encode_header(tensors, header.metadata)[8:])
            where |= dict.fromkeys(tensors, shard)
    config = _without_quantization(source.config)
    texts = {CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    if INDEX in source.texts:
        total = sum(spec.nbytes for header in headers.values() for spec in header.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        texts[INDEX] = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    files = {name: size for name, size in source.files.items() if name not in SIDE_FILES}
    return Checkpoint(source.folder, config, texts, headers, where, files, packed, source)


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in _CONFIG_KEYS}
    kept |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if isinstance(kept.get(key), str)}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = _without_quantization(kept["text_config"])
    return kept


# The shape of a weight by those of its parts, which have to fit together.


def _of_blocks(specs: Specs, _: Mapping[str, Any]) -> tuple[int, ...]:
    """codes [E, C, R / 32, 16], scales [E, C, R / 32] -> [E, R, C]: 32 values of a column share a scale."""
    *outer, groups, nibbles = specs["codes"].shape
    _expect(len(outer) == 2 and nibbles == 16, f"its shape is {list(specs['codes'].shape)}")
    _expect_shape(specs, "scales", (*outer, groups))
    return (outer[0], 32 * groups, outer[1])


def _of_fp8(specs: Specs, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """codes [..., R, C], scales [..., R / b1 rounded up, C / b2 rounded up], or one for all."""
    shape = specs["codes"].shape
    if math.prod(specs["scales"].shape) == 1:
        return shape
    rows, columns = fp8_block(settings)
    _expect(len(shape) >= 2, f"its shape is {list(shape)}")
    _expect_shape(specs, "scales", (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)))
    return shape


def fp8_block(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale. ValueError where the settings do not say."""
    match settings.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise ValueError(f"config.json says {other!r} for weight_block_size")


def _of_gptq(specs: Specs, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """codes [C bits / 32, R], scales [groups, R], zeros [groups, R bits / 32], order [C] -> [R, C]."""
    words, rows = _matrix(specs["codes"])
    return rows, _grouped(specs, settings, rows, words * 32 // settings["bits"])


def _of_awq(specs: Specs, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """codes [C, R bits / 32], scales [groups, R], zeros [groups, R bits / 32] -> [R, C]."""
    columns, words = _matrix(specs["codes"])
    rows = words * 32 // settings["bits"]
    return rows, _grouped(specs, settings, rows, columns)


def _grouped(specs: Specs, settings: Mapping[str, Any], rows: int, columns: int) -> int:
    size = settings.get("group_size", -1)
    _expect(type(size) is int and (size == -1 or size > 0), f"config.json says {size!r} for group_size")
    groups = 1 if size == -1 else -(-columns // size)
    _expect_shape(specs, "scales", (groups, rows))
    _expect_shape(specs, "zeros", (groups, rows * settings["bits"] // 32))
    if "order" in specs:
        _expect_shape(specs, "order", (columns,))
    return columns


def _of_words(specs: Specs, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """codes [R, C bits / 32], scales by the strategy -> [R, C]."""
    rows, words = _matrix(specs["codes"])
    bits = settings["weights"].get("num_bits")
    _expect(type(bits) is int and bits in _INTEGER_BITS, f"{bits} bits")
    shape = _by_strategy(specs, settings["weights"], rows, words * 32 // bits)
    scales, symmetric = specs["scales"].shape, settings["weights"].get("symmetric", True)
    _expect_zeros(specs, settings["weights"], scales if symmetric else (-(-rows * bits // 32), *scales[1:]))
    return shape


def _of_codes(specs: Specs, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """codes [R, C], scales by the strategy -> [R, C]."""
    asked, stored = settings["weights"].get("type", "int"), specs["codes"].dtype
    _expect(
        (stored in _FP8) == (asked == "float"), f"it is stored as {stored}, and config.json says {asked!r} for type"
    )
    shape = _by_strategy(specs, settings["weights"], *_matrix(specs["codes"]))
    _expect_zeros(specs, settings["weights"], specs["scales"].shape)
    return shape


def _by_strategy(specs: Specs, weights: Mapping[str, Any], rows: int, columns: int) -> tuple[int, int]:
    scales = specs["scales"].shape
    match weights.get("strategy"), weights.get("group_size"), weights.get("block_structure"):
        case ("group", int(size), _) if size > 0:
            _expect_shape(specs, "scales", (rows, -(-columns // size)))
        case ("block", _, [int(height), int(width)]) if height > 0 and width > 0:
            _expect_shape(specs, "scales", (-(-rows // height), -(-columns // width)))
        case ("channel", _, _):
            _expect_shape(specs, "scales", (rows, 1))
        case ("tensor", _, _):
            _expect(math.prod(scales) == 1, f"its scales are {list(scales)}, not one")
        case (strategy, size, block):
            raise ValueError(
                f"config.json says {strategy!r} for strategy, group_size {size!r}, block_structure {block!r}"
            )
    return rows, columns


def _expect_zeros(specs: Specs, weights: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """They may be left out where the scheme is symmetric."""
    if "zeros" in specs:
        _expect_shape(specs, "zeros", shape)
    else:
        _expect(weights.get("symmetric", True), "its scheme is not symmetric, and there are no zeros")


def _matrix(spec: TensorSpec) -> tuple[int, int]:
    _expect(len(spec.shape) == 2, f"its shape is {list(spec.shape)}")
    return spec.shape[0], spec.shape[1]


def _expect_shape(specs: Specs, role: str, shape: tuple[int, ...]) -> None:
    found = specs[role].shape
    _expect(found == shape, f"its {role} are {list(found)}, not {list(shape)}")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _scheme(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config group of compressed-tensors that a module is quantized by: of several, the one that names it."""
    groups = [{**group, "format": group.get("format") or settings.get("format")} for group in _groups(settings)]
    named = [group for group in groups if any(_names(str(t), module) for t in group.get("targets") or ())]
    others = [group for group in groups if not any(str(t).startswith("re:") for t in group.get("targets") or ())]
    chosen = (named or others or groups)[0]
    if not isinstance(chosen.get("weights"), dict):
        raise SourceError(
            f"config.json has no scheme for the weights of {module}", "take the config.json that belongs to the weights"
        )
    return chosen


def _names(target: str, module: str) -> bool:
    """Whether a target, a module's name or a pattern after `re:`, is that of a module."""
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as error:
        raise SourceError(
            f"config.json has a target {target!r} that is no pattern: {error}",
            "take the config.json that belongs to the weights",
        ) from error


_COMPRESSED_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_FORM_KEYS = ("version", "checkpoint_format", "format")  # of AWQ, of GPTQ, and what newer releases say for both
_INTEGER_FORMS = {"gptq": ("", "gptq", "gptq_v2"), "awq": ("", "gemm")}
_WORDS = {"scales": _Part(".scales", _FLOATS), "zeros": _Part(".qzeros", ("I32",))}
METHODS: dict[str, tuple[_Form, ...]] = {
    "mxfp4": (_Form("_blocks", ("U8",), "", {"scales": _Part("_scales", ("U8",))}, _of_blocks),),
    "fp8": (_Form("", _FP8, "", {"scales": _Part("_scale_inv", (*_FLOATS, "F8_E8M0", "U8"))}, _of_fp8),),
    "compressed-tensors": (
        _Form(
            *(".weight_packed", ("I32",), ".weight"),
            {"scales": _Part(".weight_scale", _FLOATS), "shape": _Part(".weight_shape", ("I64", "I32"))},
            _of_words,
            {"zeros": _Part(".weight_zero_point", ("I32",))},
        ),
        _Form(
            *(".weight", (*_FP8, "I8"), ".weight", {"scales": _Part(".weight_scale", _FLOATS)}, _of_codes),
            {"zeros": _Part(".weight_zero_point", ("I8", *_FP8))},
        ),
    ),
    "gptq": (_Form(".qweight", ("I32",), ".weight", _WORDS, _of_gptq, {"order": _Part(".g_idx", ("I32", "I64"))}),),
    "awq": (_Form(".qweight", ("I32",), ".weight", _WORDS, _of_awq),),
}
