"""The values of quantized weights, by the dequantizers of those who define the methods where these run on a CPU.

One tensor or one expert's slice at a time; nothing is kept but the last slice of each thread.
"""

# E experts, R rows of a weight, C its columns, b bits of a code

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mreader.errors import SourceError
from mreader.formats.bits import Bits
from mreader.formats.checkpoint import Checkpoint, Packed
from mreader.formats.quantized import fp8_block, integer_form, require_package
from mreader.formats.tensors import LazyTensors, as_bits

_AT_ONCE = 1 << 20  # values: what is wider than a result on the way to it stays in a core's cache
_MODULES = {
    "mxfp4": "transformers.integrations.mxfp4",
    "fp8": "transformers.integrations.finegrained_fp8",
    "compressed-tensors": "compressed_tensors.compressors",
}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of rows 0 to 7 among the codes of a word


def open_tensors(source: Checkpoint) -> LazyTensors | DequantizedTensors:
    """The tensors of a source, by name; a context manager."""
    return DequantizedTensors(source) if source.packed else LazyTensors(source.path, source.where)


class DequantizedTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint that stands for a quantized one, computed whenever they are asked for.

    Raises UnsupportedError where a package that its method needs is not installed.
    """

    def __init__(self, source: Checkpoint) -> None:
        if source.quantized:
            require_package(source.quantized)
        if module := _MODULES.get(source.quantized or ""):
            import_module(module)  # now: the threads that dequantize would all begin with it at once
        self._source = source
        self._stored = LazyTensors(source.path, source.on_disk.where)
        self._last = threading.local()

    def __enter__(self) -> DequantizedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stored.__exit__()
        self._last = threading.local()

    def __getitem__(self, name: str) -> Tensor:
        packed = self._source.packed.get(name)
        if packed is None:
            return self._stored[name]
        return dequantize(packed, {role: self._stored[part] for role, part in packed.parts.items()})

    def slice(self, name: str, index: int) -> Tensor:
        """`self[name][index]`: gate and up of an expert are rows of the same slice."""
        packed = self._source.packed.get(name)
        if packed is None:
            return self._stored[name][index]
        if getattr(self._last, "key", None) != (name, index):
            parts = {role: self._stored[part] for role, part in packed.parts.items()}
            some = {role: part if part.numel() == 1 else part[index : index + 1] for role, part in parts.items()}
            self._last.value = dequantize(packed, some)[0]
            self._last.key = (name, index)
        value: Tensor = self._last.value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.where)

    def __len__(self) -> int:
        return len(self._source.where)


class DequantizedBits(Mapping[str, Bits]):
    """The same tensors as bits, to be moved; a context manager."""

    def __init__(self, source: Checkpoint) -> None:
        self._tensors = DequantizedTensors(source)

    def __enter__(self) -> DequantizedBits:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.__exit__()

    def __getitem__(self, name: str) -> Bits:
        return as_bits(self._tensors[name])

    def slice(self, name: str, index: int) -> Bits:
        """`self[name][index]`."""
        return as_bits(self._tensors.slice(name, index))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def dequantize(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight in BF16, of the stored tensors in `parts` by their roles."""
    return _METHODS[packed.method](parts, packed)


