"""The published reads to the digit, and the corners of the sector accounting."""

import pytest

from mreader.budget import BlockShape, Reads, channels_to_k, count_reads, reads_to_k
from mreader.errors import UsageError
from mreader.formats.codes import QUATERNARY, TERNARY
from mreader.kernels.layout import GPU

QWEN3_30B = BlockShape(hidden=2048, channels=768, routed=8, rank=32, code=TERNARY)
OLMOE_TINY = BlockShape(hidden=256, channels=64, routed=8, rank=32, code=TERNARY)


def percent(reads: Reads) -> list[str]:
    return [f"{100 * part:.2f}" for part in (reads.sketch, reads.exact, reads.recovery, reads.total)]


@pytest.mark.parametrize(
    ("channels", "k", "coordinates", "score", "expected"),
    [
        (0.0725, 445, 80, "norm", ["4.88", "7.24", "0.69", "12.81"]),
        (0.0725, 445, 80, "variance", ["4.88", "7.24", "0.69", "12.81"]),
        (0.122, 750, 80, "variance", ["4.88", "12.21", "0.69", "17.78"]),
        (0.2, 1229, 128, "rho", ["8.00", "20.00", "0.69", "28.70"]),
    ],
)
def test_published_reads(channels: float, k: int, coordinates: int, score: str, expected: list[str]) -> None:
    assert channels_to_k(QWEN3_30B, channels) == k
    assert percent(count_reads(QWEN3_30B, k, coordinates, score, 32)) == expected


@pytest.mark.parametrize(
    ("reads", "coordinates", "score", "k"),
    [(0.128, 80, "norm", 444), (0.178, 80, "norm", 751), (0.287, 128, "rho", 1228)],
)
def test_k_of_published_reads(reads: float, coordinates: int, score: str, k: int) -> None:
    assert reads_to_k(QWEN3_30B, reads, coordinates, score, 32) == k
    assert count_reads(QWEN3_30B, k, coordinates, score, 32).total <= reads
    assert count_reads(QWEN3_30B, k + 1, coordinates, score, 32).total > reads


def test_bytes_of_a_token() -> None:
    # By hand: codes 2*16*80*160, scales 2*16*768*2, norms 768*2, for 8 experts; 444 * 3 rows of 4096; b and U.
    sketch = 8 * (2 * 16 * 80 * 160 + 2 * 16 * 768 * 2 + 768 * 2)
    expected = sketch + 444 * 3 * 4096 + 8 * 768 * 64 + 2048 * 64
    assert count_reads(QWEN3_30B, 444, 80, "norm", 32).bytes == expected


def test_biases_are_read_in_any_case() -> None:
    # By hand: of 4 experts, gate and up biases 2*2880*2 bytes and a down bias of 2880*2; both are whole sectors.
    plain, biased = (BlockShape(2880, 2880, 4, 32, TERNARY, biased=biased) for biased in (False, True))
    extra = 4 * (2 * 2880 * 2 + 2880 * 2)
    assert biased.native_bytes - plain.native_bytes == extra
    for k in (0, 1405, biased.candidates):
        reads = [count_reads(shape, k, 80, "variance", 32).bytes for shape in (plain, biased)]
        assert reads[1] - reads[0] == extra
    k = reads_to_k(biased, 0.178, 80, "variance", 32)
    assert count_reads(biased, k, 80, "variance", 32).total <= 0.178
    assert count_reads(biased, k + 1, 80, "variance", 32).total > 0.178


def test_a_budget_below_sketch_and_recovery_names_the_least_one_which_works() -> None:
    with pytest.raises(UsageError, match=r"17\.32 %"):
        reads_to_k(OLMOE_TINY, 0.15, 80, "variance", 32)
    assert reads_to_k(OLMOE_TINY, 0.1732, 80, "variance", 32) == 0


