"""Whether an augmented checkpoint is what it says it is, and what its source says it should be.

E experts, H hidden size, I channels of an expert, nb blocks, C = nb * 128 rotated coordinates, r rank.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mreader.augment import LayerAugmenter, experts_side_by_side
from mreader.dequantize import open_tensors
from mreader.errors import SourceError, VerifyError
from mreader.formats.architectures import RoutedLayer
from mreader.formats.augmented import MANIFEST, SOURCE, Augmented
from mreader.formats.bits import refuse_non_finite
from mreader.formats.checkpoint import Checkpoint, list_files, open_checkpoint
from mreader.formats.codes import BLOCK, Code
from mreader.formats.coding import unpack, values
from mreader.formats.quantized import dequantized
from mreader.formats.safetensors_file import FileRecord
from mreader.hashing import changed_files
from mreader.native import native_matrix, open_to_verify
from mreader.output import CARD
from mreader.progress import Progress
from mreader.recovery import recovery_coeffs
from mreader.sketch import rotate_rows

# A weight on the boundary between two codes may fall to either side by the last bit of a float32 sum, which depends on
# the device and the number of threads. It happens to fewer than one block in 100,000 of trained or random weights, and
# to more where a few weights outweigh the rest of their block; a layer of few blocks may have one such block.
_BLOCKS_APART = 1e-3
# Where the codes of a block agree, s and rho are sums over the same weights: a last bit more or less, which rounding
# turns into one step of FP16 or BF16.
_FP16_STEP, _BF16_STEP = 2.0**-10, 2.0**-7
# The scale of quaternary codes comes from the codes of the round before: one of them on the boundary adds s and 2 to
# its numerator sum |w c| and its denominator sum c^2 >= 32, and leaves rho, which is least near there, almost alone.
_SETTLING = {"quaternary": (2.0**-5, 2.0**-6)}
# Where they differ, the stored codes have to be about as good: the error is flat where codes are best. It is compared
# to a thousandth of the block's energy at least, for both may be nearly exact.
_WORSE_CODES = 2.0**-3
_LEAST_SHARE = 2.0**-10
# rho of a block whose codes are nearly exact is the rounding of s and of the rotation, in which the last bits of
# float32 show: it is compared to s^2 times this at least.
_LEAST_ERROR = 2.0**-23
_LEAST_FP16 = 2.0**-14  # the least normal number: below it the steps do not get smaller
_TINY = torch.finfo(torch.float32).tiny
# FP16 moves U and b by about 4e-4 of their norm.
_COEFFS_APART = 1e-3
_BASIS_APART = 5e-3
# Of ||A||^2, by the specification. Not of the energy that U keeps: where the down projections have no main directions
# that is a few percent, and one pass of the iteration more or less moves it by more than a thousandth of itself.
_ENERGY_APART = 5e-4
_HALF_SPACING = 2.0**-25  # of FP16's subnormal numbers, half of what rounding may move a small coefficient by
_LOADED = (".safetensors", ".index.json")  # by one loader or another, by the name alone


@dataclass(frozen=True)
class _Difference:
    """How far a tensor is from the recomputed one, how far it may be, and the place where it is farthest."""

    part: str
    apart: float
    allowed: float
    where: str = ""


@dataclass(frozen=True)
class Verified:
    """What was checked.

    unlisted: names of files in the folder that do not belong to the checkpoint, which were not
    """

    files: int
    tensors: int
    layers_compared: int
    unlisted: tuple[str, ...]


def verify(out: str | Path, source: str | Path | None = None, *, progress: Progress | None = None) -> Verified:
    """Check tensors, shapes, checksums and finite values; with a source, every weight and everything computed from it.

    source: the folder that `out` was converted from: its weights must be there bit for bit (down transposed back; of a
            quantized one, those that it dequantizes to), and
            sketch and norms must be those computed from it again, block by block and channel by channel, up to the
            rounding of what is stored. The recovery map need not be the same one, for where the down projections have
            no few main directions any noise turns it: U must be orthonormal, every b_j = U^T d_j within 1e-3, and U
            must keep as much of the down projections' energy as another one, up to 0.05 % of all their energy

    Files that do not belong to the checkpoint are named in the result, and no more: they may be the user's own. Stale
    weights and indexes fail, *.safetensors and *.index.json in the folder itself, since loaders go by the name alone:
    vLLM takes every shard there where there is no index, mlx-lm every model*.safetensors whatever the index says.

    Raises VerifyError naming the first file or tensor at fault, or all stale files, and what `open_augmented` raises.
    """
    progress = progress or Progress()
    augmented = open_to_verify(Path(out))
    unlisted = _unlisted(augmented)
    _refuse_stale_weights(unlisted)
    check_hashes(augmented, progress)
    _check_finite(augmented, progress)
    layers = 0
    if source is not None:
        original = dequantized(open_checkpoint(Path(source)))
        _compare_copied(augmented, original, progress)
        with experts_side_by_side(torch.device("cpu")) as pool:
            for layer in augmented.architecture.layers:
                progress.layer(layer.ordinal + 1, len(augmented.architecture.layers))
                _compare_layer(augmented, original, layer, pool)
                progress.advance(sum(original.spec(name).nbytes for name in layer.tensors))
                layers += 1
    return Verified(len(augmented.manifest["files"]), len(augmented.checkpoint.tensors), layers, unlisted)


def _own_files(augmented: Augmented) -> tuple[str, ...]:
    """The files that the manifest has to list."""
    names = (*augmented.checkpoint.headers, *augmented.checkpoint.texts, SOURCE, *augmented.source.files)
    return tuple(name for name in names if name != CARD)


def _unlisted(augmented: Augmented) -> tuple[str, ...]:
    """The files in the folder that are not of the checkpoint; a README.md may be anyone's."""
    own = {*augmented.manifest["files"], *_own_files(augmented), MANIFEST, CARD}
    return tuple(name for name in list_files(augmented.folder) if name not in own)