def _mxfp4(parts: Mapping[str, Tensor], _: Packed) -> Tensor:
    """codes (E, C, R / 32, 16) uint8, two values a byte, the first in the lower half; scales (E, C, R / 32) uint8:
    w = 2^(scale - 127) * e2m1(code). Returns (E, R, C).
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rows = _AT_ONCE // 32
    value: Tensor = convert_moe_packed_tensors(
        parts["codes"], parts["scales"], dtype=torch.bfloat16, rows_per_chunk=rows
    )
    return value


def _fp8(parts: Mapping[str, Tensor], packed: Packed) -> Tensor:
    """codes (..., R, C) float8, scales (..., R / b1, C / b2), both rounded up: w = scale of its block * code.

    A scale that is uint8 stands for 2^(scale - 127).
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales = parts["codes"], parts["scales"]
    if scales.dtype != torch.uint8:
        scales = scales.float()  # products come in the dtype of the scales
    if scales.numel() == 1:
        rows, columns = codes.shape[-2:]
        scales = scales.reshape(*(1,) * codes.dim())
    else:
        rows, columns = fp8_block(packed.settings)
    whole = torch.nn.functional.pad(
        codes.view(torch.uint8), (0, -codes.shape[-1] % columns, 0, -codes.shape[-2] % rows)
    ).view(codes.dtype)
    result = torch.empty(whole.shape, dtype=torch.bfloat16)
    blocks = max(_AT_ONCE // (whole.shape[-1] * rows), 1)  # rows of blocks at a time
    convert = Fp8Dequantize(None).convert
    for first in range(0, scales.shape[-2], blocks):
        some = slice(first * rows, (first + blocks) * rows)
        given = {"codes": whole[..., some, :], "codes_scale_inv": scales[..., first : first + blocks, :]}
        result[..., some, :] = convert(given)["codes"][0]
    return result[..., : codes.shape[-2], : codes.shape[-1]]


def _compressed(parts: Mapping[str, Tensor], packed: Packed) -> Tensor:
    """As compressed-tensors defines its formats: (R, C)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    settings = dict(packed.settings)
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    codes = "weight_packed" if packed.parts["codes"].endswith("_packed") else "weight"
    names = {"codes": codes, "scales": "weight_scale", "zeros": "weight_zero_point", "shape": "weight_shape"}
    state = {names[role]: part for role, part in parts.items()}
    if "shape" in parts and (shape := tuple(parts["shape"].tolist())) != packed.spec.shape:
        raise SourceError(
            f"{packed.parts['shape']} says {list(shape)}, and the codes hold {list(packed.spec.shape)}",
            "take config.json and weights from the same checkpoint",
        )
    try:
        scheme = QuantizationScheme(**settings)
    except ValueError as error:
        raise SourceError(
            f"config.json has a scheme that compressed-tensors refuses: {str(error).splitlines()[0]}",
            "take the config.json that belongs to the weights",
        ) from error
    weight: Tensor = compressor.decompress(state, scheme)["weight"]
    return weight.to(torch.bfloat16)


def _gptq(parts: Mapping[str, Tensor], packed: Packed) -> Tensor:
    """codes (C b / 32, R), zeros (groups, R b / 32) int32, scales (groups, R), order (C,): w_rc = scale_gr * (code_cr -
    zero_gr), g the group of column c. But for the version gptq_v2, zeros are stored less 1. Returns (R, C).
    """
    bits = packed.settings["bits"]
    one = 0 if integer_form(packed.settings) == "gptq_v2" else 1
    zeros = (_unpack(parts["zeros"], bits) + one) & (2**bits - 1)

    def codes(rows: slice) -> Tensor:
        return _unpack(parts["codes"][:, rows].T, bits)

    return _by_rows(codes, zeros.T, parts, packed)


def _awq(parts: Mapping[str, Tensor], packed: Packed) -> Tensor:
    """codes (C, R / 8), zeros (groups, R / 8) int32, eight rows a word in the order of _AWQ_ORDER; scales (groups, R):
    w_rc = scale_gr * (code_cr - zero_gr). Returns (R, C).
    """
    order = torch.tensor(_AWQ_ORDER)

    def in_order(words: Tensor) -> Tensor:
        codes: Tensor = torch.unflatten(_unpack(words, 4), -1, (-1, 8))
        return codes[..., order].flatten(-2)

    def codes(rows: slice) -> Tensor:
        return in_order(parts["codes"][:, rows.start // 8 : rows.stop // 8]).T

    return _by_rows(codes, in_order(parts["zeros"]).T, parts, packed)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """(..., n) int32 -> (..., n 32 / b) int32: the codes of a word, the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(-2)


def _by_rows(codes: Callable[[slice], Tensor], zeros: Tensor, parts: Mapping[str, Tensor], packed: Packed) -> Tensor:
    """scale * (code - zero) in float32, some rows at a time.

    codes: rows -> (rows, C) int32
    zeros: (R, groups) int32
    """
    rows, columns = packed.spec.shape
    scales, group = parts["scales"].T, _group_of_column(parts, packed)
    result = torch.empty(rows, columns, dtype=torch.bfloat16)
    step = max(_AT_ONCE // columns // 8, 1) * 8
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        result[some] = scales[some].float()[:, group] * (codes(some) - zeros[some][:, group])
    return result


def _group_of_column(parts: Mapping[str, Tensor], packed: Packed) -> Tensor:
    """(C,) int64. SourceError for a group that is not there."""
    if "order" in parts:
        order, groups = parts["order"].long(), len(parts["scales"])
        first, last = int(order.min()), int(order.max())
        if first < 0 or last >= groups:
            raise SourceError(
                f"{packed.parts['order']} names groups {first} to {last}, and there are 0 to {groups - 1}",
                "download the checkpoint again",
            )
        return order
    columns, size = packed.spec.shape[1], packed.settings.get("group_size", -1)
    return torch.arange(columns) // (columns if size == -1 else size)


_METHODS: dict[str, Callable[[Mapping[str, Any], Packed], Tensor]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
