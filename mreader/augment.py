"""What an augmented layer has beside the source's weights, each tensor computed when it is first asked for.

E experts, H hidden size, I channels of an expert, r rank.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from mreader.errors import SourceError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import FormatOptions
from mreader.recovery import recovery_basis, recovery_coeffs
from mreader.sketch import Sketch, draw_signs, sketch_matrices

_EXPERTS_ON_GPU = 16  # coded side by side: enough to fill it, and far from its memory


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
        with _threads(workers) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


@contextmanager
def steps_side_by_side() -> Iterator[Executor]:
    """Two threads, each for the sketch of a layer or for its recovery map: the experts of one are computed while the
    other factorises a small matrix, which nothing else can share in, or writes.
    """
    with _threads(2) as pool:
        yield pool


@contextmanager
def _threads(count: int) -> Iterator[Executor]:
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)  # after an error nobody wants the rest


class LayerAugmenter:
    """Computes sketch, norms and recovery map of a layer from its source tensors, on `device`, experts side by side in
    `pool`.
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

    def part(self, name: str) -> Tensor:
        """The tensor `name` of the layer, on the CPU: of those that are not the source's weights."""
        return (self.sketch if name.startswith("sketch_") else self.recovery)[name].cpu()

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

        codes, scales, errors = _joined(
            ((s.codes, s.scales, s.errors) for s in self._pool.map(sketch, groups)), 2 * len(matrices)
        )
        by_expert = {"sketch_codes": codes, "sketch_scales": scales, "sketch_errors": errors}
        return {**{name: t.view(-1, 2, *t.shape[1:]) for name, t in by_expert.items()}, "sketch_signs": signs}

    @cached_property
    def recovery(self) -> dict[str, Tensor]:
        """down_norms ||d_j||, recovery_basis U, recovery_coeffs b_j = U^T d_j (SPEC.md)."""
        basis = recovery_basis(self._down, self._options.rank, self._options.seed, self._pool.map)
        norms, coeffs = _joined(
            self._pool.map(lambda expert: _describe_columns(basis, expert), self._down), len(self._down)
        )
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


def _describe_columns(basis: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """||d_j|| (1, I) and b_j = U^T d_j (1, I, r) of the columns of an expert's (H, I), both float32."""
    wide = down.float()
    # Row by row: a column at a time would read one number of each cache line.
    return wide.square().sum(dim=0).sqrt_()[None], recovery_coeffs(basis, wide)[None]


def _joined(parts: Iterable[Sequence[Tensor]], rows: int) -> list[Tensor]:
    """What follows one another, `rows` in all, as tensors that are there from the first part on.

    A part that waited for the last one would lie in the middle of memory that had been an expert's on its way, and keep
    all of it: gigabytes, now and then.
    """
    joined: list[Tensor] = []
    row = 0
    for part in parts:
        joined = joined or [tensor.new_empty(rows, *tensor.shape[1:]) for tensor in part]
        stop = row + len(part[0])
        for whole, tensor in zip(joined, part, strict=True):
            whole[row:stop] = tensor
        row = stop
    return joined


def _half(values: Tensor, name: str) -> Tensor:
    """FP16 of `values`. SourceError where one is too large for it, or not finite."""
    half = values.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        largest = float(values.abs().max())
        raise SourceError(f"{name} does not fit FP16: {largest:.3g}", "these weights are far out of range")
    return half
