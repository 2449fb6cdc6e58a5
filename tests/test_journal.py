"""The journal of a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest

from mreader.errors import UsageError
from mreader.formats.safetensors_file import FileRecord
from mreader.journal import JOURNAL, Journal, refuse_other_request

REQUEST = {"options": {"rank": 32, "score": "norm"}, "source": {"files": {"größe.txt": 7}}}
ONE, TWO = FileRecord("1" * 64, 1), FileRecord("2" * 64, 2)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal.create(tmp_path, REQUEST)
    made.finish_source("a.safetensors", ONE)
    made.finish_shard("model-1.safetensors", TWO)
    made.finish_source("größe.txt", TWO)
    return made


def loaded(folder: Path) -> Journal:
    journal = Journal.load(folder)
    assert journal is not None
    return journal


def test_what_was_written_is_read_back(journal: Journal, tmp_path: Path) -> None:
    again = loaded(tmp_path)
    assert again.request == REQUEST
    assert again.sources == journal.sources == {"a.safetensors": ONE, "größe.txt": TWO}
    assert again.shards == journal.shards == {"model-1.safetensors": TWO}


def test_a_journal_of_work_that_is_partly_done(tmp_path: Path) -> None:
    Journal.create(tmp_path, REQUEST, {"a": ONE}, {"b": TWO})
    again = loaded(tmp_path)
    assert (again.sources, again.shards) == ({"a": ONE}, {"b": TWO})
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


def test_no_journal(tmp_path: Path) -> None:
    assert Journal.load(tmp_path) is None
    assert Journal.load(tmp_path / "nothing") is None


@pytest.mark.parametrize("content", [b"", b"\n", b'{"request"', b"[]\n", b'{"request": 7}\n', b"\0\0\0\n"])
def test_a_journal_without_a_whole_request_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    assert Journal.load(tmp_path) is None


def test_cut_anywhere_it_holds_what_was_whole_before(journal: Journal, tmp_path: Path) -> None:
    data = (tmp_path / JOURNAL).read_bytes()
    lines = data.splitlines(keepends=True)
    for length in range(len(lines[0]), len(data)):
        (tmp_path / JOURNAL).write_bytes(data[:length])
        again = loaded(tmp_path)
        whole = data[:length].count(b"\n") - 1
        assert len(again.sources) + len(again.shards) == whole


@pytest.mark.parametrize("rest", [b'{"shard": "torn', b"\0" * 20 + b"\n", b'{"shard": "x"}\n', b"7\n"])
def test_what_a_crash_left_at_the_end_is_dropped_by_the_next_line(
    journal: Journal, tmp_path: Path, rest: bytes
) -> None:
    whole = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(whole + rest)
    again = loaded(tmp_path)
    assert (again.sources, again.shards) == (journal.sources, journal.shards)
    assert (tmp_path / JOURNAL).read_bytes() == whole + rest, "loading changes nothing"
    again.finish_shard("model-2.safetensors", ONE)
    assert loaded(tmp_path).shards == {"model-1.safetensors": TWO, "model-2.safetensors": ONE}


def test_discard(journal: Journal, tmp_path: Path) -> None:
    Journal.discard(tmp_path)
    Journal.discard(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_same_request_is_not_refused() -> None:
    refuse_other_request(REQUEST, {**REQUEST}, Path("out"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"options": {"rank": 16, "score": "rho"}}, ["options.rank = 32", "options.rank = 16"]),
        ({"options": {"rank": 32}}, ["options.score = norm", "options.score = None"]),
        ({"options": {**REQUEST["options"], "new": 1}}, ["options.new = None", "options.new = 1"]),
    ],
)
def test_another_request_is_refused_with_the_first_difference(asked: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_other_request({"options": REQUEST["options"]}, asked, Path("some/out"))
    assert [word for word in ("some/out", *words) if word not in caught.value.cause] == []
    assert "--overwrite" in caught.value.remedy
