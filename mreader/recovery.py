"""The recovery map: the directions that hold most of the down projections' energy."""

# E experts, H hidden size, I channels of an expert, r rank, q columns of a step (r and a few more)

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mreader.errors import UsageError

Each = Callable[[Callable[[Tensor], Tensor], Sequence[Tensor]], Iterable[Tensor]]

_OVERSAMPLING = 16
_MAX_STEPS = 16
_NEGLIGIBLE = 1e-6  # of a part outside the basis: products are rounded to 8 or 24 bits
# The share of all energy still to be gained at which the iteration ends. An upper bound: the extrapolation takes the
# gains to fall at the last rate, and they fall ever faster.
_TOLERANCE = 2e-4


def recovery_basis(down: Sequence[Tensor], rank: int, seed: int, each: Each = map) -> Tensor:
    """U = the top r left singular vectors of A = [D_1 ... D_E].

    A seeded subspace iteration that keeps every subspace on its way (block Krylov): a step is one pass
    Q -> sum_e D_e (D_e^T Q) over the experts, made orthogonal to all the steps before. It ends when the energy that
    further steps would add is below 2e-4 of ||A||^2: 5 passes on trained weights, whose basis holds 20 to 30 % of that,
    and 6 on random ones, whose basis holds 2 %. A last half pass in float32 turns the result to the singular vectors.

    down:    sequence of (H, I) floating point - one down projection an expert; read one at a time, several times over
    rank:    r
    seed:    of the random start
    each:    `map`, or one that runs experts side by side; their products are added in order, so U is the same
    returns: (H, r) float32 - orthonormal columns, by falling singular value, the entry of largest size positive
    Raises UsageError where r is negative or exceeds min(H, E * I).
    Source: Musco and Musco, "Randomized Block Krylov Methods for Stronger and Faster Approximate SVD", 2015.
    """
    hidden = down[0].shape[0]
    limit = min(hidden, len(down) * down[0].shape[1])
    if not 0 <= rank <= limit:
        raise UsageError(
            f"no recovery map of rank {rank}: the down projections allow 0 to {limit}", "choose a lower rank"
        )
    if rank == 0:
        return torch.zeros(hidden, 0, device=down[0].device)
    subspace = _krylov_subspace(down, rank, min(rank + _OVERSAMPLING, hidden), seed, each)
    return _fix_signs(_turn_to_singular(down, subspace, rank, each)).float().contiguous().to(down[0].device)


def recovery_coeffs(basis: Tensor, down: Tensor) -> Tensor:
    """b_j = U^T d_j.

    basis:   (H, r) float32 - unrounded U
    down:    (H, I) floating point
    returns: (I, r) float32
    """
    return down.float().t() @ basis


def _krylov_subspace(down: Sequence[Tensor], rank: int, width: int, seed: int, each: Each) -> Tensor:
    """(H, q) float64 on the CPU, orthonormal: the top Ritz vectors of A A^T.

    Only products with the experts run on the device: the small matrices are factorised on the CPU, whose results are
    the same bits every time.
    """
    hidden = down[0].shape[0]
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(hidden, width, generator=generator, dtype=torch.float64)
    basis = newest = torch.linalg.qr(start).Q
    images: list[Tensor] = []
    energies = [0.0]
    while True:
        images.append(_apply_gram(down, newest, each))
        values, vectors = _ritz(basis, torch.cat(images, 1))
        energies.append(float(values[-rank:].sum()))
        if len(images) == 1:
            everything = float(values.sum()) * hidden / width  # what a random subspace holds is its share of ||A||^2
        free = hidden - basis.shape[1]
        if free == 0 or len(images) == _MAX_STEPS or _converged(energies, everything):
            top: Tensor = basis @ vectors[:, -width:]
            return top
        newest = _orthonormal_to(basis, images[-1][:, :free])
        if newest.shape[1] == 0:  # A has no more directions than these
            found: Tensor = basis @ vectors[:, -width:]
            return found
        basis = torch.cat([basis, newest], 1)


def _apply_gram(down: Sequence[Tensor], columns: Tensor, each: Each) -> Tensor:
    """sum_e D_e (D_e^T Q) in float64, each expert's product in the fast precision of its weights."""
    there = columns.t().contiguous().to(down[0].device)
    narrow = {dtype: there.to(dtype) for dtype in (torch.bfloat16, torch.float32)}

    def product(expert: Tensor) -> Tensor:
        weights = expert if _has_fast_product(expert) else expert.float()
        return weights @ (narrow[weights.dtype] @ weights).t()

    image = torch.zeros_like(columns, dtype=torch.float32, device=there.device)
    for part in each(product, down):
        image += part
    return image.double().cpu()


def _has_fast_product(weights: Tensor) -> bool:
    """Whether a 16-bit product saves time: with AMX, eight times. Its rounding costs 4e-5 of the energy."""
    return weights.dtype == torch.bfloat16 and weights.device.type == "cpu" and torch.cpu._is_amx_tile_supported()


def _ritz(basis: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of Q^T (A A^T Q)."""
    projected = basis.t() @ image
    values, vectors = torch.linalg.eigh((projected + projected.t()) / 2)
    return values, vectors


def _converged(energies: list[float], everything: float) -> bool:
    """Whether the gains, falling like a geometric series, add up to less than the tolerance from here on."""
    if len(energies) < 3:
        return energies[-1] <= 0
    before, gain = energies[-2] - energies[-3], energies[-1] - energies[-2]
    if gain >= before:
        return gain <= 0
    return gain * gain / (before - gain) <= _TOLERANCE * everything


def _orthonormal_to(basis: Tensor, columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns' part outside `basis`: as many columns as that part has directions.

    Twice, for what the first round's rounding left in. What is lost to rounding has no direction of its own, and a QR
    factorisation would make one up that is not orthogonal to the basis.
    """
    size = float(torch.linalg.vector_norm(columns))
    for _ in range(2):
        columns = columns - basis @ (basis.t() @ columns)
        left, values, _ = torch.linalg.svd(columns, full_matrices=False)
        columns = left[:, values > _NEGLIGIBLE * size]
        size = 1.0
    return columns


def _turn_to_singular(down: Sequence[Tensor], subspace: Tensor, rank: int, each: Each) -> Tensor:
    """The subspace's best r directions, by falling singular value of A restricted to it."""
    columns = subspace.float().to(down[0].device)
    gram = torch.zeros(columns.shape[1], columns.shape[1], dtype=torch.float64)
    for seen in each(lambda expert: recovery_coeffs(columns, expert), down):
        gram += (seen.t() @ seen).double().cpu()
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return subspace @ vectors[:, -rank:].flip(1)


def _fix_signs(basis: Tensor) -> Tensor:
    """Each column with the sign that makes its entry of largest size positive."""
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    return torch.where(largest < 0, -basis, basis)
