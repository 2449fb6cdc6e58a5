"""safetensors files: a strict look at the header, and a writer that streams.

The `safetensors` package reads the data as tensors (tensors.py). The header is parsed here as well, because a damaged
file must be told apart from a Git-LFS pointer or a half-finished download, and because a plan needs sizes without any
weights.
The package's own `save_file` needs a whole shard in memory, leaves it mode 0600 and does not flush it to disk; a
converter that holds one expert at a time writes through `HashingFile`.

File: 8 bytes little-endian N, N bytes of JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}}, then the data.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mreader.errors import SourceError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16},
    **{"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64},
}
LFS_POINTER = b"version https://git-lfs"  # how the text begins that Git LFS leaves in place of a file
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")  # JSON can spell it as an escape, UTF-8 cannot
_LARGEST_HEADER = 100_000_000  # the bound of the reference implementation
_MOST_AXES = 64
# Bytes read and hashed in one go. While torch is imported a thread gets the interpreter lock back only after some
# milliseconds, so it should not ask for it more often.
HASHED_AT_ONCE = 1 << 24
_FLUSHED_AT_ONCE = 1 << 27  # bytes
_MOST_PARTS = os.sysconf("SC_IOV_MAX")
_ALIGNMENT = 64  # bytes: a cache line, and twice what a row of sketch codes needs


@dataclass(frozen=True)
class TensorSpec:
    """dtype (safetensors' name) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    @property
    def alignment(self) -> int:
        return max(_BITS[self.dtype] // 8, 1)

    @property
    def is_whole_bytes(self) -> bool:
        """Whether no byte holds parts of two numbers."""
        return _BITS[self.dtype] % 8 == 0


@dataclass(frozen=True)
class Header:
    """The parsed header of one file.

    tensors:  name -> dtype and shape, in the order of their data
    metadata: the `__metadata__` entry
    text:     the JSON as it stands in the file, padding included
    """

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]
    text: bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return 8 + len(self.text) + sum(spec.nbytes for spec in self.tensors.values())

    @cached_property
    def begins(self) -> dict[str, int]:
        """tensor -> its first byte in the file."""
        return _begins(self.tensors, 8 + len(self.text))


def read_header(path: Path) -> Header:
    """The header of the file at `path`. SourceError where the file is not a whole safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == LFS_POINTER[:8]:
                raise lfs_pointer(path.name)
            if size < 8 or length > _LARGEST_HEADER or 8 + length > size:
                raise _truncated(path.name, size, f"its header alone ends at byte {8 + length:,}")
            text = file.read(length)
    except OSError as error:
        raise SourceError(
            f"{path.name} cannot be read: {error.strerror}", "check the file and its permissions"
        ) from error
    return parse_header(text, size, path.name)


def parse_header(text: bytes, size: int, name: str) -> Header:
    """The header `text` of a file of `size` bytes called `name`.

    Raises SourceError unless every byte of the data belongs to exactly one tensor, UnsupportedError for a new dtype.
    """
    try:
        entries = json.loads(text, object_pairs_hook=lambda pairs: _without_duplicates(pairs, name))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} has no valid safetensors header: {error}", "download the file again") from error
    if not isinstance(entries, dict):
        raise SourceError(f"{name} has no valid safetensors header: not a JSON object", "download the file again")
    metadata = _metadata(entries.pop("__metadata__", {}), name)
    if LONE_SURROGATE.search("".join([*entries, *metadata, *metadata.values()])):
        raise SourceError(f"{name} has a header with names that are not Unicode text", "download the file again")
    position, tensors = 0, {}
    for key, begin, end, spec in sorted((_entry(k, v, name) for k, v in entries.items()), key=lambda e: (e[1], e[2])):
        if begin != position or end - begin != spec.nbytes:
            raise SourceError(
                f"{name}: tensor {key} ({spec.dtype} {list(spec.shape)}) claims bytes {begin:,} to {end:,}, "
                f"expected {position:,} to {position + spec.nbytes:,}",
                "the file is damaged; download it again",
            )
        position, tensors[key] = end, spec
    header = Header(tensors, metadata, text)
    if size < header.nbytes:
        raise _truncated(name, size, f"its header promises {header.nbytes:,}")
    if size > header.nbytes:
        raise SourceError(f"{name} has {size - header.nbytes:,} bytes after its last tensor", "download the file again")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise SourceError(f"{name} holds tensor {double} twice", "the file is damaged; download it again")
    return entries


def _metadata(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise SourceError(f"{name} has __metadata__ that does not map names to text", "download the file again")
    return value


def _entry(key: str, value: Any, name: str) -> tuple[str, int, int, TensorSpec]:
    try:
        begin, end = value["data_offsets"]
        dtype, shape = value["dtype"], tuple(value["shape"])
        whole = isinstance(dtype, str) and len(shape) <= _MOST_AXES
        whole = whole and all(type(n) is int and 0 <= n < 1 << 63 for n in (begin, end, *shape))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise SourceError(f"{name}: tensor {key} has an unreadable header entry", "download the file again")
    if dtype not in _BITS:
        raise UnsupportedError(f"{name}: tensor {key} is stored as {dtype}, which is unknown", "upgrade mreader")
    return key, begin, end, TensorSpec(dtype, shape)


def lfs_pointer(name: str) -> SourceError:
    """The error of a file `name` that is no more than a Git-LFS pointer."""
    return SourceError(
        f"{name} is a Git-LFS pointer, not the file it stands for",
        "run `git lfs pull` in the repository, or download it again with `hf download`",
    )


def _truncated(name: str, size: int, promise: str) -> SourceError:
    return SourceError(
        f"{name} is truncated: {size:,} bytes, and {promise}",
        "download it again (`hf download` resumes and checks sizes)",
    )


def data_order(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """The order in which a shard stores its tensors, so that each is aligned without gaps.

    Tensors whose size is a multiple of 64 bytes come first: they start at multiples of 64 of the file. The others
    follow by falling item size. Within both groups the given order is kept.
    """
    odd = {name: spec.nbytes % _ALIGNMENT != 0 for name, spec in tensors.items()}
    return sorted(tensors, key=lambda name: (odd[name], -tensors[name].alignment if odd[name] else 0))


def encode_header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON of the header of a file that holds `tensors` in `data_order`; its end is a multiple of 64."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in data_order(tensors):
        spec = tensors[name]
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def data_begins(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> dict[str, int]:
    """tensor -> its first byte in the file with the header that `encode_header` gives, in the order of the data."""
    return _begins({name: tensors[name] for name in data_order(tensors)}, len(encode_header(tensors, metadata)))


def _begins(tensors: Mapping[str, TensorSpec], first: int) -> dict[str, int]:
    return dict(zip(tensors, accumulate((spec.nbytes for spec in tensors.values()), initial=first), strict=False))


class FileRecord(NamedTuple):
    """sha256 in hexadecimal and size in bytes of a finished file."""

    sha256: str
    bytes: int

    def entry(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "bytes": self.bytes}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> FileRecord:
        """The record in a line of the journal or in a manifest. KeyError or TypeError where it is none."""
        sha256, size = entry["sha256"], entry["bytes"]
        if not isinstance(sha256, str) or type(size) is not int:
            raise TypeError(f"sha256 and bytes of a file are {sha256!r} and {size!r}")
        return cls(sha256, size)


@dataclass
class HashingFile:
    """A file that is hashed while it is written, and appears under its name only when whole.

    Its parts may be written in any order, by several threads: some are ready long before others. A thread of its own
    follows with the hash as far as nothing is missing, and finds in memory what has just been written. `commit` flushes
    the file to disk, sets the mode that the umask gives and renames it; without `commit` nothing appears.
    """

    scratch: Path
    target: Path
    _whole: int = field(default=0, init=False)  # bytes from the start without a gap
    _beyond: dict[int, int] = field(default_factory=dict, init=False)  # parts behind a gap: begin -> end
    _unflushed: int = field(default=0, init=False)  # bytes written since the last flush began
    _flush: Future[None] | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)
    _abandoned: bool = field(default=False, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)

    def __enter__(self) -> HashingFile:
        self.scratch.unlink(missing_ok=True)  # what a killed run left has the mode of its own umask
        self._file = self.scratch.open("w+b", buffering=0)
        self._threads = ThreadPoolExecutor(2)
        self._hash = self._threads.submit(self._follow)
        return self

    def write(self, data: Buffer) -> None:
        """Append `data`."""
        self.write_at(self._whole, [data])

    def write_at(self, position: int, parts: Sequence[Buffer]) -> None:
        """Write `parts`, one after the other, from byte `position` on, which nothing else is written to."""
        end = _write_all(self._file.fileno(), parts, position)
        if end == position:
            return
        with self._changed:
            self._flush_in_time(end - position)
            self._beyond[position] = end
            while self._whole in self._beyond:
                self._whole = self._beyond.pop(self._whole)
            self._changed.notify()

    def record(self) -> FileRecord:
        """The record of what has been written, which is all: nothing is written after this."""
        if self._beyond:
            raise RuntimeError(f"{self.scratch} has a gap at byte {self._whole}")
        with self._changed:
            self._ended = True
            self._changed.notify()
        return FileRecord(self._hash.result(), self._whole)

    def commit(self) -> FileRecord:
        """Make the file appear at `target`; its record."""
        if self._flush:
            self._flush.result()
        os.fsync(self._file.fileno())
        record = self.record()
        self._threads.shutdown()
        self._file.close()
        self.scratch.replace(self.target)
        sync_folder(self.target.parent)
        return record

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify()
        self._threads.shutdown()
        self._file.close()
        self.scratch.unlink(missing_ok=True)

    def _flush_in_time(self, nbytes: int) -> None:
        """Have the disk begin: `commit` would find gigabytes to flush otherwise.

        POSIX_FADV_DONTNEED begins as well, but drops what is on the disk from memory before it is hashed.
        """
        self._unflushed += nbytes
        if self._unflushed >= _FLUSHED_AT_ONCE and (self._flush is None or self._flush.done()):
            if self._flush:
                self._flush.result()  # an error of the disk is told once
            self._unflushed = 0
            self._flush = self._threads.submit(os.fdatasync, self._file.fileno())

    def _follow(self) -> str:
        """The sha256 of the whole file, in hexadecimal."""
        digest, position, buffer = hashlib.sha256(), 0, bytearray()
        while (size := min(self._whole_beyond(position) - position, HASHED_AT_ONCE)) > 0:
            if len(buffer) < size:
                buffer = bytearray(size)
            with memoryview(buffer) as view:
                read = os.preadv(self._file.fileno(), [view[:size]], position)
                if read == 0:
                    raise OSError(errno.EIO, "shrank while it was written", str(self.scratch))
                digest.update(view[:read])
            position += read
        return digest.hexdigest()

    def _whole_beyond(self, position: int) -> int:
        """Waits for the start without a gap to grow beyond `position`; to where it goes, `position` where it ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._whole > position or self._ended or self._abandoned)
            return position if self._abandoned else self._whole


def _write_all(descriptor: int, parts: Sequence[Buffer], position: int) -> int:
    """Write all parts in as few calls as there may be, each without the interpreter lock; where they end."""
    views = (memoryview(part) for part in parts)
    left = deque(view.cast("B") for view in views if view.nbytes)
    while left:
        written = os.pwritev(descriptor, list(islice(left, _MOST_PARTS)), position)
        position += written
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]
    return position


def sync_folder(folder: Path) -> None:
    """Make the renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path, progress: Callable[[int], None] = lambda _: None, chunk: int = HASHED_AT_ONCE) -> str:
    """sha256 of a file in hexadecimal; `progress` is told the size of each chunk."""
    digest = hashlib.sha256()
    for data in _chunks(path, chunk):
        digest.update(data)
        progress(len(data))
    return digest.hexdigest()


def _chunks(path: Path, size: int) -> Iterator[memoryview]:
    buffer = bytearray(size)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield view[:count]
