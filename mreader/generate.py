"""Text from an augmented checkpoint, token by token."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from mreader.captured import CustomGenerate, captured_generate, why_not_static
from mreader.errors import UsageError
from mreader.runtime import Mode, reader_mode, runtime_of


@dataclass(frozen=True)
class Sampling:
    """temperature 0 takes the most likely token; otherwise tokens are drawn with `seed`, from the nucleus `top_p`."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens is {self.max_new_tokens}", "choose 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature is {self.temperature}", "choose 0 (most likely token) or more")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed}", "choose 0 to 2**64 - 1")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p}", "choose a fraction above 0, at most 1")

    def arguments(self) -> dict[str, Any]:
        """For transformers' `generate`."""
        if self.temperature == 0:
            # Set as well: a checkpoint's own generation config may ask for sampling
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}


@dataclass(frozen=True)
class Generation:
    """What was generated, and at what cost.

    text:         the new text
    tokens:       number of new tokens
    tokens_per_s: new tokens after the first over the seconds they took, decode steps only; None where there was one
    k, reads:     channels computed exactly in a layer, fraction of the routed experts' weights read; dense: all of them
    bytes_per_token: bytes read of all routed layers
    """

    text: str
    tokens: int
    tokens_per_s: float | None
    k: int
    reads: float
    bytes_per_token: int


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Passes text on as it becomes whole, and notes when tokens come."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._emit = emit
        self.pieces: list[str] = []
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self._emit(text)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> Tensor:
    """Token ids (1, T) of a prompt, put into the tokenizer's chat template where `chat` is set."""
    if chat:
        if tokenizer.chat_template is None:
            raise UsageError("this checkpoint has no chat template", "leave --chat out")
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    if ids.numel() == 0:
        raise UsageError("the prompt is empty", "give --prompt some text, or pipe it in")
    return ids


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    sampling: Sampling,
    *,
    mode: Mode = "decode",
    compiled: bool = True,
    emit: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
) -> Generation:
    """Continue the prompt `ids` (1, T), passing text to `emit` as it comes. On a GPU, steps are captured in a graph.

    mode:     "decode" reads sparsely in decode steps, "never" is the dense model
    compiled: whether captured steps have compiled layers: slower to start, faster after that
    note:     told why steps are not captured or their layers not compiled, where that cannot be

    Raises UsageError where prompt and new tokens are more than the model has positions for.
    """
    _refuse_too_long(model, ids.shape[1], sampling.max_new_tokens)
    torch.manual_seed(sampling.seed)
    streamer = _Streamer(tokenizer, emit)
    with reader_mode(model, mode):
        model.generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids, device=model.device),
            max_new_tokens=sampling.max_new_tokens,
            streamer=streamer,
            custom_generate=_decoding_loop(model, mode, streamer, compiled, note),
            **sampling.arguments(),
        )
    return _report(model, streamer, mode)


def _refuse_too_long(model: PreTrainedModel, prompt: int, new: int) -> None:
    """By max_position_embeddings of config.json, if it is there: what follows beyond it is garbage in most models."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < prompt + new:
        raise UsageError(
            f"tokens of the prompt and new ones, {prompt} + {new}, are more than max_position_embeddings, {limit}",
            "give fewer --max-new-tokens or a shorter prompt",
        )


def _decoding_loop(
    model: PreTrainedModel, mode: Mode, streamer: _Streamer, compiled: bool, note: Callable[[str], None]
) -> CustomGenerate | None:
    """Over captured steps on a GPU, None for transformers' own."""
    if model.device.type != "cuda":
        return None
    if reason := why_not_static(model):
        note(f"decoding without a CUDA graph, so more slowly: {reason}")
        return None
    return captured_generate(mode, streamer, compiled=compiled, note=note)


def _report(model: PreTrainedModel, streamer: _Streamer, mode: Mode) -> Generation:
    runtime, times = runtime_of(model), streamer.times
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    if mode == "never":
        k, fraction, layer_bytes = runtime.shape.candidates, 1.0, runtime.shape.native_bytes
    else:
        k, fraction, layer_bytes = runtime.settings.k, runtime.reads.total, runtime.reads.bytes
    return Generation("".join(streamer.pieces), len(times), speed, k, fraction, layer_bytes * runtime.layers)
