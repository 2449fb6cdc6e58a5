"""mreader compare and mreader eval --selector: the grid, its figures and its files."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import mreader

from mreader.errors import UsageError
from mreader.report import write_html
from mreader.selectors.grid import Grid, parse_reads, read_texts
from mreader.selectors.harness import Harness
from mreader.selectors.jobs import Job, Reader
from mreader.selectors.kept import Kept
from mreader.selectors.pairs import Count, Pair, compare_windowwise, count_verdicts, keep_pairs, mean_and_error
from mreader.selectors.runs import Run
from mreader.selectors.scores import SCORES
from mreader.selectors.subject import open_subject

TOKENS = Path(__file__).parent / "data" / "python-tokens.npy"  # 1,024 ids
SHAPE = ("--windows", 4, "--length", 64)
KEYS = {"selector", "score", "keep", "recovery", "reads_asked", "reads_used", "k", "kl", "top1"}


def compare(model: Path, *options: object) -> list[dict[str, Any]]:
    ran = mreader("compare", model, "--tokens", TOKENS, *SHAPE, "--calibration-windows", 4, "--json", "-q", *options)
    assert ran.code == 0, ran.err
    rows: list[dict[str, Any]] = json.loads(ran.out)
    return rows


def evaluate(model: Path, *options: object) -> dict[str, Any]:
    ran = mreader("eval", model, "--tokens", TOKENS, *SHAPE, "--json", "-q", *options)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.fixture(scope="module")
def rows(olmoe_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A source checkpoint: two budgets, of which the lower is too small for what reads a matrix first."""
    folder = tmp_path_factory.mktemp("compare")
    options = ("--reads", "0.3,0.4", "--selectors", "reader,cats,prox,oracle", "--recovery", "none,map")
    files = ("--csv", folder / "a.csv", "--html", folder / "a.html", "--plot", folder / "a.png")
    found = compare(olmoe_tiny, *options, *files)
    assert list(csv.DictReader((folder / "a.csv").read_text().splitlines())) == [
        {key: "" if value is None else str(value) for key, value in row.items()} for row in found
    ]
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "a.html").read_text()
    assert page.count("<svg") == 4
    assert 'href="http' not in page
    assert "src=" not in page
    return found


def only(rows: list[dict[str, Any]], **wanted: object) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


