"""safetensors files: what is written can be read by the safetensors package, and what is damaged is told apart."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from mreader.errors import MreaderError, SourceError, UnsupportedError
from mreader.formats.safetensors_file import (
    HashingFile,
    TensorSpec,
    data_order,
    encode_header,
    parse_header,
    read_header,
    sha256_file,
)
from mreader.formats.tensors import DTYPE_NAMES, LazyTensors, as_bytes

ITEM_SIZE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
HEADER_END = 64

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
sizes_of_rows = st.sampled_from([(2, 32), (3, 64), (4, 128), (1, 16), (7,), (5, 3)])
specs = st.builds(TensorSpec, st.sampled_from(sorted(ITEM_SIZE)), shapes | sizes_of_rows)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
tables = st.dictionaries(names, specs, max_size=12)
metadata = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.text('ab"\\é'), max_size=2)


def bytes_of(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * ITEM_SIZE[spec.dtype]


def file_of(tensors: dict[str, TensorSpec], meta: dict[str, str]) -> bytes:
    """A whole file: byte i of every tensor is i % 251."""
    data = b"".join(bytes(i % 251 for i in range(bytes_of(tensors[name]))) for name in data_order(tensors))
    return encode_header(tensors, meta) + data


def offsets_of(data: bytes) -> dict[str, int]:
    """Where each tensor begins in the file."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


@given(tables, metadata)
def test_the_safetensors_package_reads_what_is_written(tensors: dict[str, TensorSpec], meta: dict[str, str]) -> None:
    read = load(file_of(tensors, meta))
    assert read.keys() == tensors.keys()
    for name, tensor in read.items():
        assert DTYPE_NAMES[tensor.dtype] == tensors[name].dtype
        assert tuple(tensor.shape) == tensors[name].shape
        assert bytes(as_bytes(tensor)) == bytes(i % 251 for i in range(bytes_of(tensors[name])))


@given(tables, metadata)
def test_a_header_is_parsed_into_what_it_was_made_from(tensors: dict[str, TensorSpec], meta: dict[str, str]) -> None:
    data = file_of(tensors, meta)
    text = encode_header(tensors, meta)[8:]
    header = parse_header(text, len(data), "file")
    assert header.tensors == tensors
    assert list(header.tensors) == sorted(data_order(tensors), key=lambda name: offsets_of(data)[name])
    assert header.metadata == meta
    assert header.text == text
    assert header.nbytes == len(data)


@given(tables)
def test_every_tensor_is_aligned(tensors: dict[str, TensorSpec]) -> None:
    """To its items always; to 64 bytes of the file where its size is a multiple of that, as rows of codes are."""
    assert len(encode_header(tensors, {})) % HEADER_END == 0
    for name, begin in offsets_of(file_of(tensors, {})).items():
        assert begin % ITEM_SIZE[tensors[name].dtype] == 0
        if bytes_of(tensors[name]) % 64 == 0 and bytes_of(tensors[name]):
            assert begin % 64 == 0


@given(tables)
def test_data_order_is_a_stable_permutation(tensors: dict[str, TensorSpec]) -> None:
    order = data_order(tensors)
    assert sorted(order) == sorted(tensors)
    aligned = [name for name in tensors if bytes_of(tensors[name]) % 64 == 0]
    assert order[: len(aligned)] == aligned


