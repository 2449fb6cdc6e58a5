"""Launch parameters: which entry answers, what a user's file changes, and what is written into it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mreader.errors import UsageError
from mreader.kernels import tuning
from mreader.kernels.decode import tuned_blocks
from mreader.kernels.tuning import (
    LayerShape,
    Measured,
    Tuning,
    configuration,
    device_name,
    known_tuning,
    largest_sparse_batch,
    merge,
    read_measured,
    trial,
    user_file,
    write_measured,
)

QWEN3 = LayerShape(experts=128, routed=8, hidden=2048, channels=768)
OLMOE = LayerShape(experts=64, routed=8, hidden=2048, channels=1024)
H200 = "NVIDIA H200"


def measured(shape: LayerShape, warps: dict[int, int], device: str = H200, sparse_up_to: int | None = None) -> Measured:
    """An entry with the warps of `screen` at some batches."""
    return Measured(device, shape, sparse_up_to, {b: {"screen": {"warps": w}} for b, w in warps.items()})


TUNING = Tuning(
    default={"screen": {"warps": 4, "stages": 2}, "select": {"warps": 8}},
    sparse_up_to=64,
    candidates={},
    measured=(measured(QWEN3, {1: 1, 8: 2, 64: 16}, sparse_up_to=48), measured(OLMOE, {1: 32})),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user without a tuning file, and nothing remembered from one test to the next."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget()
    yield
    forget()


def forget() -> None:
    known_tuning.cache_clear()
    tuning._lookup.cache_clear()


@pytest.mark.parametrize(
    ("batch", "warps"),
    [(1, 1), (2, 1), (3, 2), (8, 2), (22, 2), (23, 16), (64, 16), (500, 16)],
)
def test_the_nearest_batch_answers_by_ratio(batch: int, warps: int) -> None:
    assert TUNING.parameters("screen", H200, QWEN3, batch)["warps"] == warps


def test_an_entry_says_only_what_differs_from_the_default() -> None:
    assert TUNING.parameters("screen", H200, QWEN3, 1) == {"warps": 1, "stages": 2}


def test_a_kernel_that_was_not_measured_has_its_default() -> None:
    assert TUNING.parameters("select", H200, QWEN3, 1) == {"warps": 8}


def test_an_unknown_gpu_has_the_default() -> None:
    assert TUNING.parameters("screen", "NVIDIA GeForce RTX 4090", QWEN3, 1) == {"warps": 4, "stages": 2}
    assert TUNING.largest_sparse_batch("NVIDIA GeForce RTX 4090", QWEN3) == 64


def test_an_unknown_shape_has_the_entry_nearest_in_bytes() -> None:
    near_olmoe = LayerShape(experts=32, routed=8, hidden=2048, channels=1100)
    near_qwen3 = LayerShape(experts=32, routed=8, hidden=2048, channels=700)
    assert TUNING.parameters("screen", H200, near_olmoe, 1)["warps"] == 32
    assert TUNING.parameters("screen", H200, near_qwen3, 1)["warps"] == 1


def test_the_largest_sparse_batch_is_that_of_the_nearest_measured_shape() -> None:
    assert TUNING.largest_sparse_batch(H200, QWEN3) == 48
    assert TUNING.largest_sparse_batch(H200, OLMOE) == 48, "its own was not measured"


def test_a_kernel_without_entry_and_default_decides_for_itself() -> None:
    assert TUNING.parameters("dense", H200, QWEN3, 1) == {}


def test_entries_of_the_same_gpu_and_shape_are_merged_batch_by_batch() -> None:
    (entry,) = merge((measured(QWEN3, {1: 1, 8: 2}, sparse_up_to=48),), (measured(QWEN3, {8: 9, 16: 4}),))
    assert entry == measured(QWEN3, {1: 1, 8: 9, 16: 4}, sparse_up_to=48)


def test_what_is_written_is_read_back_and_merged(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "tuning.toml"
    device = 'a "quoted" GPU'
    write_measured(file, (measured(QWEN3, {1: 1}, device, 32), measured(OLMOE, {2: 2})))
    write_measured(file, (measured(QWEN3, {8: 2}, device),))
    assert read_measured(file) == (measured(QWEN3, {1: 1, 8: 2}, device, 32), measured(OLMOE, {2: 2}))
    assert [path.name for path in file.parent.iterdir()] == ["tuning.toml"]


def test_whatever_tuning_may_find_is_read_back(tmp_path: Path) -> None:
    """Every value that is tried, beside the defaults of its kernel."""
    shipped, file = known_tuning(), tmp_path / "tuning.toml"
    for kernel, tried in shipped.candidates.items():
        for name, values in tried.items():
            batches = {
                batch: {kernel: {**shipped.default.get(kernel, {}), name: value}}
                for batch, value in enumerate(values, start=1)
            }
            found = (Measured(H200, QWEN3, None, batches),)
            file.unlink(missing_ok=True)
            write_measured(file, found)
            assert read_measured(file) == found


def test_the_user_s_file_goes_over_the_shipped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    write_measured(user_file(), (measured(QWEN3, {8: 31}, sparse_up_to=7),))
    assert configuration("screen", H200, QWEN3, 8) == {**known_tuning().default["screen"], "warps": 31}
    assert largest_sparse_batch(H200, QWEN3) == 7


def test_a_trial_goes_over_everything_and_ends() -> None:
    before = configuration("screen", "cpu", QWEN3, 1)
    with trial({"screen": {"warps": 77}}):
        assert configuration("screen", "cpu", QWEN3, 1) == {**before, "warps": 77}
        assert configuration("rotate", "cpu", QWEN3, 1) == known_tuning().default["rotate"]
    assert configuration("screen", "cpu", QWEN3, 1) == before


def test_the_caller_may_change_what_it_gets() -> None:
    configuration("screen", "cpu", QWEN3, 1)["warps"] = 99
    assert configuration("screen", "cpu", QWEN3, 1)["warps"] != 99


def test_the_shipped_file_holds_together() -> None:
    shipped = known_tuning()
    assert {"rotate", "screen", "select", "exact", "finish"} <= set(shipped.default)
    assert shipped.sparse_up_to >= 1
    for kernel, default in shipped.default.items():
        tried = shipped.candidates[kernel]
        assert all(value in tried[name] for name, value in default.items()), "the default is among what is tried"
    for entry in shipped.measured:
        for kernels in entry.batches.values():
            for kernel, parameters in kernels.items():
                tried = shipped.candidates[kernel]
                assert all(value in tried[name] for name, value in parameters.items()), f"{entry.shape}, {kernel}"


@pytest.mark.parametrize(
    "text", ["measured = [", "[[measured]]\ndevice = 'x'\n", "measured = 3", "[[measured]]\nshape = 1"]
)
def test_a_damaged_file_is_named_with_a_remedy(text: str) -> None:
    user_file().parent.mkdir(parents=True)
    user_file().write_text(text)
    with pytest.raises(UsageError, match=r"tuning\.toml is no tuning file.*remove it"):
        configuration("screen", H200, QWEN3, 1)


SHAPE = "shape = { experts = 4, routed = 2, hidden = 64, channels = 8 }"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (SHAPE.replace("64", "0"), "hidden = 0"),
        (SHAPE.replace("= 4,", "= 'a',"), "experts = 'a'"),
        (SHAPE + "\nsparse_up_to = 'a'", "sparse_up_to = 'a'"),
        (SHAPE + "\n[measured.batch.0]\nexact = { steps = 1 }", "batch = 0"),
        (SHAPE + "\n[measured.batch.1]\nexact = { channels = 0 }", "exact channels = 0"),
        (SHAPE + "\n[measured.batch.1]\nexact = { ahead = -1 }", "exact ahead = -1"),
        (SHAPE + "\n[measured.batch.1]\nexact = { ahead = true }", "exact ahead = True"),
        (SHAPE + "\n[measured.batch.1]\nscreen = { ahead = 0.9 }", "screen ahead = 0.9"),
    ],
)
def test_numbers_that_are_none_are_named_with_their_file(text: str, what: str) -> None:
    user_file().parent.mkdir(parents=True)
    user_file().write_text(f"[[measured]]\ndevice = 'x'\n{text}\n")
    with pytest.raises(UsageError, match=rf"tuning\.toml is no tuning file: {what} \(remove it"):
        configuration("screen", H200, QWEN3, 1)


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ("screen = { parts = 3 }", "screen parts = 3 (choose 1, 2, 4 or 8"),
        ("exact = { warps = 3 }", "exact warps = 3 (choose a power of 2 up to 32"),
        ("finish = { columns = 24 }", "finish columns = 24 (choose a power of 2"),
        ("finish = { height = 2 }", "finish height, which this version does not know"),
    ],
)
def test_what_no_kernel_can_run_with_is_named_with_its_file(parameters: str, what: str) -> None:
    user_file().parent.mkdir(parents=True)
    user_file().write_text(f"[[measured]]\ndevice = 'cpu'\n{SHAPE}\n[measured.batch.1]\n{parameters}\n")
    with pytest.raises(UsageError, match=re.escape(f"{user_file()} has {what}")):
        tuned_blocks(torch.device("cpu"), LayerShape(4, 2, 64, 8), 1)


def test_the_kernels_run_with_all_that_is_shipped() -> None:
    shipped = known_tuning()
    everything = [shipped.default, *(kernels for entry in shipped.measured for kernels in entry.batches.values())]
    everything += [
        {kernel: {name: value}}
        for kernel, tried in shipped.candidates.items()
        for name, values in tried.items()
        for value in values
    ]
    for kernels in everything:
        with trial({kernel: found for kernel, found in kernels.items() if not kernel.startswith("dense")}):
            tuned_blocks(torch.device("cpu"), QWEN3, 1)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--out"):
        write_measured(tmp_path / "file" / "tuning.toml", ())


def test_without_a_gpu_the_device_is_the_cpu() -> None:
    assert device_name(torch.device("cpu")) == "cpu"