class TestCompare:
    def test_every_key_is_there(self, rows: list[dict[str, Any]]) -> None:
        assert all(row.keys() >= KEYS for row in rows)

    def test_top_k_reads_what_was_asked_for(self, rows: list[dict[str, Any]]) -> None:
        """And not a channel less: one costs three rows of 16 sectors, of 24,576."""
        for row in rows:
            if row["keep"] == "topk" and row["kl"] is not None:
                assert row["reads_asked"] - 48 / 24_576 < row["reads_used"] <= row["reads_asked"]

    def test_a_matched_run_reads_what_the_threshold_read(self, rows: list[dict[str, Any]]) -> None:
        thresholds = [row for row in rows if row["keep"] == "threshold" and row["kl"] is not None]
        matched = [row for row in rows if row["keep"] == "matched"]
        assert sorted(row["reads_asked"] for row in matched) == sorted(row["reads_used"] for row in thresholds)
        # half a channel of three rows of 16 sectors, of 24,576
        assert all(abs(row["reads_used"] - row["reads_asked"]) <= 24.1 / 24_576 for row in matched)

    def test_the_infeasible_is_said_and_not_faked(self, rows: list[dict[str, Any]]) -> None:
        row = only(rows, selector="cats", keep="topk", reads_asked=0.3)
        assert row["kl"] is row["reads_used"] is row["k"] is None
        assert "33.33 %" in row["note"]
        assert only(rows, selector="cats", keep="topk", reads_asked=0.4)["kl"] > 0

    def test_the_reader_is_better_than_its_peers_and_the_oracle_than_the_reader(
        self, rows: list[dict[str, Any]]
    ) -> None:
        def best(selector: str) -> float:
            runs = [row for row in rows if row["selector"] == selector and row["keep"] == "topk"]
            return min(row["kl"] for row in runs if row["reads_asked"] == 0.4)

        assert best("oracle") < best("reader") < min(best("prox"), best("cats"))

    def test_a_recovery_that_has_nothing_to_work_on_is_left_out(self, rows: list[dict[str, Any]]) -> None:
        assert {row["recovery"] for row in rows if row["selector"] == "cats"} == {"none"}

    def test_the_table(self, olmoe_tiny: Path) -> None:
        options = ("--selectors", "cats,oracle", "--reads", "0.3,0.4", "--recovery", "none", "--keep", "topk,threshold")
        ran = mreader("compare", olmoe_tiny, "--tokens", TOKENS, *SHAPE, "--calibration-windows", 4, *options)
        assert ran.code == 0, ran.err
        assert "infeasible" in ran.out
        assert "cats cannot read 30 %" in ran.err
        (line,) = [line for line in ran.out.splitlines() if line.split()[:3] == ["oracle", "none", "40.00"]]
        assert line.count("±") == 2  # of its reads, and of KL less that of top-k
        assert "top-k against thresholds, at the budget: " in " ".join(ran.out.split())

    def test_one_window_has_no_error_and_no_verdict(self, olmoe_tiny: Path) -> None:
        options = ("--selectors", "oracle", "--reads", "0.4", "--recovery", "none")
        shape = ("--windows", 1, "--length", 64, "--calibration-windows", 1)
        ran = mreader("compare", olmoe_tiny, "--tokens", TOKENS, *shape, *options)
        assert ran.code == 0, ran.err
        assert "KL less top-k's" in ran.out
        assert not [word for word in ("inf", "±", "two standard errors") if word in ran.out]

    def test_a_source_is_sketched_as_asked(self, rows: list[dict[str, Any]], olmoe_tiny: Path) -> None:
        """Quaternary codes and a recovery map of rank 64: two bytes a channel and rank more, so fewer channels."""
        options = ("--reads", 0.4, "--selectors", "reader", "--recovery", "map", "--keep", "topk")
        ternary = only(rows, selector="reader", recovery="map", keep="topk", reads_asked=0.4)
        (quaternary,) = compare(olmoe_tiny, *options, "--codes", "quaternary")
        assert quaternary["k"] == ternary["k"]  # 64 channels: 16 bytes or 13, one sector
        assert quaternary["kl"] < ternary["kl"]
        (wider,) = compare(olmoe_tiny, *options, "--rank", 64)
        assert wider["k"] < ternary["k"]

    def test_an_augmented_checkpoint_is_sketched_otherwise_from_its_native_weights(
        self, olmoe_tiny: Path, olmoe_augmented: Path
    ) -> None:
        options = ("--reads", 0.4, "--selectors", "reader", "--recovery", "map", "--keep", "topk")
        codes = ("--codes", "quaternary")
        (source,), (augmented,) = (compare(model, *options, *codes) for model in (olmoe_tiny, olmoe_augmented))
        assert augmented["k"] == source["k"]
        assert augmented["kl"] == pytest.approx(source["kl"], rel=1e-4)  # the same sketch, dense logits of other sums

    def test_a_source_and_its_augmented_checkpoint_are_the_same(
        self, rows: list[dict[str, Any]], olmoe_augmented: Path
    ) -> None:
        (row,) = compare(
            olmoe_augmented, "--reads", 0.3, "--selectors", "reader", "--recovery", "map", "--keep", "topk"
        )
        expected = only(rows, selector="reader", recovery="map", keep="topk", reads_asked=0.3)
        assert row["kl"] == pytest.approx(expected["kl"], rel=0.01)  # recovery maps by products of another precision
        assert row["k"] == expected["k"]


@pytest.fixture(scope="module")
def ablated(olmoe_tiny: Path) -> list[dict[str, Any]]:
    return compare(olmoe_tiny, "--ablations", "--reads", "0.25,0.4")


