"""Launch parameters of the kernels: data of tuning.toml beside this file, and of a user's own file over it.

The entry of the running GPU with the nearest shape, and in it the nearest batch; the default for an unknown GPU.
"""

# E experts, K routed experts of a token, H hidden size, I channels of an expert

import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mreader.errors import UsageError

Parameters = dict[str, int]
"""Of one kernel: name -> value."""

_SHIPPED = Path(__file__).with_name("tuning.toml")
_trial: ContextVar[Mapping[str, Parameters]] = ContextVar("mreader_tuning_trial")


@dataclass(frozen=True)
class LayerShape:
    """A routed layer as its kernels see it: E, K, H and I."""

    experts: int
    routed: int
    hidden: int
    channels: int

    @property
    def weights(self) -> int:
        """3 * K * H * I: the weights of a token's dense read, by which shapes are near each other."""
        return 3 * self.routed * self.hidden * self.channels


@dataclass(frozen=True)
class Measured:
    """What was found for one shape on one GPU.

    device:       the name that torch has for the GPU
    sparse_up_to: largest batch at which the sparse block is no slower than the dense one, or None where not measured
    batches:      batch -> kernel -> parameters
    """

    device: str
    shape: LayerShape
    sparse_up_to: int | None
    batches: Mapping[int, Mapping[str, Parameters]]

    def over(self, other: "Measured") -> "Measured":
        """This entry, with what it does not say taken from `other`."""
        batches = {
            batch: {**other.batches.get(batch, {}), **self.batches.get(batch, {})}
            for batch in sorted({*other.batches, *self.batches})
        }
        sparse_up_to = other.sparse_up_to if self.sparse_up_to is None else self.sparse_up_to
        return replace(self, sparse_up_to=sparse_up_to, batches=batches)


@dataclass(frozen=True)
class Tuning:
    """All that is known.

    default:      kernel -> parameters, for a GPU without an entry
    sparse_up_to: the same of the largest sparse batch
    candidates:   kernel -> name -> values that `mreader tune` tries
    measured:     one entry a GPU and shape
    """

    default: Mapping[str, Parameters]
    sparse_up_to: int
    candidates: Mapping[str, Mapping[str, list[int]]]
    measured: tuple[Measured, ...]

    def parameters(self, kernel: str, device: str, shape: LayerShape, batch: int) -> Parameters:
        """The kernel's parameters; none where there is neither an entry nor a default, and the kernel decides."""
        default = self.default.get(kernel, {})
        known = [m for m in self._of(device) if any(kernel in kernels for kernels in m.batches.values())]
        if not known:
            return dict(default)
        batches = _nearest_shape(known, shape).batches
        nearest = min((b for b in batches if kernel in batches[b]), key=lambda b: (_distance(b, batch), b))
        return {**default, **batches[nearest][kernel]}

    def largest_sparse_batch(self, device: str, shape: LayerShape) -> int:
        """The largest batch at which the sparse block is no slower than the dense one."""
        known = [m for m in self._of(device) if m.sparse_up_to is not None]
        found = _nearest_shape(known, shape).sparse_up_to if known else None
        return self.sparse_up_to if found is None else found

    def extended(self, entries: tuple[Measured, ...]) -> "Tuning":
        """This, with `entries` over those of the same GPU and shape."""
        return replace(self, measured=merge(self.measured, entries))

    def _of(self, device: str) -> list[Measured]:
        return [entry for entry in self.measured if entry.device == device]


def configuration(kernel: str, device_name: str, shape: LayerShape, batch: int) -> Parameters:
    """The launch parameters of a kernel: those of its default, or more; what is left out, the kernel decides.

    kernel:      "rotate", "screen", ...
    device_name: of the GPU; see `device_name`
    batch:       N tokens

    Raises UsageError where the user's file is damaged.
    """
    trial = _trial.get({})
    found = _lookup(kernel, device_name, shape, batch)
    return {**found, **trial.get(kernel, {})}


def largest_sparse_batch(device_name: str, shape: LayerShape) -> int:
    """The largest batch at which the sparse block is no slower than the dense one: beyond it the runtime takes dense.

    Raises UsageError where the user's file is damaged.
    """
    return known_tuning().largest_sparse_batch(device_name, shape)


def device_name(device: torch.device) -> str:
    """The name under which the device has its entries; "cpu" where kernels run in the interpreter."""
    return _cuda_name(device.index) if device.type == "cuda" else "cpu"


