"""What the command line prints: data to stdout, everything else to stderr, and every failure in two lines."""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)

from mreader.errors import MreaderError
from mreader.progress import Progress

DEBUG = "MREADER_DEBUG"
# Where it is no terminal nobody can widen it: tables keep their columns
_on_terminal = sys.stdout is not None and sys.stdout.isatty()
out = Console(highlight=False, emoji=False, soft_wrap=True, width=None if _on_terminal else 120)
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


class Verbosity(IntEnum):
    """-q, nothing, -v."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


class BarProgress(Progress):
    """A bar on stderr with bytes, layers and the time that is left."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, layer="", amount="")
        self._done, self._total, self._unit = 0, 0, "bytes"

    def begin(self, what: str, total: int, unit: str = "bytes") -> None:
        self._done, self._total, self._unit = 0, total, unit
        self._bar.reset(self._task, description=what, total=total, layer="", amount=amount(0, total, unit))

    def layer(self, number: int, layers: int) -> None:
        self._bar.update(self._task, layer=f"layer {number}/{layers}")

    def advance(self, amount_done: int) -> None:
        self._done += amount_done
        self._bar.update(self._task, advance=amount_done, amount=amount(self._done, self._total, self._unit))

    def note(self, text: str) -> None:
        self._bar.console.print(escape(text))


class PlainProgress(Progress):
    """No bar, for a log file: notes, and what begins where -v asks for it."""

    def __init__(self, verbosity: Verbosity) -> None:
        self._verbosity = verbosity

    def begin(self, what: str, total: int, unit: str = "bytes") -> None:
        if self._verbosity >= Verbosity.VERBOSE:
            err.print(f"{escape(what)}: {size(total) if unit == 'bytes' else f'{total:,} {unit}'}")

    def layer(self, number: int, layers: int) -> None:
        if self._verbosity >= Verbosity.VERBOSE:
            err.print(f"layer {number}/{layers}")

    def note(self, text: str) -> None:
        err.print(escape(text))


@contextmanager
def progress(verbosity: Verbosity) -> Iterator[Progress]:
    """A bar where stderr is a terminal, plain lines where it is not, silence with -q."""
    if verbosity == Verbosity.QUIET:
        yield Progress()
    elif not err.is_terminal:
        yield PlainProgress(verbosity)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TextColumn("{task.fields[layer]}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=err, transient=True) as bar:
            yield BarProgress(bar)


def hide_hub_progress(verbosity: Verbosity) -> None:
    """No bars of the Hub's client either, with -q or where stderr is no terminal."""
    if verbosity == Verbosity.QUIET or not err.is_terminal:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def key_values(rows: dict[str, str]) -> str:
    """Lines of name and value, for `Console.print`; no value is cut."""
    width = max(map(len, rows)) + 2
    return "\n".join(f"[dim]{escape(f'{name:<{width}}')}[/dim]{escape(value)}" for name, value in rows.items())


def size(nbytes: int) -> str:
    """Bytes in decimal units, as disks and the Hub count them."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.2f} {unit}"
        value /= 1000
    return f"{value:,.2f} TB"


def counted(number: int, noun: str) -> str:
    """The number and its noun: 1 file, 2 files."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amount(done: int, total: int, unit: str) -> str:
    """How much of a task is done, in bytes as people read them, or in another unit."""
    return f"{size(done)} of {size(total)}" if unit == "bytes" else f"{done:,} of {total:,} {unit}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def fail(error: BaseException) -> NoReturn:
    """Say what failed and what to do, and exit with the status that the error stands for."""
    if os.environ.get(DEBUG) == "1":
        traceback.print_exception(error)
    if isinstance(error, MreaderError):
        stop(error.cause, error.remedy, error.exit_code)
    stop(
        f"{type(error).__name__}: {error}",
        f"run again with {DEBUG}=1 for the traceback, and report it if it is a bug",
        1,
    )


def stop(cause: str, remedy: str, status: int) -> NoReturn:
    """One line of cause, one of what to do, and the end."""
    err.print(f"[bold red]error:[/bold red] {escape(_one_line(cause))}")
    if remedy:
        err.print(f"[bold]help:[/bold] {escape(_one_line(remedy))}")
    sys.exit(status)


def _one_line(text: str) -> str:
    return " ".join(text.split())
