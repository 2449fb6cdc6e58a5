"""The augmented tensors of one layer, each computed when it is first asked for.

E experts, H hidden size, I channels of an expert, r rank.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from mreader.errors import SourceError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import FormatOptions
from mreader.recovery import recovery_basis, recovery_coeffs
from mreader.sketch import Sketch, draw_signs, sketch_matrices

_EXPERTS_ON_GPU = 16  # coded side by side: enough to fill it, and far from its memory
EXPERTS_AHEAD = 16  # transposed, or dequantized, before the first of them is taken
A = TypeVar("A")
B = TypeVar("B")
_CHECKED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@contextmanager
def experts_side_by_side(device: torch.device) -> Iterator[Executor]:
    """As many threads as torch would use, each for an expert of its own, and torch single-threaded within.

    An expert's tensors fit a core's cache: torch's own threads would spend their time waiting for each other there,
    the more so beside threads that hash and write. A GPU takes its work from one thread; more would only wait for the
    interpreter lock. Results do not depend on the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workers = threads if device.type == "cpu" else 1
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)  # after an error nobody wants the other experts
    finally:
        torch.set_num_threads(threads)


class LayerAugmenter:
    """Computes an augmented layer from its source tensors, on `device`, experts side by side in `pool`.

    `pieces(part)` gives the CPU tensors whose bytes, one after the other, are the data of the tensor `part`.
    """

    def __init__(
        self,
        layer: RoutedLayer,
        tensors: Mapping[str, Tensor],
        options: FormatOptions,
        device: torch.device,
        pool: Executor,
    ) -> None:
        self._layer, self._tensors, self._options = layer, tensors, options
        self._device, self._pool = device, pool

    def pieces(self, part: str) -> Iterator[Tensor]:
        if part == "gate_up_proj":
            pairs = list(zip(self._layer.gate, self._layer.up, strict=True))
            for both in self._ahead(lambda pair: [matrix.read(self._tensors) for matrix in pair], pairs):
                yield from both
        elif part == "down_proj":
            yield from self._ahead(lambda down: down.T.contiguous().cpu(), self._down)
        elif part == "gate_up_proj_bias":
            for gate, up in zip(self._layer.gate_bias, self._layer.up_bias, strict=True):
                yield from (gate.read(self._tensors), up.read(self._tensors))
        elif part == "down_proj_bias":
            yield from (bias.read(self._tensors) for bias in self._layer.down_bias)
        else:
            yield (self.sketch if part.startswith("sketch_") else self.recovery)[part].cpu()

    def _ahead(self, function: Callable[[A], B], experts: Sequence[A]) -> Iterator[B]:
        """`function` of each expert, not of all at once: each result may be a copy."""
        for first in range(0, len(experts), EXPERTS_AHEAD):
            yield from self._pool.map(function, experts[first : first + EXPERTS_AHEAD])

    @cached_property
    def sketch(self) -> dict[str, Tensor]:
        """sketch_codes, sketch_scales, sketch_errors, sketch_signs (SPEC.md)."""
        signs = draw_signs(self._layer.hidden, self._options.seed, self._layer.ordinal)
        signs_here = signs.to(self._device)

        at_once = 1 if self._device.type == "cpu" else _EXPERTS_ON_GPU
        matrices = list(zip(self._layer.gate, self._layer.up, strict=True))
        groups = [matrices[i : i + at_once] for i in range(0, len(matrices), at_once)]

        def sketch(group: list[tuple[Matrix, Matrix]]) -> Sketch:
            return sketch_matrices([self._read(m) for pair in group for m in pair], signs_here, self._options.code)

        sketches = list(self._pool.map(sketch, groups))
        by_expert = {
            "sketch_codes": torch.cat([s.codes for s in sketches]),
            "sketch_scales": torch.cat([s.scales for s in sketches]),
            "sketch_errors": torch.cat([s.errors for s in sketches]),
        }
        return {**{name: t.view(-1, 2, *t.shape[1:]) for name, t in by_expert.items()}, "sketch_signs": signs}

    @cached_property
    def recovery(self) -> dict[str, Tensor]:
        """down_norms ||d_j||, recovery_basis U, recovery_coeffs b_j = U^T d_j (SPEC.md)."""
        basis = recovery_basis(self._down, self._options.rank, self._options.seed, self._pool.map)
        columns = list(self._pool.map(lambda expert: _describe_columns(basis, expert), self._down))
        norms, coeffs = (torch.stack(parts) for parts in zip(*columns, strict=True))
        return {
            "down_norms": _half(norms, "down_norms"),
            "recovery_basis": _half(basis, "recovery_basis"),
            "recovery_coeffs": _half(coeffs, "recovery_coeffs"),
        }

    @cached_property
    def _down(self) -> list[Tensor]:
        """The down projections (H, I): mapped, or on the device."""
        return [self._read(matrix) for matrix in self._layer.down]

    def _read(self, matrix: Matrix) -> Tensor:
        return matrix.read(self._tensors).to(self._device)


def refuse_non_finite(name: str, tensor: Tensor, where: str = "") -> None:
    """SourceError, naming the first row at fault, where a floating-point tensor holds NaN or infinity."""
    if tensor.dtype not in _CHECKED or _is_finite(tensor):
        return
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    row = int((~torch.isfinite(rows).all(dim=1)).nonzero()[0])
    raise SourceError(
        f"{name} holds NaN or infinity ({where}row {row})",
        "the checkpoint is damaged; download it again or ask its author",
    )


def _is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. Both show in the extremes, which cost a twentieth of asking every value."""
    return tensor.numel() == 0 or all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))


def _describe_columns(basis: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """||d_j|| (I,) and b_j = U^T d_j (I, r) of the columns of an expert's (H, I), both float32."""
    wide = down.float()
    # Row by row: a column at a time would read one number of each cache line.
    return wide.square().sum(dim=0).sqrt_(), recovery_coeffs(basis, wide)


def _half(values: Tensor, name: str) -> Tensor:
    """FP16 of `values`. SourceError where one is too large for it, or not finite."""
    half = values.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        largest = float(values.abs().max())
        raise SourceError(f"{name} does not fit FP16: {largest:.3g}", "these weights are far out of range")
    return half
