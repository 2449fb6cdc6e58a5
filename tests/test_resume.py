"""A conversion that is stopped at any moment and run again ends as one that was never stopped, byte for byte."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killing
import pytest
from commands import contents, mreader
from sources import INDEX, copied, edit_tensor, make_source, read_json, shards

from mreader.convert import convert
from mreader.formats.augmented import WORK_FOLDER
from mreader.progress import Progress

SHARD = 200_000  # bytes: some twenty shards
FULL = ["--max-shard-size", str(SHARD), "--device", "cpu", "-q"]
RECORDS = [INDEX, "mreader_source.json", "config.json", "mreader_manifest.json"]  # in the order of their appearance


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "source", files=4)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a conversion that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert killing.run(killing.convert, source, out, SHARD) == 0
    assert len(shards(out)) > 10
    return out


@pytest.fixture(scope="module")
def recorded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The changes to the file system that it takes."""
    out = tmp_path_factory.mktemp("recorded") / "out"
    return killing.changes(out, killing.convert, source, out, SHARD)


@pytest.fixture(scope="module")
def steps(recorded: list[str]) -> int:
    return len(recorded)


@pytest.fixture(scope="module")
def half_done(source: Path, steps: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion that was killed in the middle. Tests copy it."""
    out = tmp_path_factory.mktemp("half") / "out"
    assert killing.run_and_kill_at(steps // 2, out, killing.convert, source, out, SHARD) < 0
    assert 2 < len(shards(out)) < 15
    return out


def check_half(out: Path) -> None:
    """What a killed conversion leaves never passes for a checkpoint, unless it is one."""
    if (out / "mreader_manifest.json").exists() and (out / "config.json").exists():
        assert mreader("verify", out).code == 0
    elif out.exists() and any(out.iterdir()):
        assert mreader("verify", out).code == 5


def resume(source: Path, out: Path, whole: Path) -> None:
    check_half(out)
    assert killing.run(killing.convert, source, out, SHARD) == 0
    assert contents(out) == contents(whole)


def check_killed_at(step: int, source: Path, whole: Path, out: Path) -> None:
    assert killing.run_and_kill_at(step, out, killing.convert, source, out, SHARD) == -9, step
    resume(source, out, whole)


def moments(steps: int, count: int) -> list[int]:
    return [i * (steps - 1) // (count - 1) for i in range(count)]


def test_two_runs_are_the_same(source: Path, whole: Path, tmp_path: Path) -> None:
    assert killing.run(killing.convert, source, tmp_path / "out", SHARD) == 0
    assert contents(tmp_path / "out") == contents(whole)


def test_killed_at_any_change_of_the_file_system(source: Path, whole: Path, steps: int, tmp_path: Path) -> None:
    for step in moments(steps, 6):
        check_killed_at(step, source, whole, tmp_path / str(step))


def test_killed_in_the_last_phase(source: Path, whole: Path, recorded: list[str], tmp_path: Path) -> None:
    """Before each of index, source record, config and manifest appears, and while the work folder is removed."""
    appear = [recorded.index(f"os.rename .mreader/json.part {name}") for name in RECORDS]
    for count, step in enumerate((*appear, appear[-1] + 1, len(recorded) - 1)):
        out = tmp_path / str(step)
        assert killing.run_and_kill_at(step, out, killing.convert, source, out, SHARD) == -9
        assert {path.name for path in out.iterdir()} & {*RECORDS} == {*RECORDS[:count]}
        resume(source, out, whole)


@pytest.mark.slow
def test_killed_at_every_change_of_the_file_system(source: Path, whole: Path, steps: int, tmp_path: Path) -> None:
    for step in range(steps):
        check_killed_at(step, source, whole, tmp_path / str(step))


def kill_again_and_again(source: Path, whole: Path, out: Path, times: int, seed: int) -> None:
    start = time.perf_counter()
    assert killing.run(killing.convert, source, out.with_name("timed"), SHARD) == 0
    seconds = time.perf_counter() - start
    draw, killed = random.Random(seed), 0
    while killed < times:
        # Never as long as a whole run takes, so that it is often killed before it has got anywhere.
        if killing.run_and_kill(draw.uniform(0.1, 0.7) * seconds, killing.convert, source, out, SHARD) == 0:
            assert contents(out) == contents(whole)
            out = out.with_name(f"{out.name}x")
            continue
        killed += 1
        check_half(out)
    resume(source, out, whole)


def test_killed_at_random_moments(source: Path, whole: Path, tmp_path: Path) -> None:
    kill_again_and_again(source, whole, tmp_path / "out", 5, seed=1)


@pytest.mark.slow
def test_killed_at_20_random_moments(source: Path, whole: Path, tmp_path: Path) -> None:
    kill_again_and_again(source, whole, tmp_path / "out", 20, seed=2)


def test_finished_shards_are_not_written_again(source: Path, half_done: Path, whole: Path, tmp_path: Path) -> None:
    out = copied(half_done, tmp_path / "out")
    lines = (out / ".mreader" / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    finished = [json.loads(line)["shard"] for line in lines if '"shard":' in line]
    before = {name: (out / name).stat() for name in finished}
    assert before
    resume(source, out, whole)
    for name, stat in before.items():
        after = (out / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_torn_journal(source: Path, half_done: Path, whole: Path, tmp_path: Path, cut: int) -> None:
    out = copied(half_done, tmp_path / "out")
    journal = out / ".mreader" / "journal.jsonl"
    os.truncate(journal, journal.stat().st_size - cut)
    resume(source, out, whole)


def test_journal_with_a_block_of_zeros(source: Path, half_done: Path, whole: Path, tmp_path: Path) -> None:
    """As a power failure may leave it."""
    out = copied(half_done, tmp_path / "out")
    journal = out / ".mreader" / "journal.jsonl"
    data = journal.read_bytes()
    journal.write_bytes(data[:-300] + bytes(299) + b"\n")
    resume(source, out, whole)


@pytest.mark.parametrize("request_", [{}, [], {"source": None}, {"source": {"files": [1]}, "shards": 2}])
def test_journal_of_another_kind(source: Path, whole: Path, request_: Any, tmp_path: Path) -> None:
    """As an older or newer release may have left it: the difference is said, and --overwrite starts again."""
    (tmp_path / "out" / ".mreader").mkdir(parents=True)
    (tmp_path / "out" / ".mreader" / "journal.jsonl").write_text(json.dumps({"request": request_}) + "\n")
    ran = mreader("convert", source, tmp_path / "out", *FULL)
    assert "holds a conversion with" in ran.cause
    assert ran.code == 2
    assert mreader("convert", source, tmp_path / "out", *FULL, "--overwrite").code == 0
    assert contents(tmp_path / "out") == contents(whole)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01"),
        lambda path: os.truncate(path, 100),
        lambda path: path.unlink(),
    ],
    ids=["flipped", "truncated", "removed"],
)
def test_damaged_finished_shard_is_written_again(
    source: Path, half_done: Path, whole: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    out = copied(half_done, tmp_path / "out")
    damage(shards(out)[1])
    resume(source, out, whole)


def test_leftover_of_a_shard_is_not_taken_for_one(source: Path, half_done: Path, whole: Path, tmp_path: Path) -> None:
    out = copied(half_done, tmp_path / "out")
    for path in shards(whole):
        (out / ".mreader" / f"{path.name}.part").write_bytes(b"half a shard")
    resume(source, out, whole)


def test_leftover_of_another_umask(source: Path, half_done: Path, whole: Path, tmp_path: Path) -> None:
    out = copied(half_done, tmp_path / "out")
    for path in [*shards(whole), Path("copy"), Path("json")]:
        part = out / ".mreader" / f"{path.name}.part"
        part.write_bytes(b"half a shard")
        part.chmod(0o600)
    resume(source, out, whole)


def test_changed_source_is_refused_by_name(source: Path, half_done: Path, tmp_path: Path) -> None:
    out, other = copied(half_done, tmp_path / "out"), copied(source, tmp_path / "source")
    recorded = [
        json.loads(line) for line in (out / ".mreader" / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    name = next(line["source"] for line in recorded if line.get("source", "").endswith(".safetensors"))
    path = other / name
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    before = contents(out)
    ran = mreader("convert", other, out, *FULL)
    assert name in ran.cause
    assert "changed" in ran.cause
    assert ran.code == 2
    assert contents(out) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX, "model-00002-of-00004.safetensors"])
def test_source_with_a_file_of_another_size_is_refused_by_name(
    source: Path, half_done: Path, tmp_path: Path, name: str
) -> None:
    out, other = copied(half_done, tmp_path / "out"), copied(source, tmp_path / "source")
    if name.endswith(".safetensors"):
        (other / name).unlink()
        weights = read_json(other / INDEX)["weight_map"]
        (other / "renamed.safetensors").write_bytes((source / name).read_bytes())
        moved = {k: "renamed.safetensors" if v == name else v for k, v in weights.items()}
        (other / INDEX).write_text(json.dumps({"weight_map": moved}), encoding="utf-8")
    else:
        (other / name).write_text((other / name).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    before = contents(out)
    ran = mreader("convert", other, out, *FULL)
    assert (INDEX if name.endswith(".safetensors") else name) in ran.cause
    assert ran.code == 2
    assert contents(out) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "16"], ["rank", "32", "16"]),
        (["--seed", "1"], ["seed", "0", "1"]),
        (["--codes", "quaternary"], ["codes", "ternary", "quaternary"]),
        (["--channels", "0.2"], ["channels", "0.122", "0.2"]),
        (["--max-shard-size", "300kb"], ["max_shard_bytes", "200000", "300000"]),
    ],
)
@pytest.mark.parametrize("state", ["half", "whole"])
def test_other_options_are_refused_with_the_difference(
    source: Path, half_done: Path, whole: Path, tmp_path: Path, options: list[str], words: list[str], state: str
) -> None:
    out = copied(half_done if state == "half" else whole, tmp_path / "out")
    before = contents(out)
    ran = mreader("convert", source, out, *FULL, *options)
    assert [word for word in words if word not in ran.cause] == [], ran.err
    assert "--overwrite" in ran.err
    assert ran.code == 2
    assert contents(out) == before


@pytest.mark.parametrize("state", ["half", "whole"])
def test_overwrite_starts_again_and_leaves_nothing_stale(
    source: Path, half_done: Path, whole: Path, tmp_path: Path, state: str
) -> None:
    """And nothing that is not ours is lost."""
    out = copied(half_done if state == "half" else whole, tmp_path / "out")
    (out / "my notes.txt").write_text("mine")
    (out / "nested").mkdir(exist_ok=True)
    (out / "nested" / "mine.txt").write_text("mine too")
    other = copied(source, tmp_path / "source")
    (other / "tokenizer.json").unlink()
    ran = mreader("convert", other, out, "--device", "cpu", "-q", "--overwrite")
    assert (ran.code, ran.err) == (0, "")
    assert (out / "my notes.txt").read_text() == "mine"
    assert (out / "nested" / "mine.txt").read_text() == "mine too"
    assert [path.name for path in shards(out)] == ["model.safetensors"]
    assert not (out / INDEX).exists()
    assert not (out / "tokenizer.json").exists()
    assert not (out / ".mreader").exists()
    assert mreader("verify", out, "--source", other).code == 0


@pytest.mark.parametrize("state", ["half", "whole"])
def test_overwrite_killed_at_any_change(source: Path, half_done: Path, whole: Path, tmp_path: Path, state: str) -> None:
    """It can be run again, with or without the option."""
    start = half_done if state == "half" else whole
    for i, step in enumerate((3, 11, 23, 41)):
        out = copied(start, tmp_path / str(step))
        killed = killing.run_and_kill_at(step, out, killing.convert, source, out, SHARD, True)
        assert killed == -9
        check_half(out)
        assert killing.run(killing.convert, source, out, SHARD, i % 2 == 0) == 0
        assert contents(out) == contents(whole)


@pytest.mark.parametrize("before", ["whole", pytest.param("half", marks=pytest.mark.slow)])
def test_overwrite_killed_at_any_change_before_its_shards(source: Path, tmp_path: Path, before: str) -> None:
    """OUT stays ours although it also holds a file of the user's, and the rest of the work can be done either way."""
    one_shard, out = 10**9, tmp_path / "out"
    killing.run(killing.convert, source, tmp_path / "whole", one_shard)
    old = tmp_path / "old"
    if before == "whole":
        assert killing.run(killing.convert, source, old, SHARD * 3) == 0
    else:
        steps = killing.count_changes(tmp_path / "x", killing.convert, source, tmp_path / "x", SHARD * 3)
        assert killing.run_and_kill_at(steps * 2 // 3, old, killing.convert, source, old, SHARD * 3) == -9
    (old / "notes.txt").write_text("mine")
    expected = {**contents(tmp_path / "whole"), "notes.txt": contents(old)["notes.txt"]}
    recorded = killing.changes(copied(old, out), killing.convert, source, out, one_shard, True)
    assert contents(out) == expected
    begun = recorded.index("os.rename .mreader/journal.jsonl.part .mreader/journal.jsonl")
    first_shard = recorded.index("open .mreader/model.safetensors.part")
    assert 0 < begun < first_shard
    for step in range(first_shard + 1):
        killed = tmp_path / str(step)
        assert (
            killing.run_and_kill_at(step, copied(old, killed), killing.convert, source, killed, one_shard, True) == -9
        )
        check_half(killed)
        again = copied(killed, tmp_path / f"{step} again")
        assert killing.run(killing.convert, source, again, one_shard, True) == 0, recorded[step]
        assert contents(again) == expected
        if step > begun:  # before, the folder still holds the other conversion
            assert killing.run(killing.convert, source, killed, one_shard) == 0, recorded[step]
            assert contents(killed) == expected
        else:
            ran = mreader("convert", source, killed, "--device", "cpu", "-q")
            assert "max_shard_bytes = 600000" in ran.cause, recorded[step]
            assert "--overwrite" in ran.err


def test_refused_overwrite_removes_nothing(source: Path, whole: Path, tmp_path: Path) -> None:
    out, bad = copied(whole, tmp_path / "out"), copied(source, tmp_path / "source")
    shards(bad)[0].unlink()
    before = contents(out)
    assert mreader("convert", bad, out, "--overwrite").code == 3
    assert mreader("convert", source, out, "--overwrite", "--rank", "1000").code == 2
    assert mreader("convert", source, out, "--overwrite", "--device", "cuda:99").code == 2
    assert contents(out) == before


def test_shards_that_were_begun_before_there_was_a_journal_are_removed(source: Path, tmp_path: Path) -> None:
    """A run that was killed then may have had others in mind: they would take room that is counted as free."""
    out = tmp_path / "out"
    stale = out / WORK_FOLDER / "model-00001-of-00009.safetensors.part"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(bytes(1000))
    seen = []

    class Watching(Progress):
        def layer(self, number: int, layers: int) -> None:
            seen.append(stale.exists())

    convert(source, out, device="cpu", progress=Watching())
    assert seen
    assert not any(seen)


def test_overwrite_counts_the_room_that_it_makes(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copied(whole, tmp_path / "out")
    monkeypatch.setattr("mreader.output.free_bytes", lambda _: 1_000_000)
    assert mreader("convert", source, tmp_path / "new", "-q").code == 4
    assert mreader("convert", source, out, "-q", "--overwrite", "--device", "cpu").code == 0


def test_complete_conversion_is_left_alone(source: Path, whole: Path, tmp_path: Path) -> None:
    out = copied(whole, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    ran = mreader("convert", source, out, *FULL[:-1])
    assert "is complete already" in ran.err
    assert ran.code == 0
    assert contents(out) == contents(whole)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_complete_conversion_on_a_read_only_disk(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written, not even a lock."""
    out = copied(whole, tmp_path / "out")
    before = out.stat().st_mtime_ns
    monkeypatch.setattr(os, "access", lambda *_: False)
    ran = mreader("convert", source, out, *FULL[:-1])
    assert "is complete already" in ran.err
    assert ran.code == 0
    assert out.stat().st_mtime_ns == before
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("name", ["model-00003", "config.json", "tokenizer.json", "mreader_source.json"])
def test_complete_conversion_that_was_damaged_is_mended(source: Path, whole: Path, tmp_path: Path, name: str) -> None:
    out = copied(whole, tmp_path / "out")
    path = next(out.glob(f"{name}*"))
    path.write_bytes(path.read_bytes()[:-2])
    ran = mreader("convert", source, out, *FULL[:-1])
    assert path.name in ran.err
    assert ran.code == 0
    assert contents(out) == contents(whole)


def test_mending_copies_only_what_is_damaged(source: Path, whole: Path, steps: int, tmp_path: Path) -> None:
    """The user's own card stays, also where mending was cut short."""
    out = copied(whole, tmp_path / "out")
    (out / "README.md").write_text("my own card")
    (out / "tokenizer.json").unlink()
    kept = (out / "nested" / "deeper" / "vocabulary.txt").stat()
    expected = {**contents(whole), "README.md": contents(out)["README.md"]}
    recorded = killing.changes(copied(out, tmp_path / "x"), killing.convert, source, tmp_path / "x", SHARD)
    assert contents(tmp_path / "x") == expected
    killed = copied(out, tmp_path / "killed")
    step = recorded.index("os.rename .mreader/json.part config.json")
    assert killing.run_and_kill_at(step, killed, killing.convert, source, killed, SHARD) == -9
    for folder in (out, killed):
        assert mreader("convert", source, folder, *FULL).code == 0
        assert contents(folder) == expected
        assert mreader("verify", folder).code == 0
    assert (out / "nested" / "deeper" / "vocabulary.txt").stat().st_mtime_ns == kept.st_mtime_ns


def test_complete_conversion_of_another_source_is_refused(source: Path, whole: Path, tmp_path: Path) -> None:
    out, other = copied(whole, tmp_path / "out"), copied(source, tmp_path / "source")
    edit_tensor(other, "model.norm.weight", lambda t: t.add_(1))
    (other / "more.txt").write_text("x")
    before = contents(out)
    ran = mreader("convert", other, out, *FULL)
    assert ".safetensors of the source has changed" in ran.cause
    assert ran.code == 2
    assert contents(out) == before


def test_two_conversions_into_one_folder(source: Path, whole: Path, tmp_path: Path) -> None:
    """The second is refused, whatever it wants, and the first goes on."""
    out = tmp_path / "out"
    first = killing.start(killing.convert_slowly, source, out, SHARD)
    try:
        while not list(out.glob("*.safetensors")):
            time.sleep(0.01)
            assert first.is_alive()
        for options in ([], ["--overwrite"]):
            ran = mreader("convert", source, out, *FULL, *options)
            assert "another conversion" in ran.cause
            assert ran.code == 2
    finally:
        first.join()
    assert first.exitcode == 0
    assert contents(out) == contents(whole)