@contextmanager
def trial(parameters: Mapping[str, Parameters]) -> Iterator[None]:
    """Within the block, `configuration` answers with these parameters in place of the known ones."""
    token = _trial.set(parameters)
    try:
        yield
    finally:
        _trial.reset(token)


@lru_cache(maxsize=1)
def known_tuning() -> Tuning:
    """The shipped data with the user's over it; read once. UsageError where the user's file is damaged."""
    shipped = parse_tuning(tomllib.loads(_SHIPPED.read_text(encoding="utf-8")))
    return shipped.extended(read_measured(user_file()))


def user_file() -> Path:
    """Where `mreader tune` writes: mreader/tuning.toml in $XDG_CONFIG_HOME or ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "mreader" / "tuning.toml"


def read_measured(file: Path) -> tuple[Measured, ...]:
    """The entries of a file that `mreader tune` wrote; none where there is no file. UsageError where it is damaged."""
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}", "repair or remove it") from error
    try:
        return _parse_measured(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{file} is no tuning file: {error}", "remove it, and run `mreader tune` again") from error


def write_measured(file: Path, entries: tuple[Measured, ...]) -> None:
    """Add `entries` to a file, over those of the same GPU and shape. UsageError where that cannot be done."""
    text = "".join(map(_format_entry, merge(read_measured(file), entries)))
    half = file.with_name(f"{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        half.write_text("# Written by `mreader tune`.\n" + text, encoding="utf-8")
        half.replace(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", "choose another --out") from error
    known_tuning.cache_clear()
    _lookup.cache_clear()


def merge(below: tuple[Measured, ...], above: tuple[Measured, ...]) -> tuple[Measured, ...]:
    """One entry a GPU and shape, what `above` says over what `below` says."""
    found = {(entry.device, entry.shape): entry for entry in below}
    for entry in above:
        key = entry.device, entry.shape
        found[key] = entry.over(found[key]) if key in found else entry
    return tuple(found.values())


def parse_tuning(data: Mapping[str, Any]) -> Tuning:
    """Tuning of a parsed tuning.toml."""
    return Tuning(data["default"], data["sparse_up_to"], data["candidates"], _parse_measured(data))


def _parse_measured(data: Mapping[str, Any]) -> tuple[Measured, ...]:
    return tuple(
        Measured(
            str(entry["device"]),
            LayerShape(**{name: _number(name, size) for name, size in entry["shape"].items()}),
            _number("sparse_up_to", entry["sparse_up_to"], 0) if "sparse_up_to" in entry else None,
            {
                _number("batch", int(batch)): _parse_kernels(kernels)
                for batch, kernels in entry.get("batch", {}).items()
            },
        )
        for entry in data.get("measured", [])
    )


_MAY_BE_ZERO = ("ahead", "registers", "steps")


def _parse_kernels(kernels: Mapping[str, Any]) -> dict[str, Parameters]:
    return {
        kernel: {name: _number(f"{kernel} {name}", value, name not in _MAY_BE_ZERO) for name, value in found.items()}
        for kernel, found in kernels.items()
    }


def _number(name: str, value: object, least: int = 1) -> int:
    """The value. ValueError where it is no whole number, or less than `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} = {value!r}")
    return value


def _format_entry(entry: Measured) -> str:
    """The entry in TOML."""
    lines = ["", "[[measured]]", f"device = {json.dumps(entry.device)}", f"shape = {_inline(vars(entry.shape))}"]
    if entry.sparse_up_to is not None:
        lines.append(f"sparse_up_to = {entry.sparse_up_to}")
    for batch, kernels in sorted(entry.batches.items()):
        lines += ["", f"[measured.batch.{batch}]"]
        lines += [f"{kernel} = {_inline(parameters)}" for kernel, parameters in kernels.items()]
    return "\n".join(lines) + "\n"


def _inline(values: Mapping[str, int]) -> str:
    return "{ " + ", ".join(f"{name} = {value}" for name, value in values.items()) + " }"


def _nearest_shape(entries: list[Measured], shape: LayerShape) -> Measured:
    """The entry of that shape, or else the one whose dense read is nearest in size; the first of several."""
    return min(entries, key=lambda m: (m.shape != shape, _distance(m.shape.weights, shape.weights)))


def _distance(a: int, b: int) -> float:
    """How many times one is the other, as a logarithm."""
    return abs(math.log(a / b))


@lru_cache(maxsize=4096)
def _lookup(kernel: str, device: str, shape: LayerShape, batch: int) -> Parameters:
    return known_tuning().parameters(kernel, device, shape, batch)


@lru_cache(maxsize=64)
def _cuda_name(index: int | None) -> str:
    return torch.cuda.get_device_name(index)
