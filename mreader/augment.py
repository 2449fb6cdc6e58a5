"""The augmented tensors of one layer, each computed when it is first asked for.

E experts, H hidden size, I channels of an expert, r rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mreader.errors import SourceError, UnsupportedError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import FormatOptions
from mreader.recovery import recovery_basis, recovery_coeffs
from mreader.sketch import draw_signs, sketch_expert

_CHECKED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class LayerAugmenter:
    """Computes an augmented layer from its source tensors, on `device`.

    `pieces(part)` gives the CPU tensors whose bytes, one after the other, are the data of the tensor `part`.
    """

    def __init__(
        self, layer: RoutedLayer, tensors: Mapping[str, Tensor], options: FormatOptions, device: torch.device
    ) -> None:
        self._layer, self._tensors, self._options, self._device = layer, tensors, options, device

    def pieces(self, part: str) -> Iterator[Tensor]:
        if part == "gate_up_proj":
            for gate, up in zip(self._layer.gate, self._layer.up, strict=True):
                yield from (gate.read(self._tensors), up.read(self._tensors))
        elif part == "down_proj":
            for down in self._layer.down:
                yield down.read(self._tensors).T.contiguous()
        else:
            yield (self.sketch if part.startswith("sketch_") else self.recovery)[part].cpu()

    @cached_property
    def sketch(self) -> dict[str, Tensor]:
        """sketch_codes, sketch_scales, sketch_errors, sketch_signs (SPEC.md)."""
        signs = draw_signs(self._layer.hidden, self._options.seed, self._layer.ordinal)
        signs_here = signs.to(self._device)
        codes, scales, errors = [], [], []
        for gate, up in zip(self._layer.gate, self._layer.up, strict=True):
            try:
                sketch = sketch_expert(self._read(gate), self._read(up), signs_here, self._options.code)
            except UnsupportedError:
                self._refuse_non_finite((gate, up))  # the usual cause, and the fit does not know where it is
                raise
            codes.append(sketch.codes)
            scales.append(sketch.scales)
            errors.append(sketch.errors)
        return {
            "sketch_codes": torch.stack(codes),
            "sketch_scales": torch.stack(scales),
            "sketch_errors": torch.stack(errors),
            "sketch_signs": signs,
        }

    @cached_property
    def recovery(self) -> dict[str, Tensor]:
        """down_norms ||d_j||, recovery_basis U, recovery_coeffs b_j = U^T d_j (SPEC.md)."""
        matrices = _Matrices(self._layer.down, self._tensors, self._device)
        norms = torch.stack([torch.linalg.vector_norm(down, dim=0, dtype=torch.float32) for down in matrices])
        if not bool(torch.isfinite(norms).all()):
            self._refuse_non_finite(self._layer.down)
        basis = recovery_basis(matrices, self._options.rank, self._options.seed)
        coeffs = torch.stack([recovery_coeffs(basis, down) for down in matrices])
        return {
            "down_norms": _half(norms, f"{self._layer.prefix}.down_norms"),
            "recovery_basis": _half(basis, f"{self._layer.prefix}.recovery_basis"),
            "recovery_coeffs": _half(coeffs, f"{self._layer.prefix}.recovery_coeffs"),
        }

    def _read(self, matrix: Matrix) -> Tensor:
        return matrix.read(self._tensors).to(self._device)

    def _refuse_non_finite(self, matrices: Sequence[Matrix]) -> None:
        for matrix in matrices:
            expert = [*self._layer.gate, *self._layer.up, *self._layer.down].index(matrix) % self._layer.experts
            refuse_non_finite(matrix.tensor, matrix.read(self._tensors), f"expert {expert}, ")


@dataclass(frozen=True)
class _Matrices(Sequence[Tensor]):
    """One matrix an expert, each read when it is asked for."""

    matrices: tuple[Matrix, ...]
    tensors: Mapping[str, Tensor]
    device: torch.device

    def __len__(self) -> int:
        return len(self.matrices)

    def __getitem__(self, expert):  # type: ignore[no-untyped-def]
        return self.matrices[expert].read(self.tensors).to(self.device)


def refuse_non_finite(name: str, tensor: Tensor, where: str = "") -> None:
    """SourceError, naming the first row at fault, where a floating-point tensor holds NaN or infinity."""
    if tensor.dtype not in _CHECKED or bool(torch.isfinite(tensor).all()):
        return
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    row = int((~torch.isfinite(rows).all(dim=1)).nonzero()[0])
    raise SourceError(
        f"{name} holds NaN or infinity ({where}row {row})",
        "the checkpoint is damaged; download it again or ask its author",
    )


def _half(values: Tensor, name: str) -> Tensor:
    """FP16 of `values`. SourceError where one is too large for it."""
    half = values.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise SourceError(
            f"{name} does not fit FP16: {float(values.abs().max()):.3g}", "these weights are far out of range"
        )
    return half
