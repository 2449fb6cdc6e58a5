"""A Hugging Face checkpoint folder as it is: config, shards and their headers, other files. Reads no weights.

Everything that can be wrong with a checkpoint before its weights are looked at is found here.
"""

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mreader.errors import SourceError, UnsupportedError
from mreader.formats.bits import MappedBits
from mreader.formats.safetensors_file import (
    LFS_POINTER,
    LONE_SURROGATE,
    Header,
    TensorSpec,
    lfs_pointer,
    parse_header,
    read_header,
)

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Weights in other formats, and weight indexes: never copied into an augmented checkpoint.
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".npz", ".distcp"),
    *(".onnx", ".onnx_data", ".tflite"),
)
_WEIGHT_INDEX = ".index.json"
# What git, the Hub's client, conversions, restores and Python keep beside a checkpoint. The Hub adds lines to
# .gitattributes on its own and leaves out what .gitignore names: published with a checkpoint, they would not stay what
# a manifest says.
_OF_TOOLS = (".git", ".gitattributes", ".gitignore", ".cache", ".mreader", ".mreader-restore", "__pycache__")
_ONE_OF_MANY = re.compile(r"-\d+-of-0*([2-9]|[1-9]\d+)\.safetensors")
_UNWRITABLE = ("Cc", "Cs")  # control characters, and what is no UTF-8: nobody could type or read them
_LARGEST_POINTER = 1024  # bytes, by the Git-LFS specification
_DEEPEST_JSON = 100  # objects and lists in one another: far more than any config has, and what json can write again