@given(st.dictionaries(names, st.builds(torch.rand, st.integers(0, 5), st.integers(1, 5)), max_size=6))
def test_files_of_the_safetensors_package_are_parsed(tensors: dict[str, torch.Tensor]) -> None:
    data = save(tensors, {"format": "pt"})
    length = int.from_bytes(data[:8], "little")
    header = parse_header(data[8 : 8 + length], len(data), "file")
    assert header.tensors == {name: TensorSpec("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = entry()
BAD_HEADERS: dict[str, tuple[str | bytes, list[str]]] = {
    "no JSON": ("{", ["header"]),
    "no UTF-8": (b'{"\xff": 1}', ["header"]),
    "a list": ("[]", ["header", "object"]),
    "entry without dtype": (json.dumps({"w": {"shape": [2], "data_offsets": [0, 8]}}), ["w", "entry"]),
    "entry that is a number": (json.dumps({"w": 7}), ["w", "entry"]),
    "shape of text": (json.dumps({"w": entry(shape="2")}), ["w", "entry"]),
    "shape of a fraction": (json.dumps({"w": entry(shape=[2.0])}), ["w", "entry"]),
    "negative shape": (json.dumps({"w": entry(shape=[-2])}), ["w", "entry"]),
    "three offsets": (json.dumps({"w": entry(offsets=[0, 4, 8])}), ["w", "entry"]),
    "size and offsets differ": (json.dumps({"w": entry(shape=[3])}), ["w", "F32 [3]", "0 to 8", "0 to 12"]),
    "gap": (json.dumps({"v": GOOD, "w": entry(offsets=[12, 20])}), ["w", "12 to 20", "8 to 16"]),
    "overlap": (json.dumps({"v": GOOD, "w": entry(offsets=[4, 12])}), ["w", "4 to 12"]),
    "same place twice": (json.dumps({"v": GOOD, "w": GOOD}), ["w", "0 to 8"]),
    "name twice": (f'{{"w": {json.dumps(GOOD)}, "w": {json.dumps(GOOD)}}}', ["w", "twice"]),
    "metadata of numbers": (json.dumps({"__metadata__": {"a": 1}}), ["__metadata__"]),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_damaged_header(name: str) -> None:
    text, words = BAD_HEADERS[name]
    data = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(SourceError) as caught:
        parse_header(data, 8 + len(data) + 8, "some.safetensors")
    assert [word for word in ("some.safetensors", *words) if word not in caught.value.cause] == [], caught.value.cause
    assert caught.value.remedy


def test_unknown_dtype_is_of_a_newer_release() -> None:
    with pytest.raises(UnsupportedError, match="tensor w is stored as F2"):
        parse_header(json.dumps({"w": entry("F2")}).encode(), 100, "some.safetensors")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode), st.integers(0, 200))
def test_any_bytes_end_in_an_error_or_a_header(text: bytes, size: int) -> None:
    with suppress(MreaderError):
        assert parse_header(text, size, "file").nbytes == size


@pytest.mark.parametrize("keep", [0, 7, 8, 60, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "w.safetensors"
    data = save({"w": torch.zeros(100)})
    path.write_bytes(data[: keep if keep >= 0 else len(data) + keep])
    with pytest.raises(SourceError, match=r"w\.safetensors is truncated"):
        read_header(path)


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(save({"w": torch.zeros(100)}) + b"abc")
    with pytest.raises(SourceError, match=r"w\.safetensors has 3 bytes after its last tensor"):
        read_header(path)


def write(tmp_path: Path, name: str, *pieces: bytes) -> tuple[str, int]:
    with HashingFile(tmp_path / "scratch", tmp_path / name) as file:
        for piece in pieces:
            file.write(piece)
        return file.commit()


def test_hashing_file_says_what_is_in_the_file(tmp_path: Path) -> None:
    data = os.urandom(100_000)
    assert write(tmp_path, "file", data[:1], data[1:70_000], b"", data[70_000:]) == (
        sha256_file(tmp_path / "file", chunk=999),
        len(data),
    )
    assert (tmp_path / "file").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@settings(deadline=None)  # it waits for the disk
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=9), st.randoms(), st.sampled_from([1, 1024]))
def test_hashing_file_may_be_written_in_any_order(data: bytes, cuts: list[int], order: Random, most_parts: int) -> None:
    """In several parts a call as well, however many the system takes at a time."""
    ends = sorted({min(cut, len(data)) for cut in (0, *cuts, len(data))})
    spans = list(pairwise(ends))
    order.shuffle(spans)
    with (
        TemporaryDirectory() as folder,
        mock.patch("mreader.formats.safetensors_file._MOST_PARTS", most_parts),
        HashingFile(Path(folder) / "scratch", Path(folder) / "file") as file,
    ):
        for begin, end in spans:
            middle = (begin + end) // 2
            file.write_at(begin, [data[begin:middle], b"", memoryview(data)[middle:end]])
        assert file.commit() == (hashlib.sha256(data).hexdigest(), len(data))
        assert (Path(folder) / "file").read_bytes() == data


def test_hashing_file_is_written_by_several_threads(tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    size = 1 << 12
    with HashingFile(tmp_path / "scratch", tmp_path / "file") as file, ThreadPoolExecutor(8) as threads:
        begins = [*range(0, len(data), 2 * size), *range(size, len(data), 2 * size)]
        list(threads.map(lambda begin: file.write_at(begin, [data[begin : begin + size]]), begins))
        assert file.commit() == (hashlib.sha256(data).hexdigest(), len(data))
    assert (tmp_path / "file").read_bytes() == data


def test_hashing_file_with_a_gap_does_not_appear(tmp_path: Path) -> None:
    with HashingFile(tmp_path / "scratch", tmp_path / "file") as file:
        file.write(b"abc")
        file.write_at(5, [b"fg"])
        with pytest.raises(RuntimeError, match="gap at byte 3"):
            file.commit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writes", [1, 3])
def test_an_error_of_the_disk_that_is_told_once_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    errors = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def flush(_: int) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr("mreader.formats.safetensors_file._FLUSHED_AT_ONCE", 1)
    monkeypatch.setattr(os, "fdatasync", flush)

    def write_slowly() -> None:
        with HashingFile(tmp_path / "scratch", tmp_path / "file") as file:
            for _ in range(writes):
                file.write(b"x")
                time.sleep(0.05)  # the flush ends before the next write
            file.commit()

    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_slowly()
    assert not errors
    assert list(tmp_path.iterdir()) == []


def test_hashing_file_that_another_program_cuts_short_does_not_appear(tmp_path: Path) -> None:
    with HashingFile(tmp_path / "scratch", tmp_path / "file") as file:
        file.write_at(3, [b"def"])
        os.truncate(tmp_path / "scratch", 0)
        file.write(b"abc")
        with pytest.raises(OSError, match="shrank while it was written"):
            file.record()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_hashing_file_has_the_mode_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path, "file", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_without_commit_nothing_appears_and_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with HashingFile(tmp_path / "scratch", tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_as_bytes_is_row_major_whatever_the_strides() -> None:
    tensor = torch.arange(12, dtype=torch.int8).reshape(3, 4)
    assert bytes(as_bytes(tensor)) == bytes(range(12))
    assert bytes(as_bytes(tensor.T)) == bytes([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])
    assert bytes(as_bytes(torch.zeros(0, 3))) == b""
    assert bytes(as_bytes(torch.tensor(1.0, dtype=torch.bfloat16))) == b"\x80\x3f"


def test_lazy_tensors_of_several_files(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(3, 4), "b": torch.rand(5).to(torch.bfloat16), "empty": torch.zeros(0, 2)}
    for name, tensor in tensors.items():
        (tmp_path / f"{name}.safetensors").write_bytes(save({name: tensor}))
    with LazyTensors(tmp_path, {name: f"{name}.safetensors" for name in tensors}) as lazy:
        assert list(lazy) == list(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(lazy[name], tensor)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert list(file.keys()) == ["a"]
