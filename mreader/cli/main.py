"""The `mreader` command. It imports torch, which takes seconds, only for the command that is run."""

import gc
import importlib
import os
import signal
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mreader.cli.console import fail, stop
from mreader.importing import uninterrupted, without_collecting

# Name -> where it is defined, and the first paragraph of its help
_COMMANDS = {
    "convert": ("convert:convert_command", "Write the augmented checkpoint of SOURCE into OUT. Run again, it resumes."),
    "inspect": ("inspect:inspect_command", "Show what an augmented checkpoint holds, and what each budget reads."),
    "verify": (
        "verify:verify_command",
        "Check checksums, shapes and values; with --source, every weight bit for bit and everything computed from "
        "them.",
    ),
    "restore": (
        "restore:restore_command",
        "Write the checkpoint that OUT was converted from into DST, file for file; run again, it resumes.",
    ),
    "generate": (
        "generate:generate_command",
        "Continue a prompt, reading only the channels that matter; prints what follows the prompt.",
    ),
    "eval": ("eval:eval_command", "Compare the reader with the dense model, every token of every window through both."),
    "compare": (
        "compare:compare_command",
        "Compare selectors of channels: what each loses at what it reads, with and without calibration data.",
    ),
    "push-to-hub": (
        "push:push_command",
        "Verify an augmented checkpoint and publish it with a model card. Run again, it resumes.",
    ),
    "formats": (
        "formats:formats_command",
        "List the model types, how their experts lie on disk, and which types cannot be converted, with the reason.",
    ),
    "tune": ("tune:tune_command", "Find the fastest launch parameters of every kernel on this GPU, and keep them."),
    "bench": ("bench:bench_app", "Measure: the decode block, a whole model, DRAM reads, a server."),
}


class _Command(TyperCommand):
    """A command by name and help, which becomes the one that is defined at `home` when it is run."""

    def __init__(self, name: str, home: str, help: str) -> None:
        super().__init__(name, help=help)
        self._home = home

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        return self.load().make_context(*arguments, **options)

    def load(self) -> Any:
        """The real command, or group of commands."""
        module, _, defined = self._home.partition(":")
        found = getattr(_import_at_once(f"mreader.cli.{module}"), defined)
        around = typer.Typer()
        if isinstance(found, typer.Typer):
            around.add_typer(found, name=self.name)
        else:
            around.command(self.name)(found)
        return typer.main.get_group(around).commands[self.name or ""]


class _Commands(TyperGroup):
    """The commands of the table, in its order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (home, help) in _COMMANDS.items():
            self.add_command(_Command(name, home, help))


def _import_at_once(name: str) -> Any:
    """The module. What it brought in, torch for most commands, stays to the end and is not looked at for garbage."""
    if "torch" in sys.modules:
        return importlib.import_module(name)
    with without_collecting(), uninterrupted():
        module = importlib.import_module(name)
        gc.freeze()
    return module


app = typer.Typer(
    name="mreader",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mreader {version('mreader')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decode Mixture-of-Experts models by reading only the expert channels that matter for a token."""


class _Interrupted(BaseException):
    """Ctrl-C. Not an Exception: what is interrupted has not failed, and keeps what it has to resume from."""


def _open_standard_streams() -> None:
    """Python has None where a caller closed a stream, as cron jobs may: write to nowhere, read nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (open to the end)


def main() -> None:
    """Run the command line; every failure ends in one line of cause and one of what to do."""
    warnings.filterwarnings("ignore")  # of libraries, for developers
    interrupts: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        if len(interrupts) == 1:  # a second one would cut short what the first one cleans up
            raise _Interrupted

    _open_standard_streams()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        app()
    except (Exception, _Interrupted) as error:
        if interrupts:  # native code turns it into an error of its own
            stop(
                "interrupted",
                "the same command run again takes up where it stopped, if it writes a checkpoint or --rows",
                130,
            )
        fail(error)
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
