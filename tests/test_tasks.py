"""Tasks of lm-evaluation-harness: two small ones of our own, since data sets cannot be downloaded here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import mreader
from transformers import AutoTokenizer

from mreader.errors import SourceError, UsageError
from mreader.runtime import load, reader_mode, set_budget
from mreader.tasks import pair, run_tasks

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and what it imports

EXAMPLES = [
    ("def add(a, b):\n    return a", [" + b", " % c"], 0),
    ("for i in range", ["(n):", " = 3"], 0),
    ("import", [" }", " os"], 1),
    ("class A", [":", " ="], 0),
    ("try:\n    pass", ["\nlambda", "\nexcept"], 1),
    ("if x is not", [" None", " while"], 0),
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
WRITE = """
task: tiny_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{max_gen_toks: 4, until: ["\\n"]}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "examples.jsonl"
    rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in EXAMPLES]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in (("choice", CHOICE), ("write", WRITE)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def evaluate(model: Path, folder: Path, *options: object) -> dict[str, Any]:
    ran = mreader("eval", model, "--tasks", "tiny_choice, tiny_write", "--task-folder", folder, "--json", *options)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def accuracy(model: Any, tokenizer: Any, mode: Any) -> float:
    """Of the choices whose tokens are the likelier ones after the question; every token through the model in a mode."""
    right = 0
    for question, choices, answer in EXAMPLES:
        likelihoods = []
        for choice in choices:
            start, whole = (torch.tensor(tokenizer(text)["input_ids"]) for text in (question, question + choice))
            with torch.inference_mode(), reader_mode(model, mode):
                logits = model(input_ids=whole[None, :-1], use_cache=False).logits[0].log_softmax(-1)
            likelihoods.append(float(logits.gather(1, whole[1:, None])[len(start) - 1 :].sum()))
        right += likelihoods[answer] == max(likelihoods)
    return right / len(EXAMPLES)


def test_dense_and_sparse_side_by_side(olmoe_augmented: Path, folder: Path) -> None:
    found = evaluate(olmoe_augmented, folder, "--reads", 0.22)
    assert [(score["task"], score["metric"]) for score in found["tasks"]] == [
        ("tiny_choice", "acc,none"),
        ("tiny_write", "exact_match,none"),
    ]
    assert [score["examples"] for score in found["tasks"]] == [len(EXAMPLES)] * 2
    assert found["reads"] <= 0.22
    choice = found["tasks"][0]
    model = load(olmoe_augmented, dtype="float32", device="cpu")
    set_budget(model, reads=0.22)
    tokenizer = AutoTokenizer.from_pretrained(olmoe_augmented)
    dense, sparse = (accuracy(model, tokenizer, mode) for mode in ("never", "always"))
    assert (choice["dense"], choice["sparse"]) == (pytest.approx(dense), pytest.approx(sparse))
    assert choice["difference"] == pytest.approx(sparse - dense)


def test_everything_read_is_the_dense_model(olmoe_augmented: Path, folder: Path) -> None:
    for score in evaluate(olmoe_augmented, folder, "--channels", 1)["tasks"]:
        assert score["difference"] == 0
        assert score["error"] == 0


def test_an_error_is_of_pairs_and_of_means_alone() -> None:
    """Two of four answers change, both for the better: 0.5, with a deviation of sqrt(1/3) over four examples."""
    dense, sparse = (
        [{"doc_id": i, "acc": a, "filter": "none"} for i, a in enumerate(v)] for v in ((1, 0, 0, 0), (1, 1, 1, 0))
    )
    for mean, error in ((0.25, (1 / 3) ** 0.5 / 2), (0.3, None)):  # 0.3 is no mean of these
        found = [
            {"results": {"t": {"alias": "t", "acc,none": value, "acc_stderr,none": "N/A"}}, "samples": {"t": samples}}
            for value, samples in ((mean, dense), (0.75, sparse))
        ]
        (score,) = pair(*found)
        assert score.difference == pytest.approx(0.75 - mean)
        assert score.error == (None if error is None else pytest.approx(error))
        assert score.examples == 4


def test_likelihoods_send_every_token_through_the_reader(
    olmoe_augmented: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And text only its decode steps: what mode the model is in at each call."""
    modes: list[str] = []

    def noted(model: Any, mode: Any) -> Any:
        modes.append(mode)
        return reader_mode(model, mode)

    monkeypatch.setattr("mreader.tasks.reader_mode", noted)
    model = load(olmoe_augmented, dtype="float32", device="cpu")
    set_budget(model, reads=0.3)
    tokenizer = AutoTokenizer.from_pretrained(olmoe_augmented)
    run_tasks(model, tokenizer, ["tiny_choice"], folder)
    assert list(dict.fromkeys(modes)) == ["never", "always"]
    modes.clear()
    run_tasks(model, tokenizer, ["tiny_write"], folder)
    assert list(dict.fromkeys(modes)) == ["never", "decode"]


def test_in_words(olmoe_augmented: Path, folder: Path) -> None:
    options = ("--tasks", "tiny_choice", "--task-folder", folder, "--examples", 2)
    ran = mreader("eval", olmoe_augmented, *options)
    assert ran.code == 0, ran.err
    assert ran.err == ""
    table, reads = ran.out.splitlines()[:-1], ran.out.splitlines()[-1]
    assert table[-1].split()[:2] == ["tiny_choice", "acc,none"]
    assert table[-1].split()[-1] == "2"
    assert reads.startswith("reads 29.")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (UsageError("the reader's", "own words"), UsageError),
        (ValueError("no such split"), SourceError),
        (OSError("no network"), SourceError),
    ],
)
def test_what_the_data_of_a_task_lack_is_told_apart_from_errors_of_our_own(
    raised: Exception, expected: type[Exception], olmoe_augmented: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_eval.simple_evaluate", mock.Mock(side_effect=raised))
    model, tokenizer = load(olmoe_augmented, device="cpu"), AutoTokenizer.from_pretrained(olmoe_augmented)
    with pytest.raises(expected) as found:
        run_tasks(model, tokenizer, ["tiny_choice"], folder)
    assert type(found.value) is expected
    assert str(raised) in str(found.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "no_such_task"], "no_such_task"),
        (["--tasks", "tiny_choice", "--generate", "8"], "--generate"),
        (["--tasks", "tiny_choice", "--text", "a.txt"], "--text"),
        (["--tasks", "tiny_choice", "--windows", "4"], "--windows"),
        (["--tasks", "tiny_choice", "--length", "64"], "--length"),
        (["--tasks", "tiny_choice", "--layers"], "--layers"),
        (["--tasks", "tiny_choice", "--selector", "teal"], "--selector"),
        (["--tasks", "tiny_choice", "--calibration", "a.npy"], "--calibration"),
        (["--tasks", "tiny_choice", "--task-folder", "no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_options(options: list[str], message: str, olmoe_augmented: Path) -> None:
    ran = mreader("eval", olmoe_augmented, *options)
    assert ran.code == 2
    assert message in ran.err
