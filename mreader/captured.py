"""A decode step as one CUDA graph: the forward pass of one token a sequence, on a cache of fixed size.

A step of an uncaptured model is bound by the host, which launches some thousand kernels for it; a graph is one launch.
Compiled layers (compiled.py) make those kernels few.
"""

# N sequences, T tokens of a prompt, V vocabulary, L tokens of the cache, g key heads, D their size

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import LinearAttentionLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer

from mreader.backend import current, runs_kernels
from mreader.compiled import CompiledLayers, why_not_compiled
from mreader.errors import UnsupportedError, UsageError
from mreader.experts import kernels_know
from mreader.runtime import Mode, experts_modules, phase, reader_mode

# Implementations of attention that take a mask of fixed size; the others unpad on the host, or compile.
_ATTENTION = ("sdpa", "eager")
# Rotary embeddings whose frequencies depend on the longest position so far.
_MOVING_ROPE = {"dynamic", "longrope"}
_WARM_UP_STEPS = 3
# Lengths of a cache: a layer is compiled for each of them. Attention reads all of it, which is little up to the last.
_FIRST_LENGTH, _LAST_DOUBLED = 256, 4096

CustomGenerate = Callable[..., Tensor]
"""What transformers' `generate` takes as `custom_generate`."""


def why_not_static(model: PreTrainedModel) -> str | None:
    """Why the model cannot decode on a cache of fixed size; None where it can."""
    if not model._supports_default_dynamic_cache():
        return "it has a cache of its own"
    try:
        layers = _static_layers(model, 1, torch.zeros((), dtype=torch.int64))
    except KeyError as error:  # transformers looks the types of layers up
        return f"its cache has layers of {error.args[0]}, of no fixed size"
    others = {type(layer).__name__ for layer in layers if type(layer) not in (_FixedLayer, LinearAttentionLayer)}
    if others:
        return f"its cache has {', '.join(sorted(others))}, of no fixed size"
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        return f"its attention is {attention}, not {' or '.join(_ATTENTION)}"
    if moving := _rope_types(model) & _MOVING_ROPE:
        return f"its {', '.join(sorted(moving))} rotary embedding looks at positions on the host"
    if runs_kernels(model.device) and not all(kernels_know(module) for _, module in experts_modules(model)):
        return "the kernels do not know its experts' biases or activation"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        return f"it is spread over {', '.join(sorted(devices))}"
    return None


class _FixedLayer(StaticLayer):  # type: ignore[misc]
    """transformers' static layer of a cache, but for its length: one tensor of all layers, which the step counts.

    keys, values: (N, g, L, D)
    """

    def __init__(self, max_cache_len: int, length: Tensor) -> None:
        super().__init__(max_cache_len)
        self.cumulative_length = length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write T new tokens (N, g, T, D) behind those that are there; all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        where = self.cumulative_length + torch.arange(key_states.shape[-2], device=key_states.device)
        self.keys.index_copy_(2, where, key_states)
        self.values.index_copy_(2, where, value_states)
        return self.keys, self.values


