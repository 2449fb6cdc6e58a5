"""The source back from its augmented checkpoint, byte for byte. (Every architecture: test_architectures.py.)"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killing
import pytest
from commands import contents, mreader
from sources import copied, edit_json, make_source, shards

from mreader.convert import convert
from mreader.output import locked

USAGE, SOURCE, SPACE, VERIFY = 2, 3, 4, 5


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


def test_killed_and_run_again(source: Path, augmented: Path, tmp_path: Path) -> None:
    steps = killing.count_changes(tmp_path / "x", killing.restore, augmented, tmp_path / "x")
    assert steps > 20
    for step in range(1, steps, steps // 5):
        back = tmp_path / str(step)
        assert killing.run_and_kill_at(step, back, killing.restore, augmented, back) == -9
        assert not (back / "config.json").exists() or step > steps - 5
        assert mreader("restore", augmented, back).code == 0
        check_restored(back, source)


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
def test_damaged_checkpoint(augmented: Path, tmp_path: Path, kind: str) -> None:
    """Nothing is left of a restore that cannot end well."""
    damage, word = DAMAGE[kind]
    out = copied(augmented, tmp_path / "out")
    damage(out)
    before = contents(tmp_path)
    ran = mreader("restore", out, tmp_path / "back")
    assert word in ran.cause
    assert ran.code == VERIFY
    assert contents(tmp_path) == before


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
    with locked(back / ".mreader-restore", "restore") as new:
        assert new
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
    monkeypatch.setattr(importlib.import_module("mreader.restore"), "_refuse_used", lambda _: None)
    ran = mreader("restore", augmented, back)
    assert "is not empty" in ran.cause
    assert ran.code == USAGE
    assert contents(back) == before


def test_what_an_interrupted_restore_left_counts_as_room(
    source: Path, augmented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = copied(source, tmp_path / "back")
    (back / ".mreader-restore").mkdir()
    (back / ".mreader-restore" / "lock").touch()
    monkeypatch.setattr("mreader.output.free_bytes", lambda _: 0)
    assert mreader("restore", augmented, back).code == 0
    check_restored(back, source)
    assert mreader("restore", augmented, tmp_path / "new").code == SPACE


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
