"""Augmented checkpoints in transformers: loading, and decode steps through the reader.

`import mreader` registers a quantizer (quantizer.py), chosen by `quantization_config` of config.json.
`AutoModelForCausalLM.from_pretrained` and `model.generate` then work as always: prefill stays dense, on the same
weights, and a step of query length 1 on a cache reads only the channels that matter.
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert, r stored rank

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mreader.activations import get_activation
from mreader.budget import BlockShape, Budget, Layout, Reads, count_reads
from mreader.errors import SourceError, UsageError
from mreader.experts import expect_layer, experts_forward, is_biased, layout_of, view_as_stock
from mreader.formats.architectures import known_model_types, predicting_layers, routed_part, routing
from mreader.formats.augmented import METHOD, FormatOptions, open_augmented
from mreader.formats.safetensors_file import read_header
from mreader.reader import ReadSettings

Mode = Literal["decode", "always", "never"]
_WHERE_AND_AS_WHOM = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "subfolder",
    "force_download",
    "code_revision",
)


# What a thread is doing with which runtime, by its id: threads may share a model. Values are never changed in place.
_decoding: ContextVar[frozenset[int]] = ContextVar("mreader_decoding", default=frozenset())
_phases: ContextVar[dict[int, bool]] = ContextVar("mreader_phases", default={})  # noqa: B039
_modes: ContextVar[dict[int, Mode]] = ContextVar("mreader_modes", default={})  # noqa: B039
_budgets: ContextVar[dict[int, Budget]] = ContextVar("mreader_budgets", default={})  # noqa: B039


@dataclass
class Runtime:
    """What all routed layers of a loaded model share.

    stored:  a layer in the layout on disk
    layers:  how many there are
    default: the budget outside of `reader_budget`; `set_budget` changes it
    experts: the first one's module, which tells on what device the model is
    """

    stored: BlockShape
    layers: int
    default: Budget
    experts: Any = field(repr=False)

    @property
    def shape(self) -> BlockShape:
        """A layer in the layout that the model's device reads."""
        return _laid_out(self.stored, layout_of(self.experts))

    @property
    def budget(self) -> Budget:
        """How much a decode step reads: the model's budget, or what `reader_budget` says in this thread."""
        return _budgets.get().get(id(self), self.default)

    @property
    def settings(self) -> ReadSettings:
        """What the budget means there. UsageError for reads that the device's layout of the sketch alone exceeds."""
        return _resolve(self.budget, self.shape)

    @property
    def mode(self) -> Mode:
        """Which calls go through the reader: decode steps, or what `reader_mode` says in this thread."""
        return _modes.get().get(id(self), "decode")

    @property
    def decoding(self) -> bool:
        """Whether this thread is in a decode step of the model."""
        return _phases.get().get(id(self), id(self) in _decoding.get())

    @property
    def reads(self) -> Reads:
        """What a token costs in one layer."""
        settings = self.settings
        return count_reads(self.shape, settings.k, settings.coordinates, settings.score, settings.rank)


@dataclass(frozen=True)
class Expected:
    """What a model must hold once its checkpoint is loaded.

    tensors:      name -> shape and dtype
    element_size: bytes of a routed expert's weight as stored: reads are the checkpoint's, whatever dtype it runs in
    """

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    element_size: int


def expect_format(model: PreTrainedModel, options: FormatOptions, files: list[Path]) -> Expected:
    """Give the routed experts of an empty model parameters in the format's shapes and dtypes, on the meta device."""
    experts = [module for _, module in experts_modules(model)]
    if not experts:
        raise SourceError(
            f"{type(model).__name__} has no routed experts behind the experts interface of transformers",
            "load the checkpoint's own model class, or upgrade transformers",
        )
    for module in experts:
        expect_layer(module, options)
    _raise_on_missing_tensors(model)
    tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    return Expected(tensors, _stored_element_size(files))


def attach(model: PreTrainedModel, options: FormatOptions, expected: Expected) -> None:
    """Make a loaded model read sparsely; its experts keep their stock parameters."""
    for name, parameter in model.state_dict(keep_vars=True).items():
        shape, dtype = expected.tensors[name]
        if parameter.shape != shape:
            raise SourceError(
                f"tensor {name} is {list(parameter.shape)}, not {list(shape)}", "convert the source again"
            )
        # transformers 5.17 skips the requested dtype for tensors that it renames
        parameter.data = parameter.data.to(dtype)
    runtime = _make_runtime(model, options, expected.element_size)
    dense = model.config.get_text_config()._experts_implementation
    for _, module in experts_modules(model):
        view_as_stock(module, options)
        module.mreader, module.mreader_dense = runtime, dense
    if METHOD not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(METHOD, experts_forward)
    text_part(model).set_experts_implementation(METHOD)
    _watch_decoding(model, runtime)
    model.mreader = text_part(model).mreader = runtime


