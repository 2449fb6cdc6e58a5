"""How far the reader is from the dense model: every token of every window through both.

N windows, T tokens of a window, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mreader.errors import SourceError, UsageError
from mreader.progress import Progress
from mreader.runtime import reader_mode, runtime_of

_TOKENS_AT_ONCE = 4096
LOGITS_AT_ONCE = 1 << 27  # numbers, of float32


@dataclass(frozen=True)
class Evaluation:
    """Means over all tokens, in nats.

    kl:        KL(dense || reader) of the next-token distributions
    top1:      fraction of tokens whose most likely next token is the dense model's
    nll_dense: next-token loss of the dense model
    nll:       next-token loss of the reader
    reads:     fraction of the routed experts' weights that a token reads, in 32-byte sectors
    k:         channels computed exactly, of K * I
    """

    kl: float
    top1: float
    nll_dense: float
    nll: float
    reads: float
    k: int


def read_tokens(path: Path) -> Tensor:
    """The token ids of a .npy file: one dimension, any integer dtype."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no .npy file of token ids: {error}", "save them with numpy.save") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UsageError(f"{path} holds {tokens.dtype} of shape {tokens.shape}", "one dimension of integers is needed")
    return torch.from_numpy(tokens.astype(np.int64))


def read_text(path: Path, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The token ids of a text file, or of all Python and text files below a folder, in order of name."""
    files = [path] if path.is_file() else sorted(f for s in ("*.py", "*.txt", "*.md") for f in path.rglob(s))
    if not files:
        raise UsageError(f"{path} holds no text", "name a text file, or a folder of .py, .txt or .md files")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    # Not verbose: it would warn of texts longer than the model's context, and they are cut into windows.
    tokens = [token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]]
    return torch.tensor(tokens, dtype=torch.int64)


def read_ids(path: Path, model: Path) -> Tensor:
    """The token ids of a .npy file, or of text by the tokenizer in the folder of a model."""
    if path.suffix == ".npy":
        return read_tokens(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist", "name a .npy file, a text file, or a folder of .py, .txt or .md")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise SourceError(f"{model} has no tokenizer", "give token ids as a .npy file") from error
    return read_text(path, tokenizer)


def cut_windows(tokens: Tensor, windows: int, length: int) -> Tensor:
    """The first `windows` windows of `length` tokens, (N, T); UsageError where there are fewer."""
    if windows < 1 or length < 2:
        raise UsageError(f"{windows} windows of {length} tokens", "at least one window of two tokens is needed")
    if len(tokens) < windows * length:
        raise UsageError(
            f"{windows} windows of {length} need {windows * length:,} tokens, there are {len(tokens):,}",
            "ask for fewer or shorter windows",
        )
    return tokens[: windows * length].view(windows, length)


@torch.inference_mode()
def evaluate(model: PreTrainedModel, windows: Tensor, progress: Progress | None = None) -> Evaluation:
    """Compare the reader, under the model's budget, with the dense model.

    windows: (N, T) int64 - token ids; the first token of a window has no context but itself
    """
    progress = progress or Progress()
    progress.begin("evaluating", windows.numel(), "tokens")
    refuse_unknown_tokens(model, windows)
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in window_batches(windows, vocabulary_of(model)):
        batch = batch.to(model.device)
        dense, sparse = (_logits(model, batch, mode) for mode in ("never", "always"))
        sums += compare_windows(dense, sparse, batch).sum(0)
        progress.advance(batch.numel())
    kl, agreed, nll_dense, nll = sums.tolist()
    runtime, predicted = runtime_of(model), windows.shape[0] * (windows.shape[1] - 1)
    return Evaluation(
        kl / windows.numel(),
        agreed / windows.numel(),
        nll_dense / predicted,
        nll / predicted,
        runtime.reads.total,
        runtime.settings.k,
    )


def refuse_unknown_tokens(model: PreTrainedModel, windows: Tensor) -> None:
    """UsageError where a token id is outside the model's vocabulary."""
    vocabulary = vocabulary_of(model)
    for token in (int(windows.min()), int(windows.max())):
        if not 0 <= token < vocabulary:
            raise UsageError(f"token id {token} is outside the vocabulary of {vocabulary}", "use its tokenizer")


def vocabulary_of(model: PreTrainedModel) -> int:
    """V, the number of tokens that the model has embeddings for."""
    return int(model.get_input_embeddings().num_embeddings)


def window_batches(windows: Tensor, vocabulary: int) -> Iterator[Tensor]:
    """So many windows at a time that their tokens, and their logits, fit."""
    at_once = max(1, min(_TOKENS_AT_ONCE, LOGITS_AT_ONCE // vocabulary) // windows.shape[1])
    for start in range(0, len(windows), at_once):
        yield windows[start : start + at_once]


def _logits(model: PreTrainedModel, ids: Tensor, mode: Any) -> Tensor:
    with reader_mode(model, mode):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def compare_windows(dense: Tensor, sparse: Tensor, ids: Tensor) -> Tensor:
    """(N, 4) float64 on the CPU: of each window the sums of KL, agreements, loss of the dense model and of the other.

    dense, sparse: (N, T, V) - logits
    ids:           (N, T) int64
    """
    return torch.stack([_compare(d, s, i) for d, s, i in zip(dense, sparse, ids, strict=True)])


def _compare(dense: Tensor, sparse: Tensor, ids: Tensor) -> Tensor:
    p, q = log_softmax(dense.float(), -1), log_softmax(sparse.float(), -1)
    return (
        torch.stack(
            [
                kl_div(q, p, log_target=True, reduction="sum"),
                (p.argmax(-1) == q.argmax(-1)).sum().float(),
                cross_entropy(dense[:-1].float(), ids[1:], reduction="sum"),
                cross_entropy(sparse[:-1].float(), ids[1:], reduction="sum"),
            ]
        )
        .double()
        .cpu()
    )
