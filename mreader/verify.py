"""Whether an augmented checkpoint is what it says it is, and what its source says it should be.

E experts, H hidden size, I channels of an expert, r rank.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mreader.augment import LayerAugmenter, refuse_non_finite
from mreader.errors import SourceError, VerifyError
from mreader.formats.architectures import RoutedLayer
from mreader.formats.augmented import Augmented, open_augmented
from mreader.formats.checkpoint import Checkpoint, open_checkpoint
from mreader.formats.codes import unpack
from mreader.formats.safetensors_file import LazyTensors, sha256_file
from mreader.progress import Progress
from mreader.restore import native_matrix

_HASH_THREADS = 8
# A weight on the boundary between two codes may fall to either side by the last bit of a float32 sum, which depends on
# the device and the number of threads; then its block's scale moves by about one part in the number of its codes.
_CODES_APART = 1e-3
_SCALES_APART = 2e-2
_RECOVERY_APART = 1e-3


@dataclass(frozen=True)
class Verified:
    """What was checked."""

    files: int
    tensors: int
    layers_compared: int


def verify(out: str | Path, source: str | Path | None = None, *, progress: Progress | None = None) -> Verified:
    """Check tensors, shapes, checksums and finite values; with a source, every weight and everything computed from it.

    source: the folder that `out` was converted from: its weights must be there bit for bit (down transposed back), and
            sketch, norms and recovery map must be those computed from it again (the map within 1e-3)

    Raises VerifyError naming the first file or tensor at fault, and what `open_augmented` raises.
    """
    progress = progress or Progress()
    augmented = open_augmented(Path(out))
    _check_hashes(augmented, progress)
    _check_finite(augmented, progress)
    layers = 0
    if source is not None:
        original = open_checkpoint(Path(source))
        _compare_copied(augmented, original, progress)
        for layer in augmented.architecture.layers:
            progress.layer(layer.ordinal + 1, len(augmented.architecture.layers))
            _compare_layer(augmented, original, layer)
            layers += 1
    return Verified(len(augmented.manifest["files"]), len(augmented.checkpoint.tensors), layers)


def _check_hashes(augmented: Augmented, progress: Progress) -> None:
    files = augmented.manifest["files"]
    progress.begin("checksums", sum(entry["bytes"] for entry in files.values()))

    def check(name: str) -> str | None:
        path = augmented.folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != files[name]["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes, the manifest says {files[name]['bytes']:,}"
        same = sha256_file(path, progress.advance) == files[name]["sha256"]
        return None if same else f"{name} has another sha256 than the manifest says"

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        for fault in pool.map(check, files):
            if fault:
                raise VerifyError(fault, "download it again, or convert the source again")


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
    for name in source.tensors.keys() - augmented.architecture.transformed:
        with LazyTensors(source.path, source.where) as there, augmented.tensors() as here:
            _expect_same(here[name], there[name], name)
        progress.advance(source.spec(name).nbytes)


def _compare_layer(augmented: Augmented, source: Checkpoint, layer: RoutedLayer) -> None:
    with LazyTensors(source.path, source.where) as there, augmented.tensors() as here:
        for kind, matrices in (("gate", layer.gate), ("up", layer.up), ("down", layer.down)):
            for expert, matrix in enumerate(matrices):
                _expect_same(
                    native_matrix(here, layer, kind, expert),
                    matrix.read(there),
                    f"{matrix.tensor} ({kind} of expert {expert})",
                )
        again = LayerAugmenter(layer, there, augmented.options, torch.device("cpu"))
        stored = augmented.layer(layer, here)
        for part, apart, allowed in _differences(augmented, layer, stored, again):
            if not apart <= allowed:
                raise VerifyError(
                    f"{layer.prefix}.{part} differs by {apart:.2g} from what the source gives, {allowed:g} is allowed",
                    "convert the source again",
                )


def _differences(
    augmented: Augmented, layer: RoutedLayer, stored: dict[str, Tensor], again: LayerAugmenter
) -> Iterator[tuple[str, float, float]]:
    """(tensor, how far it is from the recomputed one, how far it may be)."""
    code, sketch, recovery = augmented.options.code, again.sketch, again.recovery
    codes = (unpack(t["sketch_codes"], code, layer.channels) for t in (stored, sketch))
    yield "sketch_codes", _share_apart(*codes), _CODES_APART
    yield "sketch_signs", _share_apart(stored["sketch_signs"], sketch["sketch_signs"]), 0.0
    for part in ("sketch_scales", "sketch_errors"):
        yield part, _relative(stored[part], sketch[part]), _SCALES_APART
    yield "down_norms", _relative(stored["down_norms"], recovery["down_norms"]), _RECOVERY_APART
    maps = ((t["recovery_basis"].float(), t["recovery_coeffs"].flatten(0, 1).float()) for t in (stored, recovery))
    yield "recovery_basis and recovery_coeffs", _maps_apart(*maps), _RECOVERY_APART


def _share_apart(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean()) if a.numel() else 0.0


def _relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, 0 where both are 0."""
    difference = torch.linalg.vector_norm(a.float() - b.float())
    return float(difference / torch.linalg.vector_norm(b.float()).clamp_min(torch.finfo(torch.float32).tiny))


def _maps_apart(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """||U_a B_a - U_b B_b|| / ||U_b B_b||, B the (E*I, r) coefficients: what a map does, whatever its basis.

    ||U_a B_a^T||^2 = tr(U_a^T U_a B_a^T B_a), and so for the mixed term: only r x r matrices are formed.
    """

    def inner(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        return ((x[0].T @ y[0]).double() * (x[1].T @ y[1]).double()).sum()

    square = inner(a, a) - 2 * inner(a, b) + inner(b, b)
    return float((square.clamp_min(0) / inner(b, b).clamp_min(torch.finfo(torch.float64).tiny)).sqrt())


def _expect_same(here: Tensor, there: Tensor, name: str) -> None:
    if here.dtype != there.dtype or not torch.equal(_bits(here), _bits(there)):
        raise VerifyError(f"{name} is not bit for bit the source's", "convert the source again")


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals itself there, and -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
