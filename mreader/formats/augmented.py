"""The augmented checkpoint, format version 1: tensors, config entry, manifest. SPEC.md is the specification.

E experts, I channels of an expert, H hidden size, B = 128, nb = ceil(H / B), r rank of the recovery map.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mreader.errors import SourceError, UnsupportedError, UsageError
from mreader.formats.architectures import Architecture, RoutedLayer, compare_configs, find_architecture
from mreader.formats.checkpoint import CONFIG, Checkpoint, assemble, open_checkpoint
from mreader.formats.codes import BLOCK, Code, count_blocks, get_code
from mreader.formats.quantized import dequantized
from mreader.formats.safetensors_file import FileRecord, TensorSpec, parse_header

if TYPE_CHECKING:
    from torch import Tensor

    from mreader.formats.bits import MappedBits
    from mreader.formats.tensors import LazyTensors

METHOD = "mreader"
FORMAT_VERSION = 1
MANIFEST = "mreader_manifest.json"
SOURCE = "mreader_source.json"
WORK_FOLDER = ".mreader"
SCORES = ("norm", "rho", "variance")


@dataclass(frozen=True)
class FormatOptions:
    """What a conversion chooses; `quantization_config` of config.json holds it.

    codes:       sketch code, "ternary" or "quaternary"
    rank:        r, columns of the recovery map
    seed:        seed of the rotation signs
    channels:    default budget, the fraction of the K * I candidate channels that is computed exactly
    coordinates: default number of coordinates read of each rotation block, 1..128
    score:       default score, "norm", "rho" or "variance"
    """

    codes: str = "ternary"
    rank: int = 32
    seed: int = 0
    channels: float = 0.122
    coordinates: int = 80
    score: str = "variance"

    def __post_init__(self) -> None:
        get_code(self.codes)
        if self.rank < 0:
            raise UsageError(f"rank is {self.rank}", "choose 0 (no recovery map) or more")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}", "choose 0 to 2**63 - 1")
        if not 0 < self.channels <= 1:
            raise UsageError(f"channels is {self.channels}", "choose a fraction above 0, at most 1")
        if not 1 <= self.coordinates <= BLOCK:
            raise UsageError(f"coordinates is {self.coordinates}", f"choose 1 to {BLOCK}")
        if self.score not in SCORES:
            raise UsageError(f"score is {self.score}", f"choose one of {', '.join(SCORES)}")

    @property
    def code(self) -> Code:
        return get_code(self.codes)

    def config_entry(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        return {"quant_method": METHOD, "format_version": FORMAT_VERSION, "block": BLOCK, **asdict(self)}


DEFAULT_OPTIONS = FormatOptions()
_KINDS: dict[type, str] = {int: "whole number", float: "number", str: "name"}


def parse_config_entry(entry: Any, where: str = "this") -> FormatOptions:
    """The options in a `quantization_config`.

    Raises UnsupportedError for another version or block, UsageError for one of another method, and SourceError for
    what no conversion writes there.
    """
    if not isinstance(entry, Mapping):
        raise SourceError(
            f"config.json says {entry!r} for quantization_config, which is no object", "convert the source again"
        )
    if entry.get("quant_method") != METHOD:
        raise UsageError(f"{where} is not an augmented checkpoint", "make one with `mreader convert SOURCE OUT`")
    version = entry.get("format_version")
    if version != FORMAT_VERSION:
        raise UnsupportedError(
            f"the checkpoint has format version {version}, this release of mreader reads version {FORMAT_VERSION}",
            "upgrade mreader" if isinstance(version, int) and version > FORMAT_VERSION else "convert the source again",
        )
    if entry.get("block") != BLOCK:
        raise UnsupportedError(
            f"the checkpoint has rotation blocks of {entry.get('block')}, only {BLOCK} is known", "upgrade mreader"
        )
    names = [f.name for f in fields(FormatOptions)]
    missing = [name for name in names if name not in entry]
    if missing:
        raise SourceError(f"quantization_config of config.json has no {missing[0]}", "convert the source again")
    return _options({name: entry[name] for name in names})


def _options(values: Mapping[str, Any]) -> FormatOptions:
    """SourceError for a value that is not of the type of its default, or out of range."""
    for name, value in values.items():
        usual = type(getattr(DEFAULT_OPTIONS, name))
        if type(value) is not usual and (usual, type(value)) != (float, int):
            raise SourceError(
                f"quantization_config of config.json says {value!r} for {name}, which is no {_KINDS[usual]}",
                "convert the source again",
            )
    try:
        return FormatOptions(**values)
    except UsageError as error:
        raise SourceError(f"quantization_config of config.json: {error.cause}", "convert the source again") from error


def tensor_specs(
    experts: int, channels: int, hidden: int, dtype: str, options: FormatOptions, biased: bool = False
) -> dict[str, TensorSpec]:
    """Name below the experts' prefix -> dtype and shape of every tensor of an augmented layer (SPEC.md, Tensors).

    biased: whether the experts have biases
    """
    E, I, H, r = experts, channels, hidden, options.rank
    blocks = count_blocks(H)
    biases = {"gate_up_proj_bias": TensorSpec(dtype, (E, 2, I)), "down_proj_bias": TensorSpec(dtype, (E, H))}
    return {
        "gate_up_proj": TensorSpec(dtype, (E, 2, I, H)),
        "down_proj": TensorSpec(dtype, (E, I, H)),
        **(biases if biased else {}),
        "sketch_codes": TensorSpec("U8", (E, 2, blocks * BLOCK, options.code.row_bytes(I))),
        "sketch_scales": TensorSpec("F16", (E, 2, blocks, I)),
        "sketch_errors": TensorSpec("BF16", (E, 2, blocks, I)),
        "sketch_signs": TensorSpec("I8", (H,)),
        "down_norms": TensorSpec("F16", (E, I)),
        "recovery_basis": TensorSpec("F16", (H, r)),
        "recovery_coeffs": TensorSpec("F16", (E, I, r)),
    }


def layer_tensors(layer: RoutedLayer, options: FormatOptions) -> dict[str, TensorSpec]:
    """`tensor_specs` of one layer."""
    return tensor_specs(layer.experts, layer.channels, layer.hidden, layer.dtype, options, layer.is_biased)


def augmented_tensors(source: Checkpoint, architecture: Architecture, options: FormatOptions) -> dict[str, TensorSpec]:
    """Every tensor of the augmented checkpoint: an augmented layer stands where its first tensor stood in `source`."""
    begins = {layer.tensors[0]: layer for layer in architecture.layers}
    transformed = architecture.transformed
    result: dict[str, TensorSpec] = {}
    for name, spec in source.tensors.items():
        if name in begins:
            layer = begins[name]
            result |= {f"{layer.prefix}.{part}": s for part, s in layer_tensors(layer, options).items()}
        elif name not in transformed:
            result[name] = spec
    return result


@dataclass(frozen=True)
class Augmented:
    """An augmented checkpoint whose tensors are all there, with the right names, shapes and dtypes.

    checkpoint:   the folder as it is
    options:      how it was converted
    manifest:     the manifest, parsed
    source:       the checkpoint that it was made from, headers and texts only; a quantized one as it would be in full
    architecture: the routed experts of that source
    """

    checkpoint: Checkpoint
    options: FormatOptions
    manifest: dict[str, Any]
    source: Checkpoint
    architecture: Architecture

    @property
    def folder(self) -> Path:
        return self.checkpoint.path

    def tensors(self) -> LazyTensors:
        """Its tensors, memory-mapped."""
        from mreader.formats.tensors import LazyTensors  # torch: the rest of this module does without

        return LazyTensors(self.folder, self.checkpoint.where)

    def bits(self) -> MappedBits:
        """Its tensors as bits, memory-mapped."""
        return self.checkpoint.bits()

    def layer(self, layer: RoutedLayer, tensors: LazyTensors) -> dict[str, Tensor]:
        """The tensors of one augmented layer by their names below the experts' prefix."""
        return {part: tensors[f"{layer.prefix}.{part}"] for part in layer_tensors(layer, self.options)}


