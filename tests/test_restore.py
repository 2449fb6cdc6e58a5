"""The source back from its augmented checkpoint, byte for byte. (Every architecture: test_architectures.py.)"""

from __future__ import annotations

import errno
import hashlib
import importlib
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
from sources import copied, edit_json, edit_tensor, make_source, shards

from mreader import FormatOptions
from mreader.convert import convert
from mreader.output import locked

USAGE, SOURCE, SPACE, VERIFY = 2, 3, 4, 5
WORK_FOLDER = ".mreader-restore"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "source")


@pytest.fixture(scope="module")
def augmented(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: tests that change it copy it first."""
    out = tmp_path_factory.mktemp("augmented") / "out"
    convert(source, out, device="cpu", max_shard_bytes=700_000)
    return out


def check_restored(folder: Path, source: Path, but: tuple[str, ...] = ()) -> None:
    here, there = contents(folder), contents(source)
    assert {name: data for name, (_, data) in here.items()} == {
        name: data for name, (_, data) in there.items() if name not in but
    }


@pytest.mark.parametrize("state", ["new", "empty", "below what is not there"])
def test_restored(source: Path, augmented: Path, tmp_path: Path, state: str) -> None:
    back = tmp_path / "back" / "again" if state.startswith("below") else tmp_path / "back"
    if state == "empty":
        back.mkdir()
    before = contents(augmented)
    ran = mreader("restore", augmented, back)
    assert (ran.code, ran.out) == (0, "")
    check_restored(back, source)
    assert contents(augmented) == before


def test_json(augmented: Path, tmp_path: Path) -> None:
    ran = mreader("restore", augmented, tmp_path / "back", "--json")
    assert json.loads(ran.out) == {"destination": str(tmp_path / "back"), "left_out": [], "dequantized_from": None}


def test_what_was_restored_can_be_converted_again(augmented: Path, tmp_path: Path) -> None:
    assert mreader("restore", augmented, tmp_path / "back").code == 0
    assert (
        mreader("convert", tmp_path / "back", tmp_path / "out", "--max-shard-size", "700KB", "--device", "cpu").code
        == 0
    )
    assert contents(tmp_path / "out") == contents(augmented)


def names_of_whole_files(back: Path, source: Path) -> set[str]:
    """What a stopped restore leaves under the names of the source, all of it whole."""
    here, there = contents(back) if back.exists() else {}, contents(source)
    whole = {name for name in here if name.split("/")[0] != WORK_FOLDER and (back / name).is_file()}
    assert {name: here[name][1] for name in whole} == {name: there[name][1] for name in whole}
    return whole


def test_killed_and_run_again(source: Path, augmented: Path, tmp_path: Path) -> None:
    steps = killing.count_changes(tmp_path / "x", killing.restore, augmented, tmp_path / "x")
    assert steps > 20
    for step in range(1, steps, steps // 5):
        back = tmp_path / str(step)
        assert killing.run_and_kill_at(step, back, killing.restore, augmented, back) == -9
        names_of_whole_files(back, source)
        assert not (back / "config.json").exists() or step > steps - 5
        assert mreader("restore", augmented, back).code == 0
        check_restored(back, source)


def test_killed_at_random_moments(source: Path, augmented: Path, tmp_path: Path) -> None:
    start = time.perf_counter()
    assert killing.run(killing.restore_slowly, augmented, tmp_path / "timed") == 0
    seconds, back = time.perf_counter() - start, tmp_path / "back"
    draw, killed = random.Random(4), 0
    while killed < 6:
        if killing.run_and_kill(draw.uniform(0.1, 0.9) * seconds, killing.restore_slowly, augmented, back) == 0:
            check_restored(back, source)
            back = back.with_name(f"{back.name}x")
            continue
        killed += 1
        names_of_whole_files(back, source)
    assert mreader("restore", augmented, back).code == 0
    check_restored(back, source)


@pytest.fixture(scope="module")
def half_done(augmented: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A restore that was killed as it put its fourth shard in place. Tests copy it."""
    folder = tmp_path_factory.mktemp("half")
    recorded = killing.changes(folder / "x", killing.restore, augmented, folder / "x")
    step = recorded.index(f"os.rename {WORK_FOLDER}/part model-00004-of-00006.safetensors")
    assert killing.run_and_kill_at(step, folder / "back", killing.restore, augmented, folder / "back") == -9
    assert [path.name[6:11] for path in shards(folder / "back")] == ["00001", "00002", "00003"]
    return folder / "back"


def test_finished_files_are_kept(source: Path, augmented: Path, half_done: Path, tmp_path: Path) -> None:
    back = copied(half_done, tmp_path / "back")
    before = {name: (back / name).stat() for name in names_of_whole_files(back, source)}
    assert len(before) == 10
    assert mreader("restore", augmented, back).code == 0
    check_restored(back, source)
    for name, stat in before.items():
        after = (back / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns), name


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model-00002-of-00006.safetensors", lambda path: flip(path)),
        ("model-00002-of-00006.safetensors", lambda path: os.truncate(path, 100)),
        ("nested/deeper/vocabulary.txt", lambda path: path.unlink()),
    ],
    ids=["flipped", "truncated", "removed"],
)
def test_a_finished_file_that_was_damaged_is_written_again(
    source: Path, augmented: Path, half_done: Path, tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    back = copied(half_done, tmp_path / "back")
    damage(back / name)
    ran = mreader("restore", augmented, back)
    assert ran.code == 0
    assert f"{back / name}" in ran.err
    assert "writing it again" in ran.err
    check_restored(back, source)


def test_config_does_not_stand_beside_a_shard_that_is_missing(source: Path, augmented: Path, tmp_path: Path) -> None:
    """Killed once all was finished, then a shard is lost: while that is written, nothing passes for whole."""
    recorded = killing.changes(tmp_path / "x", killing.restore, augmented, tmp_path / "x")
    back, step = tmp_path / "back", recorded.index(f"os.rename {WORK_FOLDER}/part config.json") + 2
    assert recorded[step - 1] == f"open {WORK_FOLDER}/journal.jsonl"
    assert killing.run_and_kill_at(step, back, killing.restore, augmented, back) == -9
    assert (back / "config.json").exists()
    shards(back)[0].unlink()
    again = killing.changes(copied(back, tmp_path / "y"), killing.restore, augmented, tmp_path / "y")
    assert again.index("os.remove config.json") < again.index(f"open {WORK_FOLDER}/part")
    check_restored(tmp_path / "y", source)


def test_files_of_the_user_beside_an_interrupted_restore_stay(
    source: Path, augmented: Path, half_done: Path, tmp_path: Path
) -> None:
    back = copied(half_done, tmp_path / "back")
    (back / "notes.txt").write_text("mine")
    assert mreader("restore", augmented, back).code == 0
    assert (back / "notes.txt").read_text() == "mine"
    (back / "notes.txt").unlink()
    check_restored(back, source)


def test_an_unfinished_restore_of_another_checkpoint_is_left_alone(
    source: Path, half_done: Path, tmp_path: Path
) -> None:
    other = copied(source, tmp_path / "source")
    edit_tensor(other, "model.norm.weight", lambda t: t.add_(1))
    convert(other, tmp_path / "out", device="cpu")
    back = copied(half_done, tmp_path / "back")
    before = contents(back)
    ran = mreader("restore", tmp_path / "out", back)
    assert f"{back} holds an unfinished restore of another checkpoint" in ran.cause
    assert ran.code == USAGE
    assert contents(back) == before


def test_another_conversion_of_the_same_source_resumes_it(source: Path, half_done: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", FormatOptions(rank=8), device="cpu")
    back = copied(half_done, tmp_path / "back")
    kept = shards(back)[0].stat().st_ino
    assert mreader("restore", tmp_path / "out", back).code == 0
    check_restored(back, source)
    assert shards(back)[0].stat().st_ino == kept


def test_file_that_may_not_grow_leaves_what_can_be_resumed(source: Path, augmented: Path, tmp_path: Path) -> None:
    """As on a disk that fills up."""
    back = tmp_path / "back"
    sizes = {path.name: path.stat().st_size for path in shards(source)}
    largest = max(sizes.values())
    assert killing.run(killing.restore_with_limit, augmented, back, largest - 1) == SPACE
    whole = names_of_whole_files(back, source)
    assert whole
    assert not whole & {"config.json", max(sizes, key=sizes.__getitem__)}
    assert not (back / WORK_FOLDER / "part").exists()
    kept = (back / min(whole)).stat().st_ino
    assert mreader("restore", augmented, back).code == 0
    check_restored(back, source)
    assert (back / min(whole)).stat().st_ino == kept


def test_disk_that_is_full_at_once_leaves_nothing(
    augmented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mreader.formats.safetensors_file.HashingFile.commit", full)
    ran = mreader("restore", augmented, tmp_path / "new" / "back")
    assert "is full" in ran.cause
    assert "the same command to resume" in ran.err
    assert ran.code == SPACE
    assert list(tmp_path.iterdir()) == []


def test_the_card_of_the_source_may_have_been_replaced(source: Path, augmented: Path, tmp_path: Path) -> None:
    """push-to-hub publishes a model card of its own: what is not there is left out, and said."""
    for name, change in (
        ("changed", lambda path: path.write_text("# The model card of the augmented checkpoint")),
        ("removed", lambda path: path.unlink()),
    ):
        out = copied(augmented, tmp_path / name)
        change(out / "README.md")
        ran = mreader("restore", out, tmp_path / f"{name} back")
        assert ran.code == 0
        assert "README.md is left out" in ran.err
        check_restored(tmp_path / f"{name} back", source, but=("README.md",))


@pytest.mark.parametrize("destination", ["used", "file", "out", "out/inside"])
def test_destination_in_use(augmented: Path, tmp_path: Path, destination: str) -> None:
    copied(augmented, tmp_path / "out")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    ran = mreader("restore", tmp_path / "out", tmp_path / destination)
    assert str(tmp_path / destination) in ran.cause
    assert ran.code == USAGE
    assert contents(tmp_path) == before


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def flip_native(folder: Path) -> None:
    """One bit of the first expert weight of the first shard that has one."""
    for path in shards(folder):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name.endswith("experts.down_proj"):
                flip(path, 8 + length + entry["data_offsets"][0])
                return


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped weight": (flip_native, ".safetensors"),
    "truncated shard": (lambda f: os.truncate(shards(f)[1], 5000), "00002-of"),
    "missing shard": (lambda f: shards(f)[1].unlink(), "00002-of"),
    "changed tokenizer": (lambda f: flip(f / "tokenizer.json"), "tokenizer.json"),
    "missing tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "changed record": (
        lambda f: edit_json(f / "mreader_source.json", lambda r: r["texts"].update({"config.json": '{"a": 1}'})),
        "config.json has no model_type",
    ),
    "changed header": (
        lambda f: edit_json(f / "mreader_source.json", lambda r: r["headers"].update({min(r["headers"]): "{}"})),
        "00001-of-00006",
    ),
    "missing record": (lambda f: (f / "mreader_source.json").unlink(), "mreader_source.json"),
    "missing manifest": (lambda f: (f / "mreader_manifest.json").unlink(), "mreader_manifest.json"),
    "manifest without files": (
        lambda f: edit_json(f / "mreader_manifest.json", lambda m: m.pop("files")),
        "files",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint(source: Path, augmented: Path, tmp_path: Path, kind: str) -> None:
    """Of its restore only whole files are left, if any, and it ends once the checkpoint is mended."""
    damage, word = DAMAGE[kind]
    out, back = copied(augmented, tmp_path / "out"), tmp_path / "back"
    damage(out)
    before = contents(out)
    ran = mreader("restore", out, back)
    assert word in ran.cause
    assert ran.code == VERIFY
    assert contents(out) == before
    assert "config.json" not in (whole := names_of_whole_files(back, source))
    assert back.exists() == bool(whole)
    assert mreader("restore", augmented, back).code == 0
    check_restored(back, source)


@pytest.mark.parametrize("name", ["../outside.txt", "/tmp/outside.txt", "a/../../outside.txt"])
def test_a_checkpoint_cannot_write_outside_the_destination(augmented: Path, tmp_path: Path, name: str) -> None:
    out = copied(augmented, tmp_path / "out")
    evil = b"evil"
    entry = {"sha256": hashlib.sha256(evil).hexdigest(), "bytes": len(evil)}
    (tmp_path / "outside.txt").write_bytes(evil)
    edit_json(out / "mreader_manifest.json", lambda manifest: manifest["source"]["files"].update({name: entry}))
    before = contents(tmp_path)
    ran = mreader("restore", out, tmp_path / "back" / "deep")
    assert name in ran.cause
    assert ran.code == VERIFY
    assert contents(tmp_path) == before


def test_destination_on_a_small_disk(augmented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mreader.output.free_bytes", lambda _: 1_000_000)
    ran = mreader("restore", augmented, tmp_path / "back")
    assert ran.code == SPACE
    assert str(tmp_path / "back") in ran.cause
    assert not (tmp_path / "back").exists()


def test_two_restores_into_one_folder(augmented: Path, tmp_path: Path) -> None:
    """The second is refused, and touches nothing that the first has written."""
    back = tmp_path / "back"
    with locked(back / WORK_FOLDER, "restore"):
        (back / "config.json").write_text("of the first")
        before = contents(back)
        ran = mreader("restore", augmented, back)
        assert "another restore" in ran.cause
        assert ran.code == USAGE
        assert contents(back) == before


def test_a_restore_that_begins_as_another_ends(
    augmented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found the folder empty, and finds it full when it has the lock."""
    back = tmp_path / "back"
    assert mreader("restore", augmented, back).code == 0
    before = contents(back)
    monkeypatch.setattr(importlib.import_module("mreader.restore")._Restore, "_refuse_used", lambda _: None)
    ran = mreader("restore", augmented, back)
    assert "is not empty" in ran.cause
    assert ran.code == USAGE
    assert contents(back) == before


def test_what_an_interrupted_restore_left_counts_as_room(
    source: Path, augmented: Path, half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the half of a file, which is removed first."""
    back = copied(half_done, tmp_path / "back")
    assert (back / WORK_FOLDER / "part").stat().st_size == shards(source)[3].stat().st_size
    missing = [path for path in source.rglob("*") if path.is_file() and not (back / path.relative_to(source)).exists()]
    needed = sum(path.stat().st_size for path in missing)
    monkeypatch.setattr("mreader.output.free_bytes", lambda _: needed - 1)
    kept = names_of_whole_files(back, source)
    assert mreader("restore", augmented, back).code == SPACE
    assert names_of_whole_files(back, source) == kept
    assert not (back / WORK_FOLDER / "part").exists()
    monkeypatch.setattr("mreader.output.free_bytes", lambda _: needed)
    assert mreader("restore", augmented, tmp_path / "new").code == SPACE
    assert mreader("restore", augmented, back).code == 0
    check_restored(back, source)


def test_empty_names(augmented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an unset shell variable. They do not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    for arguments in ([augmented, ""], ["", tmp_path / "back"]):
        ran = mreader("restore", *arguments)
        assert "empty name" in ran.cause
        assert ran.code == USAGE
    assert list(tmp_path.iterdir()) == []


def test_not_an_augmented_checkpoint(source: Path, tmp_path: Path) -> None:
    ran = mreader("restore", source, tmp_path / "back")
    assert "not an augmented checkpoint" in ran.cause
    assert ran.code == USAGE
    assert mreader("restore", tmp_path / "none", tmp_path / "back").code == SOURCE
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_restore_killed_at_every_change(source: Path, augmented: Path, tmp_path: Path) -> None:
    steps = killing.count_changes(tmp_path / "x", killing.restore, augmented, tmp_path / "x")
    for step in range(steps):
        back = tmp_path / str(step)
        assert killing.run_and_kill_at(step, back, killing.restore, augmented, back) == -9
        assert mreader("restore", augmented, back).code == 0 or not (back / ".mreader-restore").exists()
        check_restored(back, source)


def test_a_trained_model(olmoe_tiny: Path, olmoe_augmented: Path, tmp_path: Path) -> None:
    """Weights with main directions and outliers, in one shard."""
    assert mreader("verify", olmoe_augmented, "--source", olmoe_tiny).code == 0
    assert mreader("restore", olmoe_augmented, tmp_path / "back").code == 0
    check_restored(tmp_path / "back", olmoe_tiny)