def load(
    path: str | Path, *, dtype: str | torch.dtype = "auto", device: str = "auto", **kwargs: Any
) -> PreTrainedModel:
    """The model of an augmented checkpoint, ready to decode sparsely.

    path:   folder or Hub id
    dtype:  of the weights; "auto" as stored
    device: "auto" (CUDA where there is one), "cpu" or "cuda:N"
    kwargs: for transformers' `from_pretrained` (`revision`, `token`, `attn_implementation`, ...)

    Raises what `open_augmented` raises for a folder, and SourceError where there is neither a folder nor a Hub id.
    """
    from mreader.convert import is_repo_id
    from mreader.device import pick_device

    if Path(path).exists() or not is_repo_id(str(path)):
        open_augmented(Path(path))
    model = auto_class(path, **kwargs).from_pretrained(path, dtype=dtype, **kwargs)
    loaded: PreTrainedModel = model.to(pick_device(device)).eval()
    return loaded


def auto_class(path: str | Path, **kwargs: Any) -> Any:
    """The first of transformers' auto classes that has the checkpoint's model: of a multimodal one some are in all.

    Raises SourceError for a value of config.json that the model's config does not take.
    """
    hub = {key: kwargs[key] for key in _WHERE_AND_AS_WHOM if key in kwargs}
    try:
        config = type(AutoConfig.from_pretrained(path, **hub))
    except StrictDataclassError as error:
        raise SourceError(
            f"config.json of {path}: {' '.join(str(error).split())}", "take the config.json that belongs to the weights"
        ) from error
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next((auto for auto in classes if config in auto._model_mapping), AutoModelForCausalLM)


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a loaded model. UsageError where it was not loaded from an augmented checkpoint."""
    runtime = getattr(model, "mreader", None)
    if not isinstance(runtime, Runtime):
        raise UsageError("this model was not loaded from an augmented checkpoint", "convert it first")
    return runtime


def set_budget(
    model: nn.Module,
    *,
    channels: float | None = None,
    reads: float | None = None,
    coordinates: int | None = None,
    score: str | None = None,
    rank: int | None = None,
) -> ReadSettings:
    """Change how much a decode step of the model reads, in every thread but within a `reader_budget`; what is not given
    stays as it is. Returns the settings that it means.

    channels:    fraction f of the K * I candidate channels: k = round(f * K * I)
    reads:       fraction of the dense reads instead: k is the largest whose counted reads do not exceed it
    coordinates: coordinates read of each rotation block, 1..128
    score:       "norm", "rho" or "variance"
    rank:        columns of the recovery map in use, 0..r

    Raises UsageError for both of channels and reads, for a value out of range, and for reads that sketch and recovery
    alone exceed, naming the least possible.
    """
    runtime = runtime_of(model)
    budget = runtime.default.change(channels=channels, reads=reads, coordinates=coordinates, score=score, rank=rank)
    settings = budget.resolve(runtime.shape)
    runtime.default = budget
    return settings


@contextmanager
def reader_budget(
    model: nn.Module,
    *,
    channels: float | None = None,
    reads: float | None = None,
    coordinates: int | None = None,
    score: str | None = None,
    rank: int | None = None,
) -> Iterator[ReadSettings]:
    """Within the block, how much a decode step of this thread reads; what is not given is as it was before the block.

    For threads that share a model: one that is started within the block is not in it, and what `set_budget` changes
    meanwhile does not reach it. Arguments and errors are those of `set_budget`.
    """
    runtime = runtime_of(model)
    budget = runtime.budget.change(channels=channels, reads=reads, coordinates=coordinates, score=score, rank=rank)
    settings = budget.resolve(runtime.shape)
    token = _budgets.set({**_budgets.get(), id(runtime): budget})
    try:
        yield settings
    finally:
        _budgets.reset(token)


@contextmanager
def reader_mode(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Within the block, which calls go through the reader: "decode" steps, "always" every token, or "never"."""
    token = _modes.set({**_modes.get(), id(runtime_of(model)): mode})
    try:
        yield
    finally:
        _modes.reset(token)


@contextmanager
def phase(model: nn.Module, *, decoding: bool) -> Iterator[None]:
    """Within the block, every forward pass is a decode step, or none is, whatever its cache holds."""
    token = _phases.set({**_phases.get(), id(runtime_of(model)): decoding})
    try:
        yield
    finally:
        _phases.reset(token)


@lru_cache
def _laid_out(shape: BlockShape, layout: Layout) -> BlockShape:
    return replace(shape, layout=layout)


@lru_cache
def _resolve(budget: Budget, shape: BlockShape) -> ReadSettings:
    return budget.resolve(shape)


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """The part of the model that reads and writes text, with the format's routed experts: mostly all of it."""
    part: PreTrainedModel = model.get_submodule(_path_of_text(model))
    return part