def is_augmented(folder: Path) -> bool:
    """Whether `folder` says that it holds an augmented checkpoint."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return bool(config["quantization_config"]["quant_method"] == METHOD)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def open_augmented(folder: Path) -> Augmented:
    """The augmented checkpoint in `folder`, opened lazily.

    Raises UsageError where it is none, UnsupportedError for a newer format, SourceError for a config.json that is not
    the source's, for tensors that are missing, unknown, or of a wrong shape or dtype, and for everything that
    `open_checkpoint` refuses.
    """
    if folder.is_dir() and not is_augmented(folder) and (folder / WORK_FOLDER).is_dir():
        raise SourceError(
            f"the conversion into {folder} has not ended", "run the same `mreader convert` again to resume"
        )
    checkpoint = open_checkpoint(folder)
    options = parse_config_entry(checkpoint.config.get("quantization_config") or {}, str(folder))
    manifest = read_manifest(folder)
    _refuse_other_options(options, manifest)
    source = dequantized(_recorded_source(_read_json(folder / SOURCE), manifest))
    architecture = find_architecture(source)
    compare_configs(checkpoint.config, source.config)
    _compare(checkpoint.tensors, augmented_tensors(source, architecture, options))
    return Augmented(checkpoint, options, manifest, source, architecture)


def _refuse_other_options(options: FormatOptions, manifest: Mapping[str, Any]) -> None:
    """SourceError where config.json gives the tensors another meaning than they were made with: some fit both."""
    made = manifest.get("options")
    if not isinstance(made, dict):
        return
    for name in ("codes", "seed"):
        if name in made and made[name] != getattr(options, name):
            raise SourceError(
                f"config.json has {name} {getattr(options, name)}, the checkpoint was converted with {made[name]}",
                "put back the config.json that belongs to it",
            )


def _compare(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    for name, spec in expected.items():
        if name not in found:
            raise SourceError(f"tensor {name} is missing", "download the checkpoint again, or convert the source again")
        if found[name] != spec:
            raise SourceError(
                f"tensor {name} is {found[name].dtype} {list(found[name].shape)}, "
                f"the format says {spec.dtype} {list(spec.shape)}",
                "download the checkpoint again, or convert the source again",
            )
    for name in found:
        if name not in expected:
            raise SourceError(f"tensor {name} does not belong to the format", "convert the source again")


def record_source(source: Checkpoint) -> dict[str, Any]:
    """mreader_source.json: texts and headers, from which `restore` writes the source's files again byte for byte."""
    return {"texts": source.texts, "headers": {name: h.text.decode() for name, h in source.headers.items()}}


