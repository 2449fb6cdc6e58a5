"""Continuations of the dense and of a sparse model: what they have in common, and by how much they differ."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import mreader
from torch.nn.functional import log_softmax
from transformers import GenerationConfig, PreTrainedModel

from mreader.continuation import compare_continuations, repetition
from mreader.errors import UsageError
from mreader.evaluate import cut_windows, read_tokens
from mreader.runtime import load, reader_mode, set_budget

TOKENS = Path(__file__).parent / "data" / "python-tokens.npy"
N = 12


@pytest.fixture(scope="module")
def model(olmoe_augmented: Path) -> PreTrainedModel:
    loaded = load(olmoe_augmented, dtype="float32", device="cpu")
    set_budget(loaded, reads=0.3)
    return loaded


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return cut_windows(read_tokens(TOKENS), 5, 20)


def greedy(model: PreTrainedModel, prompt: torch.Tensor, mode: Any) -> tuple[list[int], list[torch.Tensor]]:
    """The N most likely tokens and the logits they come from, a step at a time on a cache."""
    tokens, logits = [], []
    with torch.inference_mode(), reader_mode(model, mode):
        out = model(input_ids=prompt[None], use_cache=True)
        for _ in range(N):
            logits.append(out.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            cache = {key: out[key] for key in ("cache", "past_key_values") if key in out}
            out = model(input_ids=torch.tensor([[tokens[-1]]]), use_cache=True, **cache)
    return tokens, logits


def test_a_model_does_not_diverge_from_itself(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    dense = partial(reader_mode, model, "never")
    found = compare_continuations(model, dense, dense, prompts, N)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert (found.top1, found.first_difference, found.identical) == (1, N, 1)
    assert found.repetition == found.repetition_dense


def test_every_figure_by_its_definition(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    """Against a loop over single tokens; the sparse model follows the dense tokens, on a cache of a dense prefill."""
    found = compare_continuations(
        model, partial(reader_mode, model, "never"), partial(reader_mode, model, "decode"), prompts, N
    )
    common, repeated, repeated_dense, kl = [], [], [], []
    for prompt in prompts:
        dense, logits = greedy(model, prompt, "never")
        sparse, _ = greedy(model, prompt, "decode")
        common.append(next((i for i, pair in enumerate(zip(dense, sparse, strict=True)) if pair[0] != pair[1]), N))
        repeated.append(repetition(sparse))
        repeated_dense.append(repetition(dense))
        kl.append(_kl_along(model, prompt, dense, logits))
    assert found.first_difference == sum(common) / 5
    assert found.identical == common.count(N) / 5
    assert found.repetition == pytest.approx(sum(repeated) / 5)
    assert found.repetition_dense == pytest.approx(sum(repeated_dense) / 5)
    # float32 sums over 2,048 tokens
    assert found.kl_steps == pytest.approx(torch.tensor(kl).mean(0).tolist(), rel=1e-3, abs=1e-6)
    assert found.kl == pytest.approx(sum(found.kl_steps) / (N - 1))
    assert min(common) < N  # or this said nothing


def _kl_along(
    model: PreTrainedModel, prompt: torch.Tensor, tokens: list[int], dense: list[torch.Tensor]
) -> list[float]:
    found = []
    with torch.inference_mode(), reader_mode(model, "decode"):
        out = model(input_ids=prompt[None], use_cache=True)
        for token, expected in zip(tokens[:-1], dense[1:], strict=True):
            cache = {key: out[key] for key in ("cache", "past_key_values") if key in out}
            out = model(input_ids=torch.tensor([[token]]), use_cache=True, **cache)
            p, q = log_softmax(expected.double(), -1), log_softmax(out.logits[0, -1].double(), -1)
            found.append(float((p.exp() * (p - q)).sum()))
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {"eos_token_id": list(range(2048))},
        {"num_beams": 2},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": list(range(0, 2048, 2))},
        {"repetition_penalty": 2.0},
        {"do_sample": True, "temperature": 5.0},
        {"max_time": 1e-4},
    ],
    ids=lambda asked: min(asked),
)
def test_what_the_checkpoint_s_generation_config_asks_for_changes_nothing(
    asked: dict[str, Any], model: PreTrainedModel, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, sparse = (partial(reader_mode, model, mode) for mode in ("never", "decode"))
    expected = compare_continuations(model, dense, sparse, prompts, N)
    own = GenerationConfig(**asked)
    monkeypatch.setattr(model, "generation_config", own)
    assert compare_continuations(model, dense, sparse, prompts, N) == expected
    assert model.generation_config is own


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3], 0),
        ([1, 2, 3, 4, 5], 0),
        ([7] * 10, 6 / 7),  # seven 4-grams, one of them distinct
        ([1, 2, 1, 2, 1, 2], 1 / 3),
    ],
)
def test_repetition_is_the_share_of_4_grams_seen_before(tokens: list[int], expected: float) -> None:
    assert repetition(tokens) == pytest.approx(expected)


def test_one_token_is_the_prefill_s(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        compare_continuations(model, nullcontext, nullcontext, prompts, 1)


class TestCommand:
    OPTIONS = ("--tokens", TOKENS, "--windows", 3, "--length", 20, "--reads", 0.3, "--generate", N)

    def _json(self, model: Path, *options: object) -> dict[str, Any]:
        ran = mreader("eval", model, *self.OPTIONS, "--json", "-q", *options)
        assert ran.code == 0, ran.err
        found: dict[str, Any] = json.loads(ran.out)
        return found

    def test_the_runtime_and_the_harness_write_the_same(self, olmoe_tiny: Path, olmoe_augmented: Path) -> None:
        own, simulated = self._json(olmoe_augmented), self._json(olmoe_tiny)
        assert own.pop("kl_steps") == pytest.approx(simulated.pop("kl_steps"), rel=0.02)  # another map's last bits
        assert own == pytest.approx(simulated, rel=0.02)

    def test_any_selector_and_keep_rule(self, olmoe_tiny: Path) -> None:
        options = ("--selector", "teal", "--keep", "threshold", "--calibration", TOKENS, "--layers")
        found = self._json(olmoe_tiny, *options)
        assert found["kl"] > self._json(olmoe_tiny)["kl"]
        assert sum(layer["reads"] for layer in found["layers"]) / 4 == pytest.approx(found["reads"])

    def test_in_words(self, olmoe_augmented: Path) -> None:
        ran = mreader("eval", olmoe_augmented, *self.OPTIONS)
        assert ran.code == 0, ran.err
        for words in ("first difference", "identical", "repetition", "KL(dense || reader)", "reads"):
            assert words in ran.out
