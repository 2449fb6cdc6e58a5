"""The `mreader` command."""

import os
import signal
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from mreader.cli.bench import bench_app
from mreader.cli.console import fail, stop
from mreader.cli.convert import convert_command
from mreader.cli.eval import eval_command
from mreader.cli.generate import generate_command
from mreader.cli.inspect import inspect_command
from mreader.cli.push import push_command
from mreader.cli.restore import restore_command
from mreader.cli.tune import tune_command
from mreader.cli.verify import verify_command

app = typer.Typer(
    name="mreader",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert")(convert_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("restore")(restore_command)
app.command("generate")(generate_command)
app.command("eval")(eval_command)
app.command("push-to-hub")(push_command)
app.add_typer(bench_app, name="bench")
app.command("tune")(tune_command)


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
            stop("interrupted", "the same command run again takes up where it stopped, if it writes a checkpoint", 130)
        fail(error)
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
