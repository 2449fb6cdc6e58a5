"""Tensors as bits: the same as torch's, without torch's types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from mreader.errors import SourceError
from mreader.formats.bits import MappedBits, non_finite_row, refuse_non_finite, row_major
from mreader.formats.safetensors_file import HashingFile, Header, TensorSpec, encode_header, read_header
from mreader.formats.tensors import as_bits, as_bytes

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def opened(path: Path) -> tuple[MappedBits, Header]:
    header = read_header(path)
    where = dict.fromkeys(header.tensors, path.name)
    return MappedBits(path.parent, {path.name: header}, where), header


@pytest.mark.parametrize("spaces", [0, 1, 3])
@pytest.mark.parametrize("dtype", [*FLOATS.values(), torch.int8, torch.uint8, torch.bool, torch.int64])
def test_mapped_bits_are_those_of_the_tensors(tmp_path: Path, dtype: torch.dtype, spaces: int) -> None:
    """Wherever the header ends, after which nothing may be aligned."""
    tensors = {
        "matrix": torch.arange(-6, 6).reshape(3, 4).to(dtype),
        "cube": torch.arange(30).reshape(2, 3, 5).to(dtype),
        "empty": torch.zeros(0, 7, dtype=dtype),
        "number": torch.tensor(1).to(dtype),
    }
    data = save(tensors)
    length = int.from_bytes(data[:8], "little")
    longer = (length + spaces).to_bytes(8, "little") + data[8 : 8 + length] + b" " * spaces
    (tmp_path / "w.safetensors").write_bytes(longer + data[8 + length :])
    mapped, _ = opened(tmp_path / "w.safetensors")
    with mapped as bits:
        assert set(bits) == set(tensors)
        for name, tensor in tensors.items():
            assert bits[name].shape == tuple(tensor.shape)
            assert bits[name].tobytes() == bytes(as_bytes(tensor))
            assert np.array_equal(bits[name], as_bits(tensor))
            assert not bits[name].flags.writeable
            with HashingFile(tmp_path / "scratch", tmp_path / name) as file:
                file.write(row_major(bits[name]).data)
                file.commit()
            assert (tmp_path / name).read_bytes() == bits[name].tobytes()


def test_several_numbers_a_byte_are_bytes(tmp_path: Path) -> None:
    specs = {"packed": TensorSpec("F4", (3, 4)), "after": TensorSpec("U8", (2,))}
    (tmp_path / "w.safetensors").write_bytes(encode_header(specs, {}) + bytes(range(1, 9)))
    mapped, header = opened(tmp_path / "w.safetensors")
    data = {name: begin - min(header.begins.values()) for name, begin in header.begins.items()}
    with mapped as bits:
        for name, size in {"packed": 6, "after": 2}.items():
            assert bits[name].tolist() == list(range(1 + data[name], 1 + data[name] + size))


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (64, 256), (65, 257), (63, 700), (300, 41), (0, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_row_major_changes_no_number(shape: tuple[int, int], dtype: type[np.unsignedinteger]) -> None:  # type: ignore[type-arg]
    numbers = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    for view in (numbers, numbers.T, numbers[::2], numbers[:, 1:], np.stack([numbers, numbers])):
        again = row_major(view)
        assert again.flags.c_contiguous
        assert again.dtype == view.dtype
        assert again.tolist() == view.tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("shape", "at", "row"), [((7,), (4,), 4), ((5, 9), (2, 8), 2), ((2, 3, 4), (1, 1, 0), 4)])
def test_what_is_not_finite_is_found(
    dtype: str, value: float, shape: tuple[int, ...], at: tuple[int, ...], row: int
) -> None:
    tensor = torch.ones(shape, dtype=FLOATS[dtype])
    tensor[at] = value
    assert non_finite_row(as_bits(tensor), dtype) == row
    with pytest.raises(SourceError, match=rf"w holds NaN or infinity \(row {row}\)"):
        refuse_non_finite("w", as_bits(tensor), dtype)


def test_the_first_row_is_named_however_far_it_is() -> None:
    tensor = torch.zeros(1_100, 1_000, dtype=torch.bfloat16)
    tensor[1_050:, 999] = float("nan")
    assert non_finite_row(as_bits(tensor), "BF16") == 1_050


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_and_least_numbers_are_finite(dtype: str) -> None:
    limits = torch.finfo(FLOATS[dtype])
    numbers = [limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, 0.0, -0.0]
    assert non_finite_row(as_bits(torch.tensor(numbers, dtype=FLOATS[dtype])), dtype) is None
    assert non_finite_row(as_bits(torch.zeros(0, 3, dtype=FLOATS[dtype])), dtype) is None


def test_integers_are_always_finite() -> None:
    refuse_non_finite("w", np.full((2, 2), 0xFFFF, np.uint16), "U16")
