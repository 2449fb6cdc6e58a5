"""Whether an augmented checkpoint is what it says it is, and what its source says it should be.

E experts, H hidden size, I channels of an expert, r rank.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mreader.augment import LayerAugmenter, experts_side_by_side, refuse_non_finite
from mreader.errors import SourceError, VerifyError
from mreader.formats.architectures import RoutedLayer
from mreader.formats.augmented import MANIFEST, SOURCE, Augmented
from mreader.formats.checkpoint import Checkpoint, open_checkpoint
from mreader.formats.codes import Code, unpack
from mreader.formats.safetensors_file import LazyTensors
from mreader.hashing import changed_files
from mreader.journal import FileRecord
from mreader.native import native_matrix, open_to_verify
from mreader.output import CARD
from mreader.progress import Progress
from mreader.recovery import recovery_coeffs

# A weight on the boundary between two codes may fall to either side by the last bit of a float32 sum, which depends on
# the device and the number of threads; then its block's scale moves by about one part in the number of its codes.
_CODES_APART = 1e-3
_SCALES_APART = 2e-2
_NORMS_APART = 1e-3
# FP16 moves U and b by about 4e-4 of their norm.
_COEFFS_APART = 1e-3
_BASIS_APART = 5e-3
_ENERGY_APART = 1e-3
_HALF_SPACING = 2.0**-25  # of FP16's subnormal numbers, half of what rounding may move a small coefficient by


@dataclass(frozen=True)
class Verified:
    """What was checked."""

    files: int
    tensors: int
    layers_compared: int


def verify(out: str | Path, source: str | Path | None = None, *, progress: Progress | None = None) -> Verified:
    """Check tensors, shapes, checksums and finite values; with a source, every weight and everything computed from it.

    source: the folder that `out` was converted from: its weights must be there bit for bit (down transposed back), and
            sketch and norms must be those computed from it again. The recovery map need not be the same one, for where
            the down projections have no few main directions any noise turns it: U must be orthonormal, b_j = U^T d_j
            within 1e-3, and U must keep the energy that another one keeps within 1e-3

    Raises VerifyError naming the first file or tensor at fault, and what `open_augmented` raises.
    """
    progress = progress or Progress()
    augmented = open_to_verify(Path(out))
    _check_hashes(augmented, progress)
    _check_finite(augmented, progress)
    layers = 0
    if source is not None:
        original = open_checkpoint(Path(source))
        _compare_copied(augmented, original, progress)
        with experts_side_by_side(torch.device("cpu")) as pool:
            for layer in augmented.architecture.layers:
                progress.layer(layer.ordinal + 1, len(augmented.architecture.layers))
                _compare_layer(augmented, original, layer, pool)
                progress.advance(sum(original.spec(name).nbytes for name in layer.tensors))
                layers += 1
    return Verified(len(augmented.manifest["files"]), len(augmented.checkpoint.tensors), layers)


def _check_hashes(augmented: Augmented, progress: Progress) -> None:
    records = {augmented.folder / name: FileRecord.of(e) for name, e in augmented.manifest["files"].items()}
    names = {path.relative_to(augmented.folder).as_posix() for path in records}
    for name in (*augmented.checkpoint.headers, *augmented.checkpoint.texts, SOURCE, *augmented.source.files):
        if name not in names and name != CARD:
            raise VerifyError(f"{MANIFEST} does not list {name}", "convert the source again")
    progress.begin("checksums", sum(record.bytes for record in records.values()))
    for path, fault in changed_files(records, progress.advance):
        name = path.relative_to(augmented.folder).as_posix()
        raise VerifyError(f"{name} {fault}, by {MANIFEST}", "download it again, or convert the source again")


def _check_finite(augmented: Augmented, progress: Progress) -> None:
    progress.begin("finite values", augmented.checkpoint.nbytes)
    for name, spec in augmented.checkpoint.tensors.items():
        with augmented.tensors() as tensors:
            try:
                refuse_non_finite(name, tensors[name])
            except SourceError as error:
                raise VerifyError(error.cause, "convert the source again") from error
        progress.advance(spec.nbytes)


def _compare_copied(augmented: Augmented, source: Checkpoint, progress: Progress) -> None:
    progress.begin("comparing with the source", source.nbytes)
    if source.tensors != augmented.source.tensors:
        names = {name for name, _ in source.tensors.items() ^ augmented.source.tensors.items()}
        raise VerifyError(
            f"tensor {min(names)} is not the same in this source and in the one that was converted",
            "name the right source",
        )
    for name in source.tensors:
        if name in augmented.architecture.transformed:
            continue
        with LazyTensors(source.path, source.where) as there, augmented.tensors() as here:
            _expect_same(here[name], there[name], name)
        progress.advance(source.spec(name).nbytes)


def _compare_layer(augmented: Augmented, source: Checkpoint, layer: RoutedLayer, pool: Executor) -> None:
    with LazyTensors(source.path, source.where) as there, augmented.tensors() as here:
        for kind, matrices in (("gate", layer.gate), ("up", layer.up), ("down", layer.down)):
            for expert, matrix in enumerate(matrices):
                _expect_same(
                    native_matrix(here, layer, kind, expert),
                    matrix.read(there),
                    f"{matrix.tensor} ({kind} of expert {expert})",
                )
        again = LayerAugmenter(layer, there, augmented.options, torch.device("cpu"), pool)
        stored = augmented.layer(layer, here)
        down = [matrix.read(there) for matrix in layer.down]
        for part, apart, allowed in (
            *_differences(augmented, layer, stored, again),
            *_recovery_differences(stored, down, again),
        ):
            if not apart <= allowed:
                raise VerifyError(
                    f"{layer.prefix}.{part} differs by {apart:.2g} from what the source gives, {allowed:g} is allowed",
                    "convert the source again",
                )


def _differences(
    augmented: Augmented, layer: RoutedLayer, stored: dict[str, Tensor], again: LayerAugmenter
) -> Iterator[tuple[str, float, float]]:
    """(tensor, how far it is from the recomputed one, how far it may be)."""
    code, sketch = augmented.options.code, again.sketch
    yield "sketch_codes", _codes_apart(stored["sketch_codes"], sketch["sketch_codes"], code, layer), _CODES_APART
    yield "sketch_codes", _share_unused(stored["sketch_codes"], code, layer.channels), 0.0
    yield "sketch_signs", _share_apart(stored["sketch_signs"], sketch["sketch_signs"]), 0.0
    for part in ("sketch_scales", "sketch_errors"):
        yield part, _relative(stored[part], sketch[part]), _SCALES_APART
    yield "down_norms", _relative(stored["down_norms"], again.recovery["down_norms"]), _NORMS_APART


def _recovery_differences(
    stored: dict[str, Tensor], down: list[Tensor], again: LayerAugmenter
) -> Iterator[tuple[str, float, float]]:
    """The same for U and b: U^T U = 1, b_j = U^T d_j, and ||U^T D|| as large as it can be."""
    basis = stored["recovery_basis"].float()
    if basis.shape[1] == 0:
        return
    apart = (basis.T @ basis - torch.eye(basis.shape[1])).abs().max()
    yield "recovery_basis", float(apart), _BASIS_APART
    coeffs = torch.stack([recovery_coeffs(basis, matrix) for matrix in down])
    size = float(torch.linalg.vector_norm(coeffs))
    rounding = _HALF_SPACING * coeffs.numel() ** 0.5 / max(size, torch.finfo(torch.float32).tiny)
    yield "recovery_coeffs", _relative(stored["recovery_coeffs"], coeffs), _COEFFS_APART + rounding
    best = float(torch.linalg.vector_norm(again.recovery["recovery_coeffs"].float()))
    yield "recovery_basis", 1 - size**2 / best**2 if best else 0.0, _ENERGY_APART


def _codes_apart(a: Tensor, b: Tensor, code: Code, layer: RoutedLayer) -> float:
    """The share of codes that differ, unpacked only where bytes differ: codes are several times as large as bytes."""
    different = [(x, y) for x, y in zip(a, b, strict=True) if not torch.equal(x, y)]
    pairs = ((unpack(x, code, layer.channels), unpack(y, code, layer.channels)) for x, y in different)
    return sum(_share_apart(*pair) for pair in pairs) / layer.experts


def _share_apart(a: Tensor, b: Tensor) -> float:
    return int(torch.count_nonzero(a != b)) / max(a.numel(), 1)


def _share_unused(packed: Tensor, code: Code, channels: int) -> float:
    """The share of bytes that stand for no codes: padding that is not 0, and numbers beyond the largest digits."""
    used = code.used_bytes(channels)
    wrong = int(torch.count_nonzero(packed[..., used:]))
    if (numbers := code.base**code.per_byte) < 256:
        wrong += int(torch.count_nonzero(packed[..., :used] >= numbers))
    return wrong / packed.numel()


def _relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, 0 where both are 0."""
    difference = torch.linalg.vector_norm(a.float() - b.float())
    return float(difference / torch.linalg.vector_norm(b.float()).clamp_min(torch.finfo(torch.float32).tiny))


def _expect_same(here: Tensor, there: Tensor, name: str) -> None:
    if here.dtype != there.dtype or not torch.equal(_bits(here), _bits(there)):
        raise VerifyError(f"{name} is not bit for bit the source's", "convert the source again")


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals itself there, and -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