def _refuse_stale_weights(unlisted: tuple[str, ...]) -> None:
    stale = [name for name in unlisted if name.endswith(_LOADED) and "/" not in name]
    if stale:
        raise VerifyError(
            f"weights that are not of the checkpoint, but that loaders may take: {', '.join(stale)}",
            "remove what is out of date, or move it elsewhere",
        )


def check_hashes(augmented: Augmented, progress: Progress) -> None:
    """VerifyError where a file of the checkpoint is not as its manifest says."""
    records = {augmented.folder / name: FileRecord.of(e) for name, e in augmented.manifest["files"].items()}
    names = {path.relative_to(augmented.folder).as_posix() for path in records}
    for name in _own_files(augmented):
        if name not in names:
            raise VerifyError(f"{MANIFEST} does not list {name}", "convert the source again")
    progress.begin("checksums", sum(record.bytes for record in records.values()))
    for path, fault in changed_files(records, progress.advance):
        name = path.relative_to(augmented.folder).as_posix()
        raise VerifyError(f"{name} {fault}, by {MANIFEST}", "download it again, or convert the source again")


def _check_finite(augmented: Augmented, progress: Progress) -> None:
    progress.begin("finite values", augmented.checkpoint.nbytes)
    for name, spec in augmented.checkpoint.tensors.items():
        with augmented.bits() as bits:
            try:
                refuse_non_finite(name, bits[name], spec.dtype)
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
        with open_tensors(source) as there, augmented.tensors() as here:
            _expect_same(here[name], there[name], name)
        progress.advance(source.spec(name).nbytes)


def _compare_layer(augmented: Augmented, source: Checkpoint, layer: RoutedLayer, pool: Executor) -> None:
    with open_tensors(source) as there, augmented.tensors() as here:
        for kind, matrices in layer.matrices.items():
            for expert, matrix in enumerate(matrices):
                _expect_same(
                    native_matrix(here, layer, kind, expert),
                    matrix.read(there),
                    f"{matrix.tensor} ({kind} of expert {expert})",
                )
        again = LayerAugmenter(layer, there, augmented.options, torch.device("cpu"), pool)
        stored = augmented.layer(layer, here)
        down = [matrix.read(there) for matrix in layer.down]
        for difference in (
            *_sketch_differences(stored, again.sketch, augmented.options.code, layer, there),
            *_norm_differences(stored["down_norms"], again.recovery["down_norms"]),
            *_recovery_differences(stored, down, again),
        ):
            if not difference.apart <= difference.allowed:
                raise VerifyError(
                    f"{layer.prefix}.{difference.part}{difference.where} differs by {difference.apart:.2g} "
                    f"from what the source gives, {difference.allowed:g} is allowed",
                    "convert the source again",
                )


