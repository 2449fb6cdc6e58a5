"""Tokens, windows, and what a comparison of two models' logits says."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from checkpoints import VOCABULARY, save_tiny
from commands import mreader

from mreader.convert import convert
from mreader.errors import SourceError, UsageError
from mreader.evaluate import compare_windows, cut_windows, read_ids, refuse_unknown_tokens, window_batches


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestReadIds:
    def test_a_token_file_needs_no_tokenizer(self, tmp_path: Path) -> None:
        np.save(tmp_path / "ids.npy", np.array([3, 1, 2], dtype=np.uint16))
        assert read_ids(tmp_path / "ids.npy", tmp_path).tolist() == [3, 1, 2]

    def test_text_and_folders_go_through_the_model_s_tokenizer(self, olmoe_tiny: Path, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("def f(x):\n")
        (tmp_path / "b.py").write_text("    return x\n")
        parts = [read_ids(tmp_path / name, olmoe_tiny).tolist() for name in ("a.py", "b.py")]
        assert read_ids(tmp_path, olmoe_tiny).tolist() == parts[0] + parts[1]

    def test_a_text_longer_than_the_model_s_context_is_nothing_to_warn_of(
        self, olmoe_tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        (tmp_path / "a.py").write_text("x = 1\n" * 2000)
        assert len(read_ids(tmp_path / "a.py", olmoe_tiny)) > 2048
        assert not caplog.messages

    def test_what_is_missing_is_told(self, olmoe_tiny: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"none\.txt does not exist"):
            read_ids(tmp_path / "none.txt", olmoe_tiny)
        (tmp_path / "a.txt").write_text("a")
        (tmp_path / "model").mkdir()
        with pytest.raises(SourceError, match="has no tokenizer"):
            read_ids(tmp_path / "a.txt", tmp_path / "model")


class TestWindows:
    def test_they_are_the_first_tokens_in_order(self) -> None:
        assert cut_windows(torch.arange(10), 3, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]

    @pytest.mark.parametrize(
        ("shape", "vocabulary", "expected"),
        [
            ((7, 1500), 100, [2, 2, 2, 1]),  # bound by tokens
            ((16, 256), 152_000, [3, 3, 3, 3, 3, 1]),  # by logits
            ((3, 5000), 100, [1, 1, 1]),
        ],
    )
    def test_batches_hold_every_window_once(self, shape: tuple[int, int], vocabulary: int, expected: list[int]) -> None:
        windows = torch.arange(shape[0] * shape[1]).view(shape)
        batches = list(window_batches(windows, vocabulary))
        assert [len(batch) for batch in batches] == expected
        assert torch.equal(torch.cat(batches), windows)

    @pytest.mark.parametrize(("ids", "named"), [([5, -1], -1), ([0, VOCABULARY], VOCABULARY), ([-1, VOCABULARY], -1)])
    def test_the_token_that_the_model_does_not_know_is_named(self, ids: list[int], named: int) -> None:
        model = mock.Mock(**{"get_input_embeddings.return_value.num_embeddings": VOCABULARY})
        with pytest.raises(UsageError, match=rf"token id {named} is outside"):
            refuse_unknown_tokens(model, torch.tensor([ids]))


def test_of_a_model_that_also_hears_and_speaks_the_part_that_writes_is_run(olmoe_tiny: Path, tmp_path: Path) -> None:
    """Qwen3-Omni as a whole has no forward; its talker has experts of its own, which are left alone."""
    source, out = tmp_path / "source", tmp_path / "out"
    save_tiny(source, "qwen3_omni_moe")
    convert(source, out, device="cpu")
    np.save(tmp_path / "ids.npy", np.arange(1, VOCABULARY))
    shape = ("--tokens", tmp_path / "ids.npy", "--windows", 2, "--length", 16)
    for model, options in (
        (out, ("--channels", 1)),
        (source, ("--reads", 1)),
        (out, ("--channels", 1, "--generate", 4)),
    ):
        if model == out:
            for file in olmoe_tiny.glob("tokenizer*"):
                shutil.copy(file, out)
        ran = mreader("eval", model, *shape, *options, "--json", "-q")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["kl"] == pytest.approx(0, abs=1e-4)  # bfloat16 sources in float32, other sums


class TestComparison:
    def test_of_a_model_with_itself(self) -> None:
        logits, ids = draw(2, 5, 11, seed=1), torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(2))
        kl, agreed, nll_dense, nll = compare_windows(logits, logits, ids).unbind(1)
        assert kl.tolist() == pytest.approx([0, 0], abs=1e-6)
        assert agreed.tolist() == [5, 5]
        assert torch.equal(nll_dense, nll)

    def test_each_sum_by_its_definition(self) -> None:
        dense, sparse = draw(1, 5, 11, seed=3), draw(1, 5, 11, seed=4)
        ids = torch.tensor([[1, 4, 2, 10, 0]])
        kl, agreed, nll_dense, nll = compare_windows(dense, sparse, ids)[0].tolist()
        p, q = dense[0].double().softmax(-1), sparse[0].double().softmax(-1)
        # sums of some fifty float32 numbers of size one
        assert kl == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
        assert agreed == int((p.argmax(-1) == q.argmax(-1)).sum())
        for found, distribution in ((nll_dense, p), (nll, q)):
            # a token is predicted from those before it: four predictions of five tokens
            expected = -sum(float(distribution[i, ids[0, i + 1]].log()) for i in range(4))
            assert found == pytest.approx(expected, rel=1e-5)
