"""The recovery map against the exact singular value decomposition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mreader.errors import UsageError
from mreader.recovery import recovery_basis, recovery_coeffs

# Rounding a unit vector to float32 moves it by at most 2^-24, so products of two, and energies, by 2^-23 and a little.
ROUNDED = 2**-22
# The share of all energy that the iteration may leave behind (mreader/recovery.py); SPEC.md allows 2.5 times that.
LEFT = 2e-4


def gaussian(hidden: int, channels: int, experts: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(hidden + channels)
    return list(torch.randn(experts, hidden, channels).mul(0.02).to(dtype))


def decaying(hidden: int, channels: int, experts: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Singular values that fall like those of trained down projections."""
    directions = torch.linalg.qr(torch.randn(hidden, hidden)).Q * (1 + 5 * torch.arange(1, hidden + 1) ** -0.5)
    return [(directions @ down.float()).to(dtype) for down in gaussian(hidden, channels, experts, dtype)]


def gram(down: list[Tensor]) -> Tensor:
    return sum((expert.double() @ expert.double().t() for expert in down), torch.zeros(()))


def top_energy(down: list[Tensor], rank: int) -> float:
    return torch.linalg.eigvalsh(gram(down))[-rank:].sum().item()


def energies(basis: Tensor, down: list[Tensor]) -> Tensor:
    """Energy of the down projections along each column."""
    return ((gram(down) @ basis.double()) * basis).sum(0)


def check_orthonormal(basis: Tensor) -> None:
    products = basis.double().t() @ basis.double()
    torch.testing.assert_close(products, torch.eye(basis.shape[1]).double(), rtol=0, atol=ROUNDED)


@pytest.mark.parametrize("make", [gaussian, decaying])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("hidden", "channels", "experts"), [(256, 64, 32), (320, 48, 5), (64, 96, 4), (512, 64, 8)])
def test_basis_keeps_the_energy_of_the_exact_one(
    make: type, dtype: torch.dtype, hidden: int, channels: int, experts: int
) -> None:
    down = make(hidden, channels, experts, dtype)
    basis = recovery_basis(down, 32, seed=0)
    assert basis.shape == (hidden, 32)
    assert basis.dtype == torch.float32
    kept = energies(basis, down)
    assert kept.sum().item() >= top_energy(down, 32) - LEFT * gram(down).trace().item()
    assert bool((kept[:-1] > kept[1:]).all())  # neighbours are 6e-4 apart and more here, far above rounding
    check_orthonormal(basis)
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    assert bool((largest > 0).all())


def test_columns_are_the_singular_vectors() -> None:
    down = decaying(128, 64, 4, torch.float32)
    basis = recovery_basis(down, 4, seed=0).double()
    exact = torch.linalg.svd(torch.cat(down, 1).double()).U[:, :4]
    # 1e-5 was measured. What the iteration may leave behind would allow 1e-2: its estimate of that is an upper bound.
    torch.testing.assert_close((basis * exact).sum(0).abs(), torch.ones(4).double(), rtol=0, atol=1e-4)


def test_the_same_bits_again_and_nearly_the_same_energy_with_another_seed() -> None:
    down = decaying(256, 64, 8)
    first, again, other = (recovery_basis(down, 32, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    left = LEFT * gram(down).trace().item()
    torch.testing.assert_close(energies(first, down).sum(), energies(other, down).sum(), rtol=0, atol=left)


def test_full_rank_keeps_everything() -> None:
    down = gaussian(48, 40, 3, torch.float32)
    basis = recovery_basis(down, 48, seed=0)
    torch.testing.assert_close(energies(basis, down).sum(), gram(down).trace(), rtol=ROUNDED, atol=0)


def test_matrices_of_lower_rank_than_asked_give_an_orthonormal_basis_all_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(96, 3, generator=generator)
    for down in ([thin @ torch.randn(3, 40, generator=generator)] * 2, [torch.zeros(96, 40)] * 2):
        basis = recovery_basis(down, 16, seed=0)
        check_orthonormal(basis)
        torch.testing.assert_close(energies(basis, down).sum(), gram(down).trace(), rtol=ROUNDED, atol=0)


def test_coefficients_are_the_projections() -> None:
    down = decaying(96, 40, 3)
    basis = recovery_basis(down, 8, seed=0)
    coeffs = recovery_coeffs(basis, down[1])
    assert coeffs.shape == (40, 8)
    assert coeffs.dtype == torch.float32
    # A float32 sum of H products is off by at most H 2^-24 times the size of both vectors, and by far less as a rule.
    bound = 96 * 2**-24 * float(down[1].float().norm(dim=0).max())
    torch.testing.assert_close(coeffs.double(), down[1].double().t() @ basis.double(), rtol=0, atol=bound)


def test_experts_are_read_one_at_a_time() -> None:
    down = gaussian(128, 16, 6)

    class Lazy(list[Tensor]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return (self[i] for i in range(len(self)))

        def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
            return down[range(len(down))[index]].clone()

    assert torch.equal(recovery_basis(Lazy(down), 8, seed=0), recovery_basis(down, 8, seed=0))


def test_rank_zero_is_an_empty_map() -> None:
    down = gaussian(32, 8, 2)
    basis = recovery_basis(down, 0, seed=0)
    assert basis.shape == (32, 0)
    assert recovery_coeffs(basis, down[0]).shape == (8, 0)


@pytest.mark.parametrize("rank", [-1, 25, 33])
def test_impossible_ranks_are_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="0 to 24"):
        recovery_basis(gaussian(32, 8, 3), rank, seed=0)
