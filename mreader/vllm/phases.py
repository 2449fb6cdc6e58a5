"""Which tokens of a step are decoded: vLLM batches decode steps and pieces of prompts together."""

# T rows of a step, R requests

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def decoding_rows(attention: Any, rows: int) -> Tensor | bool:
    """The rows that decode: those of requests that bring one token. True for all of them, False for none.

    attention: `attn_metadata` of vLLM's forward context, None while it warms up
    rows:      T, of which those behind the last request's are padding
    returns:   (T,) bool on the device of the metadata where a step mixes the two

    A prompt, or the rest of one, that is a single token counts as decoded: vLLM's metadata do not tell it apart.
    """
    step = _of_full_attention(attention)
    if step is None:
        return False
    if step.max_query_len == 1:
        return True
    lengths = step.query_start_loc.diff()
    single = (lengths == 1).repeat_interleave(lengths)
    if not single.any():
        return False
    return torch.nn.functional.pad(single, (0, rows - len(single)))


def _of_full_attention(attention: Any) -> Any:
    """The metadata of a layer that says where each request's tokens begin; None where no layer does."""
    layers = attention.values() if isinstance(attention, Mapping) else ()
    return next((step for step in layers if hasattr(step, "max_query_len") and hasattr(step, "query_start_loc")), None)