@dataclass(frozen=True)
class Selection:
    """Those of the files of a folder or a repository that make the checkpoint.

    texts:  config.json and the index, verbatim, by name
    shards: the safetensors files with its weights, in order of name
    where:  tensor -> shard by the index, None without one
    files:  every other file that belongs to it (no weights, no index, nothing that tools keep) -> size in bytes
    """

    texts: dict[str, str]
    shards: tuple[str, ...]
    where: dict[str, str] | None
    files: dict[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(sorted({*self.texts, *self.shards, *self.files}))


@dataclass(frozen=True)
class Packed:
    """A tensor that is stored in several others, quantized.

    method:   how, a name in formats/quantized.py
    spec:     what it is once dequantized
    parts:    role ("codes", "scales", ...) -> stored tensor, the codes first
    settings: what config.json says of it
    """

    method: str
    spec: TensorSpec
    parts: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole as far as its headers tell.

    folder:  where it lies; None for a Hub repository of which only headers were fetched
    config:  config.json, parsed
    texts:   config.json and the index, verbatim, by name
    headers: shard -> header, in order of name
    where:   tensor -> shard
    files:   every other file that belongs to it (no weights, no index, no config) -> size in bytes

    One that stands for a quantized checkpoint is as that would be in full:

    packed:   tensor -> what it is computed from, for those that are stored quantized
    original: the checkpoint on disk, None where that is this one
    """

    folder: Path | None
    config: dict[str, Any]
    texts: dict[str, str]
    headers: dict[str, Header]
    where: dict[str, str]
    files: dict[str, int]
    packed: Mapping[str, Packed] = field(default_factory=dict)
    original: "Checkpoint | None" = None

    def spec(self, tensor: str) -> TensorSpec:
        return self.headers[self.where[tensor]].tensors[tensor]

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor, shard by shard in the order of its data."""
        return {name: spec for header in self.headers.values() for name, spec in header.tensors.items()}

    @property
    def on_disk(self) -> "Checkpoint":
        """What lies in the folder: this checkpoint, or the quantized one that it stands for."""
        return self.original or self

    @property
    def quantized(self) -> str | None:
        """The method by which the weights on disk are quantized that this checkpoint has in full; None for none."""
        return next((packed.method for packed in self.packed.values()), None)

    def stored(self, tensor: str) -> tuple[str, ...]:
        """The tensors on disk that a tensor is, or is computed from."""
        return tuple(self.packed[tensor].parts.values()) if tensor in self.packed else (tensor,)

    def stored_bytes(self, tensor: str) -> int:
        """The size of those."""
        return sum(self.on_disk.spec(name).nbytes for name in self.stored(tensor))

    @property
    def nbytes(self) -> int:
        """Size of the shards."""
        return sum(header.nbytes for header in self.headers.values())

    def bits(self) -> MappedBits:
        """Its tensors as bits, memory-mapped."""
        return MappedBits(self.path, self.headers, self.where)

    @property
    def path(self) -> Path:
        if self.folder is None:
            raise SourceError(
                "the weights of this repository have not been downloaded", "fetch them with `hf download` first"
            )
        return self.folder


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. SourceError or UnsupportedError, with the file at fault, where it is not whole."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise SourceError(
            f"{folder} {what}", "name a folder with config.json and safetensors, or a Hub id like org/name"
        )
    sizes = list_files(folder)
    checkpoint = assemble(
        folder, sizes, lambda name: _read_text(folder / name), lambda name: read_header(folder / name)
    )
    for name, size in checkpoint.files.items():
        _refuse_unusable(folder, name, size)
    return checkpoint


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of `folder`, parsed. SourceError where it is not there or no JSON object."""
    return _json_object(CONFIG, _read_text(folder / CONFIG))


def assemble(
    folder: Path | None, sizes: Mapping[str, int], text: Callable[[str], str], header: Callable[[str], Header]
) -> Checkpoint:
    """The checkpoint made of files of the given `sizes`, read through `text` and `header`: a folder or a remote one."""
    chosen = select_files(sizes, text)
    headers = {shard: header(shard) for shard in chosen.shards}
    found = _locate(headers)
    if chosen.where is not None:
        _compare_index(chosen.where, found)
    return Checkpoint(folder, _json_object(CONFIG, chosen.texts[CONFIG]), chosen.texts, headers, found, chosen.files)


def select_files(sizes: Mapping[str, int], text: Callable[[str], str]) -> Selection:
    """What belongs to the checkpoint of all files (name -> size): the one answer for folders and for repositories.

    Raises SourceError where config, index or shards are missing or at odds, UnsupportedError for other weights only.
    """
    sizes = {name: size for name, size in sizes.items() if not _is_of_tools(name)}
    for name in sizes:
        if any(unicodedata.category(letter) in _UNWRITABLE for letter in name):
            raise SourceError(
                f"the file name {name!r} cannot be written down", "rename it, or use a UTF-8 locale like C.UTF-8"
            )
    if CONFIG not in sizes:
        raise SourceError(
            "there is no config.json", "a checkpoint folder holds config.json beside its safetensors files"
        )
    texts = {CONFIG: text(CONFIG)}
    _json_object(CONFIG, texts[CONFIG])
    where = None
    if INDEX in sizes:
        texts[INDEX] = text(INDEX)
        where = _index_map(texts[INDEX])
        _refuse_two_answers(sizes, where)
    shards = tuple(sorted(set(where.values()))) if where is not None else (_only_shard(sizes),)
    for shard in shards:
        if shard not in sizes:
            raise SourceError(f"{INDEX} names {shard}, which is not there", "download the missing shard")
    files = {name: size for name, size in sizes.items() if name not in (*texts, *shards) and not is_weights(name)}
    return Selection(texts, shards, where, files)


def remote_checkpoint(
    sizes: Mapping[str, int], text: Callable[[str], str], header_text: Callable[[str], bytes]
) -> Checkpoint:
    """The checkpoint of a Hub repository from its file list, two texts and the header bytes of each shard."""
    return assemble(None, sizes, text, lambda name: parse_header(header_text(name), sizes[name], name))


def is_safe_name(name: str) -> bool:
    """Whether `name`, joined to a folder, stays inside: names in a manifest may come from anyone."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def list_files(folder: Path) -> dict[str, int]:
    """Every file below `folder`, links resolved -> its size; what tools keep there is left out."""
    sizes = {}
    for name in sorted(name for name in _names(folder) if not _is_of_tools(name)):
        path = folder / name
        try:
            sizes[name] = path.stat().st_size
        except OSError as error:
            what = "is a link to nothing" if path.is_symlink() else f"cannot be read: {error.strerror}"
            raise SourceError(
                f"{name} {what}", "download the checkpoint again, or copy it with links resolved"
            ) from error
        if not path.is_file():
            raise SourceError(f"{name} is neither a file nor a folder", "remove it from the checkpoint")
    return sizes


