"""mreader compare. What runs a model is imported by the command: it takes seconds."""

import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mreader.cli.console import err, out, percent, progress
from mreader.cli.options import Coordinates, Device, Dtype, Json, Quiet, Rank, Score, Verbose, verbosity
from mreader.errors import UsageError

if TYPE_CHECKING:
    from mreader.selectors.harness import Run

_AGAINST = {
    "topk": "against thresholds, at the budget",
    "matched": "against thresholds, at the reads that these really used",
}


def compare_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a source or an augmented checkpoint.")],
    tokens: Annotated[Path | None, typer.Option(help=".npy file of token ids.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or folder of .py, .txt and .md files.")] = None,
    windows: Annotated[int, typer.Option(help="How many windows.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    reads: Annotated[str, typer.Option(help="Budgets as fractions of the dense reads.")] = "0.25,0.30,0.40",
    selectors: Annotated[str, typer.Option(help="Which selectors, or all of them.")] = "all",
    keep: Annotated[str, typer.Option(help="Keep rules: topk, topk-expert, threshold, matched.")] = (
        "topk,threshold,matched"
    ),
    recovery: Annotated[str, typer.Option(help="none, map (from weights alone), fitted (on calibration data).")] = (
        "none,map"
    ),
    calibration: Annotated[
        Path | None, typer.Option(help=".npy file of token ids, text file or folder; the last windows by default.")
    ] = None,
    calibration_windows: Annotated[int, typer.Option(help="How many windows of it.")] = 8,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    codes: Annotated[str | None, typer.Option(help="Of a source's sketch: ternary or quaternary.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table into this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with figures into this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw KL against reads into this file, like compare.png.")] = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare selectors of channels: what each loses at what it reads, with and without calibration data."""
    from mreader.report import require_matplotlib, write_csv, write_html, write_plot
    from mreader.selectors.grid import (
        Grid,
        parse_reads,
        quiet_loading,
        reader_plan,
        run_grid,
        sketch_options,
        split_tokens,
    )
    from mreader.selectors.pairs import count_verdicts

    if html is not None or plot is not None:
        require_matplotlib()
    grid = Grid.of(selectors, keep, recovery, parse_reads(reads))
    given = one_of(tokens, text)
    evaluated, calibrated = split_tokens(model, given, calibration, (windows, length), calibration_windows)
    base = reader_plan(coordinates, score, rank)
    quiet_loading()
    with progress(verbosity(quiet, verbose)) as bar:
        runs = run_grid(model, grid, evaluated, calibrated, base, dtype, device, bar, sketch_options(codes, rank))
    if csv is not None:
        write_csv([run.row() for run in runs], csv)
    if plot is not None:
        write_plot(runs, plot)
    if html is not None:
        write_html(runs, f"{model.name}: selectors at equal reads", html)
    if json:
        sys.stdout.write(dumps([run.row() for run in runs], indent=2, allow_nan=False) + "\n")
        return
    out.print(_table(runs))
    for count in count_verdicts(runs):
        out.print(
            f"top-k {_AGAINST[count.against]}: better {count.wins} times, worse {count.losses}, "
            f"within two standard errors {count.ties}"
        )
    for note in dict.fromkeys(run.note for run in runs if run.note):
        err.print(note)


def one_of(tokens: Path | None, text: Path | None) -> Path:
    """The file that is given; UsageError unless it is one."""
    if tokens is not None and text is None:
        return tokens
    if text is not None and tokens is None:
        return text
    raise UsageError("give one of --tokens and --text", "--tokens FILE.npy, or --text FILE_OR_FOLDER")


def _table(runs: "Sequence[Run]") -> Table:
    """Best first at every budget; what cannot keep to it comes last."""
    table = Table("selector", "keep", "recovery", box=None, header_style="bold")
    for column in ("asked", "reads", "k", "KL", "top-1"):
        table.add_column(column, justify="right")
    ordered = sorted(runs, key=lambda run: (run.budget, run.kl is None, run.kl or 0.0))
    for number, run in enumerate(ordered):
        names = (run.job.selector, run.keep_name, run.job.recovery, percent(run.budget))
        last = number + 1 == len(ordered) or ordered[number + 1].budget != run.budget
        if run.kl is None or run.top1 is None or run.reads is None:
            table.add_row(*names, "", "", "infeasible", "", style="dim", end_section=last)
        else:
            figures = (percent(run.reads), str(run.k), f"{run.kl:.4f}", f"{run.top1:.4f}")
            table.add_row(*names, *figures, end_section=last)
    return table