class TestAblations:
    def test_one_thing_is_changed_at_a_time(self, ablated: list[dict[str, Any]]) -> None:
        assert [row["variant"] for row in ablated if row["reads_asked"] == 0.4] == [
            "",
            "k of every expert alike",
            "rotation off",
            *(f"{n} coordinates" for n in (48, 64, 96, 112, 128)),
            "recovery off",
            *(f"rank {n}" for n in (8, 16, 64)),
            "score norm",
            "score rho",
            "quaternary codes",
        ]

    def test_every_variant_reads_what_was_asked_for(self, ablated: list[dict[str, Any]]) -> None:
        """And not a channel less, of three rows of 16 sectors; per expert as well."""
        for row in ablated:
            if row["kl"] is not None:
                assert row["reads_asked"] - 48 / 24_576 < row["reads_used"] <= row["reads_asked"]

    def test_what_is_read_to_decide_is_not_there_to_keep(self, ablated: list[dict[str, Any]]) -> None:
        """Channels kept at 40 %: sectors of codes are 2 K nb n_c, of a map of rank r the half bytes 2 r (H + K I)."""
        base = only(ablated, variant="", reads_asked=0.4)["k"]
        kept = {row["variant"]: row["k"] for row in ablated if row["reads_asked"] == 0.4}
        for coordinates in (48, 64, 96, 112, 128):
            expected = (80 - coordinates) * 2 * 8 * 2 / 48
            assert kept[f"{coordinates} coordinates"] == pytest.approx(base + expected, abs=1)
        for rank, name in ((0, "recovery off"), (8, "rank 8"), (16, "rank 16"), (64, "rank 64")):
            expected = (32 - rank) * 2 * (256 + 8 * 64) / 32 / 48
            assert kept[name] == pytest.approx(base + expected, abs=1)
        assert kept["rotation off"] == kept["score norm"] == base
        assert kept["score rho"] == base - (2 * 8 * 2 * 2 * 64 / 32) // 48 - 1

    def test_a_variant_is_the_reader_that_was_asked_for_so(
        self, ablated: list[dict[str, Any]], olmoe_tiny: Path
    ) -> None:
        options = ("--selectors", "reader", "--keep", "topk", "--reads", 0.4)
        for variant, others in (
            ("64 coordinates", ("--coordinates", 64, "--recovery", "map")),
            ("recovery off", ("--recovery", "none")),
            ("score norm", ("--score", "norm", "--recovery", "map")),
            ("quaternary codes", ("--codes", "quaternary", "--recovery", "map")),
            ("rank 64", ("--rank", 64, "--recovery", "map")),
        ):
            (row,) = compare(olmoe_tiny, *options, *others)
            assert row["kl"] == only(ablated, variant=variant, reads_asked=0.4)["kl"]

    def test_the_table_says_how_far_each_is_from_the_reader(self, olmoe_tiny: Path, tmp_path: Path) -> None:
        options = ("--reads", 0.2, "--ablations", "--html", tmp_path / "a.html", "--plot", tmp_path / "a.svg", "-q")
        ran = mreader("compare", olmoe_tiny, "--tokens", TOKENS, *SHAPE, *options)
        assert ran.code == 0, ran.err
        assert (tmp_path / "a.svg").read_text().count("<svg") == (tmp_path / "a.html").read_text().count("<svg") == 1
        lines = {line.strip().partition("  ")[0]: line for line in ran.out.splitlines()}
        assert "±" in lines["rotation off"]
        assert "±" not in lines["as it is"]
        assert "infeasible" in lines["128 coordinates"]

    def test_where_the_reader_itself_cannot_keep_to_a_budget(self, olmoe_tiny: Path, tmp_path: Path) -> None:
        """Its variants are shown without a difference, and the other budget as ever."""
        files = ("--html", tmp_path / "a.html", "--plot", tmp_path / "a.svg", "--csv", tmp_path / "a.csv")
        options = ("--ablations", "--reads", "0.165,0.3", "--windows", 2, "--length", 16, "-q")
        ran = mreader("compare", olmoe_tiny, "--tokens", TOKENS, "--calibration-windows", 1, *options, *files)
        assert ran.code == 0, ran.err
        rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
        (reader,) = [row for row in rows if row["reads_asked"] == "0.165" and not row["variant"]]
        assert not reader["kl"]
        assert any(row["kl"] for row in rows if row["reads_asked"] == "0.165")
        page = (tmp_path / "a.html").read_text()
        assert "rotation off, 30 %" in page  # matplotlib notes what its paths spell
        assert ", 16.5 %" not in page

    @pytest.mark.parametrize("option", ["--selectors", "--keep", "--recovery"])
    def test_a_choice_of_selectors_is_another_comparison(self, option: str, olmoe_tiny: Path) -> None:
        ran = mreader("compare", olmoe_tiny, "--tokens", TOKENS, *SHAPE, "--ablations", option, "none")
        assert ran.code == 2
        assert option in ran.cause


