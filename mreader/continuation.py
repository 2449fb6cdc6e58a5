"""How far the reader's own text gets from the dense model's: both continue the same prompts, token by token."""

# B prompts, T tokens of a prompt, N tokens of a continuation, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from mreader.errors import UsageError
from mreader.evaluate import LOGITS_AT_ONCE, refuse_unknown_tokens, vocabulary_of
from mreader.progress import Progress

NGRAM = 4  # tokens, whose second occurrence is a repetition
_PROMPTS_AT_ONCE = 16  # on a GPU the runtime takes dense for larger batches

Within = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Divergence:
    """Means over prompts. A continuation takes the most likely token each time, N times, whatever would end a text.

    Its first token comes from the prefill, which is dense in both; what follows are N - 1 decode steps.

    kl, top1:         KL(dense || sparse) in nats, and agreement of the most likely token, of a step along the dense
                      continuation
    first_difference: tokens before the first one that differs between both continuations, N where none does
    identical:        fraction of prompts that both continue alike
    repetition_dense: fraction of the 4-grams of the dense continuation that occurred in it before
    repetition:       the same of the sparse one
    kl_steps:         KL of each step
    """

    kl: float
    top1: float
    first_difference: float
    identical: float
    repetition_dense: float
    repetition: float
    kl_steps: tuple[float, ...]


@torch.inference_mode()
def compare_continuations(
    model: PreTrainedModel,
    dense: Within,
    sparse: Within,
    prompts: Tensor,
    tokens: int,
    progress: Progress | None = None,
) -> Divergence:
    """Continue every prompt three times: dense, sparse along the dense continuation, and sparse on its own.

    dense, sparse: within them the decode steps of the model are the one or the other
    prompts:       (B, T) int64
    tokens:        N, at least 2

    Raises UsageError for fewer, and for token ids outside the vocabulary.
    """
    if tokens < 2:
        raise UsageError(f"{tokens} tokens to generate", "at least 2 are needed: the first one is the prefill's")
    refuse_unknown_tokens(model, prompts)
    progress = progress or Progress()
    progress.begin("generating", 3 * len(prompts) * tokens, "tokens")
    parts = []
    with _bare_generation(model):
        for batch in _batches(prompts, tokens, vocabulary_of(model)):
            heard = _Listener()
            with dense():
                ahead = _continue(model, batch, tokens, heard)
            progress.advance(ahead.numel())
            follower = _Follower(ahead, heard.logits)
            with sparse():
                _continue(model, batch, tokens, follower)
                progress.advance(ahead.numel())
                own = _continue(model, batch, tokens)
            progress.advance(ahead.numel())
            parts.append((ahead, own, torch.stack(follower.kl, 1), torch.stack(follower.agreed, 1)))
    return _summary(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))


@contextmanager
def _bare_generation(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, the checkpoint's own generation config, which may ask for beams or penalties, says nothing.

    One that is passed to `generate` would not do: what it leaves open comes from the model's.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _Listener(LogitsProcessor):  # type: ignore[misc]
    """Keeps the logits of every step, (B, V)."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.clone())
        return scores


class _Follower(LogitsProcessor):  # type: ignore[misc]
    """Makes generation take the tokens of `ahead`, (B, N), and compares its logits with those of the dense model."""

    def __init__(self, ahead: Tensor, dense: list[Tensor]) -> None:
        self._ahead, self._dense = ahead, dense
        self.kl: list[Tensor] = []
        self.agreed: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = len(self.kl)
        p, q = log_softmax(self._dense[step].float(), -1), log_softmax(scores.float(), -1)
        self.kl.append(kl_div(q, p, log_target=True, reduction="none").sum(-1))
        self.agreed.append(p.argmax(-1) == q.argmax(-1))
        return torch.full_like(scores, -torch.inf).scatter(1, self._ahead[:, step : step + 1], 0.0)


def _continue(model: PreTrainedModel, prompts: Tensor, tokens: int, listener: LogitsProcessor | None = None) -> Tensor:
    """The N most likely tokens after each prompt, (B, N)."""
    prompts = prompts.to(model.device)
    out: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        logits_processor=LogitsProcessorList([listener] if listener else []),
        max_new_tokens=tokens,
        **{"do_sample": False, "eos_token_id": vocabulary_of(model), "pad_token_id": 0},  # nothing ends it
    )
    return out[:, prompts.shape[1] :]


def _batches(prompts: Tensor, tokens: int, vocabulary: int) -> Iterator[Tensor]:
    """So many prompts at a time that the logits of their continuations fit."""
    at_once = min(max(1, LOGITS_AT_ONCE // (tokens * vocabulary)), _PROMPTS_AT_ONCE)
    for start in range(0, len(prompts), at_once):
        yield prompts[start : start + at_once]


def _summary(dense: Tensor, sparse: Tensor, kl: Tensor, agreed: Tensor) -> Divergence:
    """dense, sparse: (B, N) tokens; kl, agreed: (B, N), the step of the prefill included."""
    common = (dense == sparse).long().cumprod(1).sum(1)
    return Divergence(
        float(kl[:, 1:].double().mean()),
        float(agreed[:, 1:].double().mean()),
        float(common.double().mean()),
        float((common == dense.shape[1]).double().mean()),
        _mean_repetition(dense),
        _mean_repetition(sparse),
        tuple(kl[:, 1:].double().mean(0).tolist()),
    )


def _mean_repetition(continuations: Tensor) -> float:
    return sum(map(repetition, continuations.tolist())) / len(continuations)


def repetition(tokens: list[int]) -> float:
    """1 - distinct n-grams / n-grams, n = 4; 0 where there is none.

    Source: rep-n of Welleck et al., "Neural Text Generation with Unlikelihood Training", 2020.
    """
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