def _path_of_text(model: PreTrainedModel) -> str:
    """Also of such a part itself, whose type is none that a checkpoint has."""
    config = model.config.to_dict()
    return routed_part(config) if config.get("model_type") in known_model_types() else ""


def experts_modules(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The modules behind transformers' experts interface, with gate and up fused."""
    within = _path_of_text(model)
    for name, module in model.named_modules():
        if within and not name.startswith(f"{within}."):
            continue
        if getattr(module, "has_gate", False) and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            yield name, module


def _make_runtime(model: PreTrainedModel, options: FormatOptions, element_size: int) -> Runtime:
    experts = [module for _, module in experts_modules(model)]
    _, _, I, H = experts[0].gate_up_proj.shape
    routed, activation = routing(model.config.to_dict())
    for module in experts:
        module.mreader_activation = get_activation(activation)
    shape = BlockShape(int(H), int(I), routed, options.rank, options.code, element_size, biased=is_biased(experts[0]))
    return Runtime(shape, len(experts), Budget.of(options), experts[0])


def _stored_element_size(files: list[Path]) -> int:
    """Bytes of a routed expert's weight, from the first shard that holds one."""
    for file in files:
        for name, spec in read_header(file).tensors.items():
            if name.endswith("experts.down_proj"):
                return spec.alignment
    raise SourceError("no tensor is named ...experts.down_proj", "download the checkpoint again")


def _raise_on_missing_tensors(model: PreTrainedModel) -> None:
    """Make missing and left-over tensors an error: transformers only warns, and fills the missing ones at random.

    `_adjust_missing_and_unexpected_keys` is where it drops the names that a model class allows to be missing or extra.
    """
    adjust = model._adjust_missing_and_unexpected_keys

    def adjust_and_check(loading_info: Any) -> None:
        adjust(loading_info)
        loading_info.unexpected_keys -= {name for name in loading_info.unexpected_keys if _predicts(model, name)}
        del model._adjust_missing_and_unexpected_keys
        faults = [f"{name} is missing" for name in sorted(loading_info.missing_keys)]
        faults += [f"{name} is unknown" for name in sorted(loading_info.unexpected_keys)]
        faults += [f"{name} is {list(is_)}, not {list(should)}" for name, is_, should in loading_info.mismatched_keys]
        if faults:
            # transformers reports what it finds in here, and its error would hide this one
            for keys in (loading_info.missing_keys, loading_info.unexpected_keys, loading_info.mismatched_keys):
                keys.clear()
            raise SourceError(f"tensor {faults[0]}", "download the checkpoint again, or convert the source again")

    model._adjust_missing_and_unexpected_keys = adjust_and_check


def _predicts(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor is of the layers after the last, which predict further tokens: transformers leaves them out."""
    numbers = re.findall(r"\.layers\.(\d+)\.", f".{name}")
    return bool(numbers) and int(numbers[0]) in predicting_layers(model.config.to_dict())


def _watch_decoding(model: PreTrainedModel, runtime: Runtime) -> None:
    """Let the runtime know when the decoder runs a decode step: its experts only see flattened tokens."""
    decoder = _decoder(model)
    decoder.mreader = runtime
    decoder.register_forward_pre_hook(_enter, with_kwargs=True)
    decoder.register_forward_hook(_leave, always_call=True)


# The hooks find the runtime through the module, so that they are right in a copy of the model, and can be pickled.
def _enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if id(module.mreader) in _phases.get():
        return
    bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
    if _is_decode_step({**bound.pop("kwargs", {}), **bound}):
        _decoding.set(_decoding.get() | {id(module.mreader)})


def _leave(module: Any, *_: object) -> None:
    _decoding.set(_decoding.get() - {id(module.mreader)})


def _decoder(model: PreTrainedModel) -> Any:
    """The innermost transformers model that holds every routed layer."""
    names = [name for name, _ in experts_modules(model)]
    holders: list[tuple[str, nn.Module]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and all(n.startswith(f"{name}." if name else "") for n in names)
    ]
    return max(holders, key=lambda holder: len(holder[0]))[1]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """All layers of the decoder, also those without routed experts."""
    path = next(name for name, _ in experts_modules(model)).split(".")
    holders = (model.get_submodule(".".join(path[:depth])) for depth in range(len(path)))
    return list(next(holder for holder in holders if isinstance(holder, nn.ModuleList)))


def _is_decode_step(arguments: Mapping[str, Any]) -> bool:
    """Query length 1 on a cache that holds something."""
    tokens = arguments.get("inputs_embeds")
    tokens = tokens if tokens is not None else arguments.get("input_ids")
    cache = arguments.get("past_key_values")  # transformers up to 5.23 or so
    cache = cache if cache is not None else arguments.get("cache")
    if tokens is None or cache is None or tokens.shape[1] != 1:
        return False
    length = cache.get_seq_length()
    # A static cache counts on the device: asking it would wait for the device, and it is filled by prefill in practice.
    return True if isinstance(length, Tensor) else length > 0