class TestEval:
    def test_the_simulated_reader_is_the_reader(self, olmoe_augmented: Path) -> None:
        """The same budget through the model's own runtime, and through the harness."""
        own = evaluate(olmoe_augmented, "--reads", 0.3)
        simulated = evaluate(olmoe_augmented, "--reads", 0.3, "--recovery", "map")
        assert simulated == pytest.approx(own, rel=1e-3)

    def test_a_source_is_sketched_in_memory(self, olmoe_tiny: Path, olmoe_augmented: Path) -> None:
        found = evaluate(olmoe_tiny, "--reads", 0.3)
        assert found == pytest.approx(evaluate(olmoe_augmented, "--reads", 0.3), rel=0.01)

    def test_a_threshold(self, olmoe_tiny: Path) -> None:
        options = ("--reads", 0.4, "--selector", "cats", "--keep", "threshold", "--calibration", TOKENS)
        ran = mreader("eval", olmoe_tiny, "--tokens", TOKENS, "--windows", 4, "--length", 64, *options, "--json")
        assert ran.code == 0, ran.err
        found = json.loads(ran.out)
        assert found.keys() == {"kl", "top1", "nll_dense", "nll", "reads", "k"}
        # calibrated on the 8 first windows, of which 4 are evaluated
        assert found["reads"] == pytest.approx(0.4, abs=0.02)

    def test_figures_of_each_layer(self, olmoe_augmented: Path) -> None:
        """Thresholds keep a layer's budget where they were calibrated, and not the same number elsewhere."""
        options = ("--reads", 0.4, "--keep", "threshold", "--calibration", TOKENS, "--layers")
        found = evaluate(olmoe_augmented, *options)
        assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2, 3]
        assert sum(layer["reads"] for layer in found["layers"]) / 4 == pytest.approx(found["reads"])
        assert len({layer["k"] for layer in found["layers"]}) > 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--selector", "none", "--reads", "0.4"], "unknown selector"),
            (["--keep", "some", "--reads", "0.4"], "unknown keep rule"),
            (["--selector", "cats"], "--reads"),
            (["--selector", "cats", "--reads", "0.3"], "33.33 %"),
            (["--selector", "cats", "--reads", "0.4", "--recovery", "map"], "no activation"),
            (["--selector", "teal", "--reads", "0.4"], "--calibration FILE"),
            (["--selector", "prox", "--reads", "0.4", "--calibration", "no.npy"], "leave --calibration out"),
            (["--calibration", "no.npy"], "leave --calibration out"),
            (["--calibration", "no.npy", "--generate", "8"], "leave --calibration out"),
            (["--reads", "0.4", "--examples", "2"], "leave --examples out"),
            (["--reads", "0.4", "--batch", "1"], "leave --batch out"),
            (["--reads", "0.4", "--task-folder", "tasks"], "leave --task-folder out"),
        ],
    )
    def test_bad_options(self, options: list[str], message: str, olmoe_tiny: Path) -> None:
        ran = mreader("eval", olmoe_tiny, "--tokens", TOKENS, *SHAPE, *options)
        assert ran.code == 2
        assert message in " ".join(ran.err.split())


def test_windows_of_one_model_are_not_taken_for_others(olmoe_tiny: Path) -> None:
    """Nor for the same tokens in windows of another length."""
    ids, job = torch.from_numpy(np.load(TOKENS).astype(np.int64)), Job("oracle", "topk", "none", 0.5)
    cuts = [ids[:64].view(2, 32), ids[200:264].view(2, 32), ids[:64].view(4, 16)]
    subject = open_subject(olmoe_tiny, "float32", "cpu")
    found = [Harness(subject, windows).run(job).kl for windows in cuts]
    assert found == [Harness(replace(subject, kept=Kept()), windows).run(job).kl for windows in cuts]


