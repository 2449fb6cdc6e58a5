"""mreader compare --rows: what is done is not done again, and nothing else is taken for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Ran, mreader

from mreader.selectors.harness import Harness
from mreader.selectors.jobs import Job, Reader
from mreader.selectors.ledger import FileLedger, open_ledger
from mreader.selectors.runs import Run, matched

TOKENS = Path(__file__).parent / "data" / "python-tokens.npy"
JOBS = 6  # two selectors with top-k, a threshold and the run that matches it


def compare(model: Path, rows: Path, *options: object, tokens: Path = TOKENS) -> Ran:
    grid = ("--selectors", "reader,oracle", "--recovery", "none", "--reads", 0.4)
    shape = ("--windows", 2, "--length", 32, "--calibration-windows", 2)
    return mreader("compare", model, "--tokens", tokens, *shape, *grid, "--rows", rows, "--json", "-q", *options)


def printed(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    found: list[dict[str, Any]] = json.loads(ran.out)
    return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that are really run."""
    jobs: list[Job] = []
    run = Harness.run

    def noted(self: Harness, job: Job) -> Run:
        jobs.append(job)
        return run(self, job)

    monkeypatch.setattr(Harness, "run", noted)
    return jobs


def test_rows_that_are_there_are_not_run_again(
    olmoe_tiny: Path, tmp_path: Path, counted: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = printed(compare(olmoe_tiny, tmp_path / "rows"))
    assert len(counted) == JOBS
    counted.clear()
    monkeypatch.setattr("mreader.selectors.grid.open_subject", lambda *_: pytest.fail("the model was opened"))
    assert printed(compare(olmoe_tiny, tmp_path / "rows")) == first
    assert not counted


def test_a_kill_costs_the_row_that_was_under_way(olmoe_tiny: Path, tmp_path: Path, counted: list[Job]) -> None:
    """Wherever the file was cut, it ends as one that nobody touched."""
    rows = tmp_path / "rows"
    first = printed(compare(olmoe_tiny, rows))
    lines = rows.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + JOBS
    for left, cut in ((3, 0), (3, 1), (5, 200), (1, 0)):
        rows.write_bytes(b"".join(lines[:left]) + (lines[left][:cut]))
        counted.clear()
        assert printed(compare(olmoe_tiny, rows)) == first
        assert len(counted) == JOBS - (left - 1)
        assert rows.read_bytes() == b"".join(lines)


def test_a_whole_line_that_holds_no_row_is_never_cut_away(olmoe_tiny: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    printed(compare(olmoe_tiny, rows))
    lines = rows.read_bytes().splitlines(keepends=True)
    for number, line in (
        (3, lines[2].replace(b'"note"', b'"remark"')),
        (2, lines[1].replace(b'"reader"', b'"raeder"', 1)),
        (7, b"[]\n"),
        (7, lines[6][:200] + b"\n"),
    ):
        edited = b"".join([*lines[: number - 1], line, *lines[number:]])
        rows.write_bytes(edited)
        ran = compare(olmoe_tiny, rows)
        assert ran.code == 2
        assert f"line {number} of {rows}" in ran.cause
        assert rows.read_bytes() == edited


def test_one_comparison_at_a_time_has_the_file(olmoe_tiny: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    printed(compare(olmoe_tiny, rows))
    before = rows.read_bytes()
    with open_ledger(rows, json.loads(before.partition(b"\n")[0])):
        ran = compare(olmoe_tiny, rows)
        assert ran.code == 2
        assert ran.cause == f"error: another comparison with --rows {rows} is running"
        assert "another file" in ran.err
        printed(compare(olmoe_tiny, tmp_path / "others"))
    assert printed(compare(olmoe_tiny, rows))
    assert rows.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["others", "rows"]


def test_the_folder_of_the_file_need_not_be_writable(olmoe_tiny: Path, tmp_path: Path) -> None:
    """Nothing is put beside it, so that a kill leaves nothing there either."""
    rows = tmp_path / "folder" / "rows"
    rows.parent.mkdir()
    rows.touch()
    rows.parent.chmod(0o555)
    try:
        before = rows.parent.stat().st_mtime_ns
        assert printed(compare(olmoe_tiny, rows)) == printed(compare(olmoe_tiny, rows))
        assert rows.parent.stat().st_mtime_ns == before
    finally:
        rows.parent.chmod(0o755)


@pytest.mark.parametrize("size", [0, 1, 40, -1])
def test_a_file_that_was_cut_short_before_its_first_run(size: int, olmoe_tiny: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    first = printed(compare(olmoe_tiny, rows))
    whole = rows.read_bytes()
    rows.write_bytes(whole[: len(whole.splitlines(keepends=True)[0])][:size])
    assert printed(compare(olmoe_tiny, rows)) == first
    assert rows.read_bytes() == whole


def test_a_grid_may_grow(olmoe_tiny: Path, tmp_path: Path, counted: list[Job]) -> None:
    printed(compare(olmoe_tiny, tmp_path / "rows"))
    counted.clear()
    printed(compare(olmoe_tiny, tmp_path / "rows", "--reads", "0.4,0.5"))
    assert {job.reads for job in counted if job.budget is None} == {0.5}


def test_another_way_of_reading_is_another_row(olmoe_tiny: Path, tmp_path: Path, counted: list[Job]) -> None:
    (before, *_) = printed(compare(olmoe_tiny, tmp_path / "rows"))
    counted.clear()
    (after, *_) = printed(compare(olmoe_tiny, tmp_path / "rows", "--coordinates", 48))
    assert len(counted) == JOBS
    assert after["kl"] != before["kl"]


class TestWhatMayNotMix:
    @pytest.fixture
    def rows(self, olmoe_tiny: Path, tmp_path: Path) -> Path:
        rows = tmp_path / "rows"
        printed(compare(olmoe_tiny, rows))
        return rows

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--length", 48), "text.length = 32"),
            (("--windows", 3), "text.windows = 2"),
            (("--calibration-windows", 3), "calibration.windows = 2"),
            (("--dtype", "bfloat16"), "dtype = float32"),
        ],
    )
    def test_other_options(self, options: tuple[object, ...], message: str, olmoe_tiny: Path, rows: Path) -> None:
        before = rows.read_bytes()
        ran = compare(olmoe_tiny, rows, *options)
        assert ran.code == 2
        assert message in ran.cause
        assert rows.read_bytes() == before

    def test_another_text(self, olmoe_tiny: Path, rows: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "other.npy", np.load(TOKENS)[::-1])
        ran = compare(olmoe_tiny, rows, tokens=tmp_path / "other.npy")
        assert ran.code == 2
        assert "text.sha256" in ran.cause

    def test_another_model(self, olmoe_tiny: Path, rows: Path, tmp_path: Path) -> None:
        """One bit of one weight."""
        other = tmp_path / "model"
        shutil.copytree(olmoe_tiny, other)
        weights = other / "model.safetensors"
        weights.chmod(0o644)
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        ran = compare(other, rows)
        assert ran.code == 2
        assert "model.model.safetensors" in ran.cause

    @pytest.mark.parametrize("content", [b"notes", b"notes\n", b'{"a": 1}\n', b"[]\n"])
    def test_a_file_of_something_else_stays_as_it_is(self, content: bytes, olmoe_tiny: Path, tmp_path: Path) -> None:
        (tmp_path / "notes").write_bytes(content)
        ran = compare(olmoe_tiny, tmp_path / "notes")
        assert ran.code == 2
        assert "no rows of a comparison" in ran.cause
        assert (tmp_path / "notes").read_bytes() == content

    @pytest.mark.parametrize(("name", "words"), [("no/rows", "No such file or directory"), ("", "Is a directory")])
    def test_a_file_that_cannot_be_written(self, name: str, words: str, olmoe_tiny: Path, tmp_path: Path) -> None:
        ran = compare(olmoe_tiny, tmp_path / name)
        assert ran.code == 2
        assert ran.cause == f"error: {tmp_path / name} cannot be written: {words}"


def test_a_run_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    job = Job("prox", "threshold", "none", 0.1 + 0.2, reader=Reader(coordinates=64, stored=16, rotated=False))
    run = Run(job, 1 / 3, 0.5, 1e-300, 2.0, 0.123456789012345678, 7, "", (0.1, 0.2), (1 / 7,), (0.3,), (4.5,), (0.1,))
    common = {"text": 1}
    FileLedger(tmp_path / "rows", common).add(run)
    again = FileLedger(tmp_path / "rows", common).find(job)
    assert again == run
    assert matched(run) == matched(again)