def _names(folder: Path) -> Iterator[str]:
    seen = set()
    for place, folders, files in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        here = Path(place)
        if here.resolve() in seen:  # a link that leads back up
            folders.clear()
            continue
        seen.add(here.resolve())
        folders[:] = [name for name in folders if not _is_of_tools(name)]
        yield from ((here / name).relative_to(folder).as_posix() for name in files)


def _refuse_folder(error: OSError) -> None:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}", "check its permissions") from error


def _refuse_unusable(folder: Path, name: str, size: int) -> None:
    """A tokenizer may be kept in Git LFS as well: a pointer, or a file that cannot be read, is found late otherwise."""
    try:
        with (folder / name).open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror}", "check the file's permissions") from error
    if start == LFS_POINTER and size <= _LARGEST_POINTER:
        raise lfs_pointer(name)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{path.name} is not UTF-8 text", "download the file again") from error
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror}", "check the file's permissions") from error


def _json_object(name: str, text: str) -> dict[str, Any]:
    if text.startswith(LFS_POINTER.decode()):
        raise lfs_pointer(name)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} is not valid JSON: {error}", "download the file again") from error
    if not isinstance(value, dict):
        raise SourceError(f"{name} does not hold a JSON object", "download the file again")
    _refuse_unwritable(name, value)
    return value


def _refuse_unwritable(name: str, value: dict[str, Any]) -> None:
    """SourceError for JSON that can be read and not written again: an augmented config.json holds its source's."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST_JSON):
        if any(isinstance(part, str) and LONE_SURROGATE.search(part) for part in level):
            raise SourceError(f"{name} holds half of a surrogate pair, which is not Unicode text", "correct its text")
        level = [inner for part in level for inner in _inside(part)]
    if level:
        raise SourceError(f"{name} is nested more than {_DEEPEST_JSON} levels deep", "download the file again")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _index_map(text: str) -> dict[str, str]:
    where = _json_object(INDEX, text).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise SourceError(f"{INDEX} has no weight_map", "download the file again")
    return where


def _refuse_two_answers(sizes: Mapping[str, int], where: Mapping[str, str]) -> None:
    if SINGLE in sizes and SINGLE not in where.values():
        raise SourceError(
            f"there are both {SINGLE} and {INDEX}, which does not name it", "remove the one that is out of date"
        )


def _only_shard(sizes: Mapping[str, int]) -> str:
    shards = [name for name in sizes if name.endswith(".safetensors") and "/" not in name]
    if SINGLE in shards:
        return SINGLE
    if len(shards) == 1 and not _ONE_OF_MANY.search(shards[0]):
        return shards[0]
    if shards:
        raise SourceError(
            f"{shards[0]} is one of several shards, but there is no {INDEX}",
            "download the index and all shards that it names",
        )
    others = [name for name in sizes if is_weights(name) and not name.endswith(_WEIGHT_INDEX)]
    if others:
        raise UnsupportedError(
            f"the weights are in {max(others, key=lambda name: sizes[name])}, and only safetensors are read",
            "save the model again with transformers' save_pretrained, or take the repository's safetensors revision",
        )
    raise SourceError("there are no safetensors files", "download the weights as well")


def _locate(headers: Mapping[str, Header]) -> dict[str, str]:
    found: dict[str, str] = {}
    for shard, header in headers.items():
        for name in header.tensors:
            if name in found:
                raise SourceError(
                    f"tensor {name} is in both {found[name]} and {shard}", "download the checkpoint again"
                )
            found[name] = shard
    return found


def _compare_index(where: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name, shard in where.items():
        if name not in found:
            raise SourceError(f"{INDEX} places {name} in {shard}, which does not hold it", "download both again")
        if found[name] != shard:
            raise SourceError(f"{INDEX} places {name} in {shard}, but it is in {found[name]}", "download both again")
    for name, shard in found.items():
        if name not in where:
            raise SourceError(f"{shard} holds {name}, which {INDEX} does not list", "download both again")


def is_weights(name: str) -> bool:
    """Whether `name` is that of a file of weights, in whatever format, or of an index of them."""
    return name.endswith((*_WEIGHT_SUFFIXES, _WEIGHT_INDEX))


def _is_of_tools(name: str) -> bool:
    return any(part in _OF_TOOLS for part in name.split("/"))