class TestGrid:
    def test_all_is_every_selector(self) -> None:
        assert Grid.of("all", "topk", "none", (0.3,)).selectors == tuple(SCORES)

    def test_matched_runs_need_thresholds(self) -> None:
        jobs = Grid.of("reader", "matched", "none", (0.3,)).jobs(Reader())
        assert {job.keep for job in jobs} == {"threshold"}

    @pytest.mark.parametrize("given", ["", "a", "0", "1.5", "0.3,,0.4"])
    def test_budgets_are_fractions(self, given: str) -> None:
        with pytest.raises(UsageError):
            parse_reads(given)

    def test_calibration_windows_are_not_evaluated(self, tmp_path: Path) -> None:
        np.save(tmp_path / "ids.npy", np.arange(100))
        texts = read_texts(tmp_path, tmp_path / "ids.npy", None, (3, 20), 2)
        assert texts.evaluated.max() == 59
        assert texts.calibration is not None
        assert texts.calibration.tolist() == torch.arange(60, 100).view(2, 20).tolist()
        with pytest.raises(UsageError, match="fewer"):
            read_texts(tmp_path, tmp_path / "ids.npy", None, (4, 20), 2)


def _run(keep: str, kl: tuple[float, ...], budget: float | None = None) -> Run:
    job = Job("reader", keep, "none", 0.3, budget)
    reads = (0.3,) * len(kl)
    return Run(job, sum(kl) / len(kl), 0.9, 2.0, 2.1, 0.3, 10, "", kl, reads, (0.3, 0.3), (10, 12), (0.3,) * 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--selectors", "cats", "--recovery", "map"], "--recovery map"),
        (["--selectors", "rsparse,park", "--recovery", "map"], "--recovery map"),
        (["--selectors", "cats", "--keep", "matched", "--reads", "0.1"], "nothing to match"),
    ],
)
def test_a_comparison_of_nothing_is_refused(options: list[str], message: str, olmoe_tiny: Path, tmp_path: Path) -> None:
    shape = ("--windows", 1, "--length", 16, "--calibration-windows", 1)
    ran = mreader("compare", olmoe_tiny, "--tokens", TOKENS, *shape, *options, "--csv", tmp_path / "a.csv", "-q")
    assert ran.code == 2
    assert message in ran.cause
    assert not list(tmp_path.iterdir())


class TestPairs:
    def test_a_standard_error_is_that_of_paired_windows(self) -> None:
        # differences 1, 2, 3: mean 2, deviation 1
        pair = compare_windowwise(_run("topk", (2, 4, 6)), _run("topk", (1, 2, 3)))
        assert pair is not None
        assert (pair.difference, pair.error) == (2, pytest.approx(1 / 3**0.5))

    def test_one_window_says_nothing_of_its_error(self) -> None:
        assert mean_and_error((2,)) == (2, float("inf"))

    @pytest.mark.parametrize(("difference", "verdict"), [(0.3, "win"), (0.1, "tie"), (-0.3, "loss")])
    def test_beyond_two_standard_errors_somebody_wins(self, difference: float, verdict: str) -> None:
        assert Pair(_run("threshold", (1,)), _run("topk", (1,)), difference, 0.1).verdict == verdict

    def test_a_threshold_is_paired_with_the_run_at_its_reads(self) -> None:
        threshold, at_budget = _run("threshold", (0.4, 0.5)), _run("topk", (0.1, 0.1))
        matched = _run("topk", (0.3, 0.3), budget=0.3)
        (pair,) = keep_pairs([threshold, at_budget, matched])
        assert pair.difference == pytest.approx(0.15)
        (pair,) = keep_pairs([threshold, at_budget, matched], "topk")
        assert pair.difference == pytest.approx(0.35)
        assert count_verdicts([threshold, at_budget, matched]) == [Count("topk", 1, 0, 0), Count("matched", 1, 0, 0)]


def test_a_page_without_feasible_runs_is_still_a_page(tmp_path: Path) -> None:
    write_html([Run(Job("cats", "topk", "none", 0.1), note="no <budget>")], "a & b", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "a &amp; b" in page
    assert "no &lt;budget&gt;" in page


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--plot", "a.gif", "no picture"),
        ("--plot", "a", "no picture"),
        ("--plot", "no/a.png", "cannot be written"),
        ("--html", "no/a.html", "cannot be written"),
        ("--csv", ".", "cannot be written"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_anything_is_run(
    option: str, file: str, message: str, olmoe_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mreader.selectors.grid.open_harness", lambda *_: pytest.fail("the model was opened"))
    ran = mreader("compare", olmoe_tiny, "--tokens", TOKENS, *SHAPE, option, tmp_path / file)
    assert ran.code == 2
    assert message in ran.cause