def _recorded_source(record: Mapping[str, Any], manifest: Mapping[str, Any]) -> Checkpoint:
    try:
        sizes = {name: int(entry["bytes"]) for name, entry in manifest["source"]["files"].items()}
        texts, headers = record["texts"], record["headers"]
        return assemble(
            None,
            sizes,
            lambda name: str(texts[name]),
            lambda name: parse_header(headers[name].encode(), sizes[name], name),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{MANIFEST} or {SOURCE} lacks {error}", "download the checkpoint again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(
            f"{path.name} is missing", "download the checkpoint again, or convert the source again"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path.name} cannot be read: {error}", "download the checkpoint again") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path.name} does not hold a JSON object", "download the checkpoint again")
    return value


def describe_folder(
    options: Mapping[str, Any], versions: Mapping[str, str], source: Mapping[str, Any], files: Mapping[str, FileRecord]
) -> dict[str, Any]:
    """mreader_manifest.json.

    options:  FormatOptions, and what else decided the bytes of a conversion
    versions: package -> version that wrote the folder
    source:   repo, revision, and its files' hashes and sizes
    files:    of the folder, by name
    """
    return {
        "format_version": FORMAT_VERSION,
        "options": options,
        "versions": versions,
        "source": source,
        "files": {name: files[name].entry() for name in sorted(files)},
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the augmented checkpoint in `folder`. SourceError where there is none that can be read."""
    return _read_json(folder / MANIFEST)


def shard_index(shards: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, Any]:
    """model.safetensors.index.json of shards (file -> its tensors)."""
    total = sum(spec.nbytes for tensors in shards.values() for spec in tensors.values())
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