@pytest.mark.parametrize("shape", [QWEN3_30B, OLMOE_TINY, BlockShape(100, 7, 2, 5, QUATERNARY, 4)])
@pytest.mark.parametrize("rank", [0, 3, 5])
def test_counted_reads_buy_their_k_back(shape: BlockShape, rank: int) -> None:
    for k in range(0, shape.candidates, 1 + shape.candidates // 50):
        reads = count_reads(shape, k, 64, "rho", rank).total
        if reads <= 1:
            assert reads_to_k(shape, reads, 64, "rho", rank) == k


def test_k_of_a_share_of_channels_is_rounded_and_bounded() -> None:
    assert channels_to_k(OLMOE_TINY, 1.0) == 512
    assert channels_to_k(OLMOE_TINY, 1e-9) == 0
    for bad in (0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(UsageError, match="channels"):
            channels_to_k(OLMOE_TINY, bad)
        with pytest.raises(UsageError, match="reads"):
            reads_to_k(OLMOE_TINY, bad, 80, "norm", 32)


def test_stored_errors_are_counted_for_rho_only() -> None:
    norm, variance, rho = (count_reads(QWEN3_30B, 0, 128, score, 0).bytes for score in ("norm", "variance", "rho"))
    assert norm == variance
    assert rho - norm == 8 * 2 * 16 * 768 * 2


def test_rows_that_are_no_whole_sectors_touch_one_more_at_times() -> None:
    # A row of 200 bytes at stride 200 begins at 0, 8, 16 or 24 bytes into a sector: 7, 7, 7 and 7 sectors.
    shape = BlockShape(hidden=100, channels=7, routed=2, rank=5, code=TERNARY)
    assert shape.channel_sectors == 3 * 7
    # 72, 40 and 36 bytes likewise: 3, 2 and 2, wherever they begin.
    assert [BlockShape(h, 7, 2, 5, TERNARY).channel_sectors / 3 for h in (36, 20, 18)] == [3, 2, 2]


def test_reading_every_channel_is_never_more_than_the_matrices() -> None:
    shape = BlockShape(hidden=100, channels=7, routed=2, rank=5, code=TERNARY)
    assert count_reads(shape, shape.candidates, 80, "norm", 0).exact == 1


@pytest.mark.parametrize(("rank", "share"), [(0, 0), (1, 0.5), (8, 0.5), (16, 0.5), (17, 1), (32, 1)])
def test_a_lower_rank_is_read_in_whole_sectors(rank: int, share: float) -> None:
    full = count_reads(QWEN3_30B, 0, 80, "norm", 32).recovery
    assert count_reads(QWEN3_30B, 0, 80, "norm", rank).recovery == share * full


def test_a_lower_rank_of_short_rows_is_never_more_than_the_table() -> None:
    # Rows of 8 bytes: four share a sector, so reading 2 bytes of each reads them all.
    shape = BlockShape(hidden=256, channels=64, routed=8, rank=4, code=TERNARY)
    assert count_reads(shape, 0, 80, "norm", 1).recovery == count_reads(shape, 0, 80, "norm", 4).recovery


def test_a_rank_above_the_stored_one_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 32 is stored"):
        count_reads(QWEN3_30B, 0, 80, "norm", 33)


def test_another_layout_counts_its_own_bytes() -> None:
    """2 bits a code: 12 tiles of 32 bytes a coordinate, gate and up together, instead of two rows of 160; two norms."""
    shape = BlockShape(2048, 768, 8, 32, TERNARY, layout=GPU)
    more = count_reads(shape, 0, 80, "norm", 32).bytes - count_reads(QWEN3_30B, 0, 80, "norm", 32).bytes
    assert more == 8 * (16 * 80 * (12 * 32 - 2 * 160) + 2 * 768)


def test_a_gpu_reads_whole_tiles() -> None:
    """704 channels are 11 tiles of codes, and scales of 11 * 64 channels; 80 channels are 2 tiles."""
    for channels, tiles in ((704, 11), (80, 2)):
        assert GPU.code_runs(TERNARY, channels) == (tiles * 32,)
        assert GPU.stored_channels(channels) == tiles * 64