def _sketch_differences(
    stored: dict[str, Tensor], again: dict[str, Tensor], code: Code, layer: RoutedLayer, there: Mapping[str, Tensor]
) -> Iterator[_Difference]:
    """Codes by their share of other blocks; s and rho of every block with the same codes, and how good others are."""
    codes, scales, errors = stored["sketch_codes"], again["sketch_scales"].float(), again["sketch_errors"].float()
    other = _other_blocks(codes, again["sketch_codes"], code, layer.channels)
    share = int(other.sum()) / max(other.numel(), 1)
    yield _Difference("sketch_codes", share, max(_BLOCKS_APART, 1 / max(other.numel(), 1)), " (share of its blocks)")
    yield _Difference(
        "sketch_codes", _share_unused(codes, code, layer.channels), 0.0, " (share of bytes that mean nothing)"
    )
    yield _Difference("sketch_signs", _share_apart(stored["sketch_signs"], again["sketch_signs"]), 0.0)

    least_error = (scales.square() * _LEAST_ERROR).clamp_min_(torch.finfo(torch.bfloat16).tiny)
    scales_apart = (stored["sketch_scales"].float() - scales).abs() / scales.clamp_min(_LEAST_FP16)
    errors_apart = (stored["sketch_errors"].float() - errors).abs() / errors.maximum(least_error)
    scale_limit, error_limit = _SETTLING.get(code.name, (_FP16_STEP, _BF16_STEP))
    for part, apart, step, limit in (
        ("sketch_scales", scales_apart, _FP16_STEP, scale_limit),
        ("sketch_errors", errors_apart, _BF16_STEP, error_limit),
    ):
        same = apart.masked_fill(other, 0.0)
        yield _farthest_block(part, same, limit)
        moved = int((same > step).sum()) / max(same.numel(), 1)
        yield _Difference(part, moved, _BLOCKS_APART, " (share of its blocks)")
    for expert, matrix, block, channel in other.nonzero().tolist():
        row = (layer.gate, layer.up)[matrix][expert].read(there)[channel : channel + 1]
        weights = rotate_rows(row, stored["sketch_signs"])[0, block]
        yield from _code_differences(stored, errors, code, weights, (expert, matrix, block, channel))


def _code_differences(
    stored: dict[str, Tensor], best: Tensor, code: Code, weights: Tensor, at: tuple[int, int, int, int]
) -> Iterator[_Difference]:
    """One block whose codes differ: rho has to be theirs, and about as small as the recomputed one.

    best:    (E, 2, nb, I) float32 - the recomputed rho
    weights: (B,) float32 - the block, rotated
    at:      expert, matrix, block, channel
    """
    expert, matrix, block, channel = at
    codes = stored["sketch_codes"][expert, matrix, block * BLOCK : (block + 1) * BLOCK]
    scale, where = float(stored["sketch_scales"][at]), _block_name(*at)
    error = _mean_square(weights - scale * _levels(codes, channel, code))
    wrong = abs(float(stored["sketch_errors"][at]) - error) / max(error, scale**2 * _LEAST_ERROR, _TINY)
    yield _Difference("sketch_errors", wrong, _BF16_STEP, where)
    least = max(float(best[at]), _mean_square(weights) * _LEAST_SHARE, _TINY)
    yield _Difference("sketch_codes", (error - float(best[at])) / least, _WORSE_CODES, where)


def _levels(packed: Tensor, channel: int, code: Code) -> Tensor:
    """(B,) float32: the levels of one channel in the rows of a block."""
    byte, digit = divmod(channel, code.per_byte)
    return values(unpack(packed[:, byte : byte + 1], code, code.per_byte)[:, digit], code)


def _mean_square(tensor: Tensor) -> float:
    return float(tensor.square().mean())


