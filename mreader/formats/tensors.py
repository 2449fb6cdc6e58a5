"""Tensors of safetensors files, memory-mapped, as torch has them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from mreader.formats.bits import Bits

TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class LazyTensors(Mapping[str, torch.Tensor]):
    """Memory-mapped tensors of several files, by name; a context manager.

    Pages of a mapped file count as resident until it is closed, so hold one open for a layer, not for a model.
    """

    def __init__(self, folder: Path, where: Mapping[str, str]) -> None:
        self._folder, self._where = folder, where
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "LazyTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._where[name]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order; a view where it is contiguous."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().contiguous().reshape(-1)
    data: bytes | memoryview = flat.view(torch.uint8).numpy().data
    return memoryview(data)


def as_bits(tensor: torch.Tensor) -> Bits:
    """The numbers of a CPU tensor as unsigned integers of their size, row-major; a view where it is contiguous."""
    bits: Bits = np.frombuffer(as_bytes(tensor), f"u{tensor.itemsize}").reshape(tuple(tensor.shape))
    return bits
