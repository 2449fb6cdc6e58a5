"""Which tokens of a step are decoded: vLLM batches decode steps and pieces of prompts together."""

# T rows of a step, R requests

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a step that mixes both, by number: gathering by numbers does not wait for the GPU, by a mask it does.

    decoded: (n,) int64
    others:  (T - n,) int64 - of prompts, and padding
    """

    decoded: Tensor
    others: Tensor


def only_decodes(attention: Any) -> bool:
    """Whether every request of a step brings one token, so that all rows are decoded, padding included.

    attention: `attn_metadata` of vLLM's forward context, None while it warms up
    """
    step = _of_full_attention(attention)
    return step is not None and step.max_query_len == 1


def split_rows(attention: Any, rows: int) -> Rows | None:
    """Which rows decode: those of requests that bring one token. None where none does.

    attention: `attn_metadata` of vLLM's forward context, None while it warms up
    rows:      T, of which those behind the last request's are padding

    A prompt, or the rest of one, that is a single token counts as decoded: vLLM's metadata do not tell it apart. Waits
    for the GPU, so a graph cannot hold a call.
    """
    step = _of_full_attention(attention)
    if step is None:
        return None
    lengths = step.query_start_loc.diff()
    single = (lengths == 1).repeat_interleave(lengths)
    single = torch.nn.functional.pad(single, (0, rows - len(single)))
    decoded = single.nonzero().flatten()
    return Rows(decoded, (~single).nonzero().flatten()) if len(decoded) else None


def _of_full_attention(attention: Any) -> Any:
    """The metadata of a layer that says where each request's tokens begin; None where no layer does."""
    layers = attention.values() if isinstance(attention, Mapping) else ()
    return next((step for step in layers if hasattr(step, "max_query_len") and hasattr(step, "query_start_loc")), None)