class CapturedStep:
    """Prefill as always, then steps of one token a sequence, replayed from a CUDA graph; on a CPU, plain forwards.

    The graph holds the budget, the mode and the tuning in force when it was captured. One at a time decodes: `prefill`
    starts all over. Compiled layers give the same logits but for rounding.

    batch:      N, of sequences that are equally long
    max_length: tokens of a sequence, prompt included
    mode:       "decode" reads sparsely, where that is faster at this batch; "never" is dense
    compiled:   whether the layers are compiled: some ten seconds the first time, less with torch's cache on disk. The
                step then holds a copy of the attention's q, k and v weights, as they are when it is made
    note:       told why they are not compiled all the same

    Raises UnsupportedError where `why_not_static` gives a reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        max_length: int,
        mode: Mode = "decode",
        *,
        compiled: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        if reason := why_not_static(model):
            raise UnsupportedError(f"no step of {type(model).__name__} is captured: {reason}", "use model.generate")
        self.model, self.mode, self.max_length = model, mode, max_length
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.position = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self.cache = Cache(layers=_static_layers(model, _cache_length(max_length), self.position.view(())))
        self._length = 0
        self._cache_name = _cache_name(model)
        self._compiled = self._compile(note) if compiled else None
        self._replay = self._capture() if model.device.type == "cuda" else self._decode

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        """Logits (N, V) after the prompts `ids` (N, T), which no padding makes equally long."""
        self._take(ids, of=0)
        return self._prompt(ids)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits (N, V) after one more token each, (N, 1). On a GPU the next step writes into the same memory."""
        if self._length == 0:
            raise UsageError("a step without a prompt before it", "call prefill first")
        if tokens.shape[1:] != (1,):
            raise UsageError(f"tokens of shape {tuple(tokens.shape)} for a step", "give (N, 1)")
        self._take(tokens, of=self._length)
        self.tokens.copy_(tokens)
        return self._replay()

    def _take(self, ids: Tensor, of: int) -> None:
        """Count tokens on the host: a device that writes behind its cache stops the process."""
        batch, length = len(self.tokens), of + ids.shape[1]
        if len(ids) != batch:
            raise UsageError(f"{len(ids)} sequences for a step made for {batch}", "make one for each batch size")
        if length > self.max_length:
            raise UsageError(f"{length} tokens do not fit a step made for {self.max_length}", "raise max_length")
        self._length = length

    def _prompt(self, ids: Tensor) -> Tensor:
        self.cache.reset()
        self.position.zero_()
        logits = self._forward(ids, torch.arange(ids.shape[1], device=ids.device).unsqueeze(0), decoding=False)
        self.position.fill_(ids.shape[1])
        return logits

    def _decode(self) -> Tensor:
        with self._layers():
            logits = self._forward(self.tokens, self.position, decoding=True)
        self.position.add_(1)
        return logits

    def _layers(self) -> AbstractContextManager[None]:
        return nullcontext() if self._compiled is None else self._compiled.in_force()

    @torch.inference_mode()
    def _compile(self, note: Callable[[str], None]) -> CompiledLayers | None:
        """The layers compiled, for the cache that a prompt makes; None where that fails, which `note` is told."""
        reason = why_not_compiled(self.model.device)
        if reason is None:
            choosing = self.mode if self.mode != "never" and runs_kernels(self.model.device) else None
            self._compiled = CompiledLayers(self.model, self.cache, choosing=choosing)
            try:
                with current(self.model.device):
                    self._prompt(torch.zeros_like(self.tokens))
                    self._decode()
            except torch._dynamo.exc.TorchDynamoException as error:
                summary = str(error).strip().partition("\n\n")[0]
                reason = f"torch.compile failed: {' '.join(summary.split())}"
        if reason is None:
            return self._compiled
        note(f"decoding with layers that are not compiled, so more slowly: {reason}")
        return None

    def _capture(self) -> Callable[[], Tensor]:
        """A replay of `_decode` as it runs after a prompt, whose first run differs: it makes the cache."""
        prompt = torch.zeros_like(self.tokens)
        with current(self.model.device), torch.inference_mode():
            with _side_stream():
                for _ in range(_WARM_UP_STEPS):
                    self._prompt(prompt)
                    self._decode()
                self._prompt(prompt)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._decode()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _forward(self, ids: Tensor, positions: Tensor, decoding: bool) -> Tensor:
        with reader_mode(self.model, self.mode), phase(self.model, decoding=decoding):
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                return_dict=True,
                **{self._cache_name: self.cache},
            )
        logits: Tensor = output.logits[:, -1]
        return logits


def captured_generate(
    mode: Mode, streamer: BaseStreamer, *, compiled: bool = False, note: Callable[[str], None] = lambda text: None
) -> CustomGenerate:
    """For `model.generate(custom_generate=...)`: transformers' own greedy or sampling loop, over a captured step.

    The prompts must be equally long, without padding. transformers drops the streamer that `generate` is given.
    """

    @torch.inference_mode()
    def loop(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **_: Any,
    ) -> Tensor:
        step = CapturedStep(model, len(input_ids), generation_config.max_length, mode, compiled=compiled, note=note)
        padding = generation_config._pad_token_tensor
        running = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        logits = step.prefill(input_ids)
        while True:
            scores = logits_processor(input_ids, logits.float())
            tokens = _draw(scores) if generation_config.do_sample else scores.argmax(-1)
            tokens = tokens if padding is None else torch.where(running, tokens, padding)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            running &= ~stopping_criteria(input_ids, None)
            streamer.put(tokens.cpu())
            if not running.any():
                streamer.end()
                return input_ids
            logits = step.step(tokens[:, None])

    return loop


def _draw(scores: Tensor) -> Tensor:
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)


@contextmanager
def _side_stream() -> Iterator[None]:
    """Where capturing wants its warm-up: kernels compile, libraries allocate their workspaces."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _cache_length(max_length: int) -> int:
    """Tokens that the cache has room for: a power of two, or a multiple of the largest one taken."""
    if max_length > _LAST_DOUBLED:
        return -(-max_length // _LAST_DOUBLED) * _LAST_DOUBLED
    return max(1 << (max_length - 1).bit_length(), _FIRST_LENGTH)


def _static_layers(model: PreTrainedModel, max_length: int, length: Tensor) -> list[Any]:
    """Layers of transformers' static cache. A sliding window keeps all tokens: the mask alone makes it slide.

    transformers' own counts tokens on the host, and changes its steps where the window is full.
    """
    fixed = (StaticLayer, StaticSlidingWindowLayer)
    layers = StaticCache(config=model.config, max_cache_len=max_length).layers
    return [_FixedLayer(max_length, length) if type(layer) in fixed else layer for layer in layers]


def _rope_types(model: PreTrainedModel) -> set[str]:
    """Of all layers: a config has one rotary embedding, or one a type of layer."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return {
        entry.get("rope_type", "default") for entry in (parameters, *parameters.values()) if isinstance(entry, dict)
    }


def _cache_name(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: `past_key_values` up to transformers 5.23 or so, then `cache`."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