def _other_blocks(a: Tensor, b: Tensor, code: Code, channels: int) -> Tensor:
    """(E, 2, nb, I) bool: the blocks whose codes differ; unpacked only where bytes do, codes are many more than bytes.

    a, b: (E, 2, C, row bytes) uint8
    """
    experts, _, coordinates, _ = a.shape
    other = torch.zeros(experts, 2, coordinates // BLOCK, channels, dtype=torch.bool)
    for blocks, x, y in zip(other, a, b, strict=True):
        if not torch.equal(x, y):
            blocks[:] = (unpack(x, code, channels) != unpack(y, code, channels)).view(2, -1, BLOCK, channels).any(2)
    return other


def _farthest_block(part: str, apart: Tensor, allowed: float) -> _Difference:
    expert, matrix, block, channel = (int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    return _Difference(part, float(apart.max()), allowed, _block_name(expert, matrix, block, channel))


def _block_name(expert: int, matrix: int, block: int, channel: int) -> str:
    return f" ({('gate', 'up')[matrix]} of expert {expert}, channel {channel}, block {block})"


def _farthest_channel(part: str, apart: Tensor, allowed: float) -> _Difference:
    expert, channel = (int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    return _Difference(part, float(apart.max()), allowed, f" (expert {expert}, channel {channel})")


def _norm_differences(stored: Tensor, again: Tensor) -> Iterator[_Difference]:
    apart = (stored.float() - again.float()).abs() / again.float().clamp_min(_LEAST_FP16)
    yield _farthest_channel("down_norms", apart, _FP16_STEP)


def _recovery_differences(
    stored: dict[str, Tensor], down: list[Tensor], again: LayerAugmenter
) -> Iterator[_Difference]:
    """U and b: U^T U = 1, b_j = U^T d_j, and ||U^T A||^2 as large as it can be, up to a share of ||A||^2."""
    basis = stored["recovery_basis"].float()
    if basis.shape[1] == 0:
        return
    yield _Difference("recovery_basis", float((basis.T @ basis - torch.eye(basis.shape[1])).abs().max()), _BASIS_APART)
    coeffs = torch.stack([recovery_coeffs(basis, matrix) for matrix in down])
    size = _norm(coeffs)
    rounding = _HALF_SPACING * coeffs.numel() ** 0.5 / max(size, _TINY)
    apart = stored["recovery_coeffs"].float() - coeffs
    yield _Difference("recovery_coeffs", _norm(apart) / max(size, _TINY), _COEFFS_APART + rounding)
    # Of the channel's down norm: rounding U moves b_j by a share of d_j, however little of d_j lies along U.
    least = 2 * _HALF_SPACING * basis.shape[1] ** 0.5 / _COEFFS_APART
    norms = stored["down_norms"].float().clamp_min(least)
    yield _farthest_channel("recovery_coeffs", torch.linalg.vector_norm(apart, dim=-1) / norms, _COEFFS_APART)
    best = _norm(again.recovery["recovery_coeffs"].float())
    everything = max(_norm(again.recovery["down_norms"].float()) ** 2, _TINY)
    missing = (best**2 - size**2) / everything
    yield _Difference("recovery_basis", missing, _ENERGY_APART, " (energy that it keeps, of all)")


def _share_apart(a: Tensor, b: Tensor) -> float:
    return int(torch.count_nonzero(a != b)) / max(a.numel(), 1)


def _share_unused(packed: Tensor, code: Code, channels: int) -> float:
    """The share of bytes that stand for no codes: padding that is not 0, and numbers beyond the largest digits."""
    used = code.used_bytes(channels)
    wrong = int(torch.count_nonzero(packed[..., used:]))
    if (numbers := code.base**code.per_byte) < 256:
        wrong += int(torch.count_nonzero(packed[..., :used] >= numbers))
    return wrong / packed.numel()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _expect_same(here: Tensor, there: Tensor, name: str) -> None:
    if here.dtype != there.dtype or not torch.equal(_bits(here), _bits(there)):
        raise VerifyError(f"{name} is not bit for bit the source's", "convert the source again")


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals itself there, and -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
