"""Sectors of every selector against counts by hand."""

from dataclasses import replace

import pytest

from mreader.budget import BlockShape
from mreader.formats.codes import get_code
from mreader.selectors.reads import (
    CostOf,
    InfeasibleError,
    Plan,
    fit_channels,
    free_cost,
    gate_first_cost,
    inputs_cost,
    low_rank_cost,
    nominating_cost,
    proxy_cost,
    reader_cost,
    run_sectors,
    to_nearest,
    weighted_inputs_cost,
)

QWEN = BlockShape(hidden=2048, channels=768, routed=8, rank=32, code=get_code("ternary"))
# One matrix: 768 * 2048 BF16 weights, 98,304 sectors; a row of it 128; a run of one input coordinate 48.
NATIVE = 3 * 8 * 98_304

# H 192 and I 80: a BF16 row is 384 bytes, 12 sectors; a run of one input coordinate is 160 bytes, 5 sectors.
SMALL = BlockShape(hidden=192, channels=80, routed=3, rank=32, code=get_code("ternary"))
MATRIX = 80 * 192 * 2 // 32


def test_a_run_that_may_begin_anywhere_in_a_sector_touches_more() -> None:
    assert run_sectors(64, 64) == 2
    # 48 bytes from 0 touch sectors 0 and 1, from 48 they touch 1 and 2
    assert run_sectors(48, 48) == 2
    # 8 bytes at multiples of 8 never cross
    assert run_sectors(8, 8) == 1
    # 40 bytes: from 0 two sectors, from 40 two (1, 2), from 80 two (2, 3), from 120 two (3, 4)
    assert run_sectors(40, 40) == 2


@pytest.mark.parametrize(
    ("k", "coordinates", "score", "percent"),
    [(445, 80, "norm", 12.81), (750, 80, "norm", 17.78), (1229, 128, "rho", 28.70)],
)
def test_the_reader_s_published_reads(k: int, coordinates: int, score: str, percent: float) -> None:
    cost = reader_cost(QWEN, Plan(coordinates=coordinates, score=score, rank=32))
    assert 100 * cost.sectors(k) / NATIVE == pytest.approx(percent, abs=0.005)


@pytest.mark.parametrize(("reads", "k"), [(0.128, 444), (0.178, 751), (0.287, 1228)])
def test_the_reader_s_published_budgets(reads: float, k: int) -> None:
    plan = Plan(coordinates=128 if k == 1228 else 80, score="rho" if k == 1228 else "variance", rank=32)
    assert fit_channels("reader", QWEN, reads, plan, reader_cost).k == k


def test_one_whole_matrix_and_two_rows_a_channel() -> None:
    cost = gate_first_cost(SMALL, Plan())
    assert (cost.fixed, cost.channel) == (3 * MATRIX, 2 * 12)
    # everything kept is everything read
    assert cost.sectors(240) == 3 * 3 * MATRIX == SMALL.native_sectors


def test_inputs_are_charged_by_the_run_and_down_by_the_channel() -> None:
    cost = inputs_cost(SMALL, Plan(gate=0.5, up=0.25))
    assert (cost.fixed, cost.unit, cost.units, cost.channel) == (0, 5, 3 * (96 + 48), 12)
    assert inputs_cost(SMALL, Plan()).sectors(240) == SMALL.native_sectors


def test_column_norms_are_read_too() -> None:
    """FP16 norms of 192, 192 and 80 columns an expert: 384, 384 and 160 bytes."""
    assert weighted_inputs_cost(SMALL, Plan()).fixed == 3 * (12 + 12 + 5)


def test_factors_are_read_whole() -> None:
    """R = 4: 4 * 192 * 2 = 1,536 and 4 * 80 * 2 = 640 bytes a matrix, 48 and 20 sectors."""
    plan = Plan(factor_rank=4)
    assert low_rank_cost(SMALL, plan).fixed - weighted_inputs_cost(SMALL, plan).fixed == 3 * 3 * (48 + 20)


def test_a_rank_of_512_costs_what_the_design_page_says() -> None:
    """30.6 % of a 2048 x 768 expert for one pair of factors: low-rank predictors do not shrink with the expert."""
    plan = Plan(factor_rank=512)
    factors = low_rank_cost(QWEN, plan).fixed - weighted_inputs_cost(QWEN, plan).fixed
    assert factors / 3 / NATIVE == pytest.approx(0.306, abs=0.001)


def test_a_nominated_channel_costs_two_rows_and_a_kept_one_the_third() -> None:
    """2-bit copies of gate and up: 80 * 192 / 4 = 3,840 bytes, 120 sectors; FP16 scales of 80 rows, 5 sectors."""
    cost = nominating_cost(SMALL, Plan(k=10, nominated=2))
    assert (cost.fixed, cost.unit, cost.units, cost.channel) == (3 * 2 * 125, 24, 20, 12)


def test_a_proxy_is_charged_in_whole_sectors() -> None:
    """INT4 runs of 80 channels are 40 bytes, which touch two sectors: as many as 64 bytes."""
    cost = proxy_cost(SMALL, Plan(gate=0.5, up=0.5))
    assert (cost.fixed, cost.unit, cost.units, cost.channel) == (3 * 2 * 5, 2, 3 * 2 * 96, 36)


def test_the_oracle_pays_for_what_it_keeps() -> None:
    assert free_cost(SMALL, Plan()).sectors(7) == 7 * 36


@pytest.mark.parametrize("cost", [reader_cost, gate_first_cost, inputs_cost, nominating_cost, proxy_cost, free_cost])
def test_a_recovery_map_costs_every_selector_the_same(cost: CostOf) -> None:
    """U: 192 * 32 FP16, 384 sectors; b_j: 80 * 32 FP16 an expert, 160 sectors."""
    difference = cost(SMALL, Plan(rank=32)).fixed - cost(SMALL, Plan()).fixed
    assert difference == pytest.approx(384 + 3 * 160)


def test_a_budget_buys_the_largest_k_that_fits() -> None:
    for cost in (gate_first_cost, nominating_cost, proxy_cost, free_cost):
        plan = fit_channels("x", SMALL, 0.6, Plan(gate=0.5, up=0.5), cost)
        spent = [cost(SMALL, replace(plan, k=k)).sectors(k) / SMALL.native_sectors for k in (plan.k, plan.k + 1)]
        assert spent[0] <= 0.6 < spent[1]


def test_to_match_reads_the_nearest_number_of_channels_is_taken() -> None:
    """A channel is 36 sectors: 10.4 of them are 10, 10.6 of them 11."""
    for channels, k in ((10.4, 10), (10.6, 11)):
        reads = 36 * channels / SMALL.native_sectors
        plan = fit_channels("oracle", SMALL, reads, Plan(), free_cost)
        assert plan.k == 10
        assert to_nearest(SMALL, reads, plan, free_cost).k == k


def test_a_third_is_the_least_of_what_reads_a_matrix_first() -> None:
    with pytest.raises(InfeasibleError) as caught:
        fit_channels("cats", QWEN, 0.33, Plan(), gate_first_cost)
    assert "33.33 %" in caught.value.remedy
    assert fit_channels("cats", QWEN, 0.4, Plan(), gate_first_cost).k == 614  # (0.4 - 1/3) / (2/3) of 6,144
