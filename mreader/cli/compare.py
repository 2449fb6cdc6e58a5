"""mreader compare. What runs a model is imported by the command: it takes seconds."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from json import dumps
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mreader.cli.console import err, out, percent, progress
from mreader.cli.options import Coordinates, Device, Dtype, Json, Quiet, Rank, Score, Verbose, verbosity
from mreader.errors import UsageError

if TYPE_CHECKING:
    from mreader.selectors.pairs import Pair
    from mreader.selectors.runs import Run

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
    selectors: Annotated[str | None, typer.Option(help="Which selectors; all of them by default.")] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Keep rules: topk, topk-expert, threshold, matched; all but the second by default."),
    ] = None,
    recovery: Annotated[
        str | None,
        typer.Option(
            help="none, map (from weights alone), fitted (on calibration data); by default the first and the second."
        ),
    ] = None,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Instead of selectors, the reader with one thing changed at a time.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help=".npy file of token ids, text file or folder; the last windows by default.")
    ] = None,
    calibration_windows: Annotated[int, typer.Option(help="How many windows of it.")] = 8,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    codes: Annotated[str | None, typer.Option(help="Of the reader's sketch: ternary or quaternary.")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Keep every row here once it is done; run again, those in it are not repeated.")
    ] = None,
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
    from mreader.report import refuse_bad_files, write_csv, write_html, write_plot
    from mreader.selectors.ablations import ablations as ablations_of
    from mreader.selectors.grid import Grid, open_harness, parse_reads, read_texts, reader_of, run_all
    from mreader.selectors.jobs import KEEPS
    from mreader.selectors.ledger import Ledger, in_common, open_ledger

    refuse_bad_files(csv, html, plot)
    given, budgets = one_of(tokens, text), parse_reads(reads)
    reader = reader_of(model, coordinates, score, rank, codes)
    if ablations:
        _refuse_with_ablations(selectors=selectors, keep=keep, recovery=recovery)
    grid = Grid.of(*_or_all(selectors, keep, recovery), budgets)
    jobs = list(ablations_of(reader, budgets) if ablations else grid.jobs(reader))
    if not jobs:
        raise UsageError(
            f"none of the selectors can use --recovery {recovery}", "add none to it, or choose other selectors"
        )
    keeps = KEEPS if ablations else grid.keeps
    texts = read_texts(model, given, calibration, (windows, length), calibration_windows)
    opened = nullcontext(Ledger()) if rows is None else open_ledger(rows, in_common(model, texts, dtype, device))
    with opened as ledger, progress(verbosity(quiet, verbose)) as bar:
        harness = partial(open_harness, model, texts, dtype, device, bar)
        runs = run_all(harness, texts, jobs, keeps, ledger, bar)
    if not runs:
        raise UsageError("no threshold can keep to its budget, so there is nothing to match", "give larger --reads")
    if csv is not None:
        write_csv([run.row() for run in runs], csv)
    if plot is not None:
        write_plot(runs, plot)
    if html is not None:
        write_html(runs, f"{model.resolve().name}: {'ablations' if ablations else 'selectors'} at equal reads", html)
    if json:
        sys.stdout.write(dumps([run.row() for run in runs], indent=2, allow_nan=False) + "\n")
    elif ablations:
        out.print(_ablation_table(runs))
    else:
        _print_comparison(runs)
    for note in dict.fromkeys(run.note for run in runs if run.note):
        err.print(note)


def one_of(tokens: Path | None, text: Path | None) -> Path:
    """The file that is given; UsageError unless it is one."""
    if tokens is not None and text is None:
        return tokens
    if text is not None and tokens is None:
        return text
    raise UsageError("give one of --tokens and --text", "--tokens FILE.npy, or --text FILE_OR_FOLDER")


def _or_all(selectors: str | None, keep: str | None, recovery: str | None) -> tuple[str, str, str]:
    """What is to be compared where nothing was chosen."""
    return (
        "all" if selectors is None else selectors,
        "topk,threshold,matched" if keep is None else keep,
        "none,map" if recovery is None else recovery,
    )


def _refuse_with_ablations(**given: str | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--{name} says nothing about ablations", f"leave --{name} or --ablations out")


def _print_comparison(runs: "Sequence[Run]") -> None:
    from mreader.selectors.pairs import count_verdicts

    out.print(_table(runs))
    if any(run.keep_name == "threshold" and run.kl is not None for run in runs):
        out.print(_threshold_table(runs))
    for count in count_verdicts(runs):
        out.print(
            f"top-k {_AGAINST[count.against]}: better {count.wins} times, worse {count.losses}, "
            f"within two standard errors {count.ties}"
        )


def _table(runs: "Sequence[Run]") -> Table:
    """Best first at every budget; what cannot keep to it comes last."""
    from mreader.report import in_order

    table = Table("selector", "keep", "recovery", box=None, header_style="bold")
    for column in ("asked", "reads", "k", "KL", "top-1"):
        table.add_column(column, justify="right")
    ordered = in_order(runs)
    for number, run in enumerate(ordered):
        names = (run.job.selector, run.keep_name, run.job.recovery, percent(run.budget))
        last = number + 1 == len(ordered) or ordered[number + 1].budget != run.budget
        if run.kl is None or run.top1 is None or run.reads is None:
            table.add_row(*names, "", "", "infeasible", "", style="dim", end_section=last)
        else:
            figures = (percent(run.reads), str(run.k), f"{run.kl:.4f}", f"{run.top1:.4f}")
            table.add_row(*names, *figures, end_section=last)
    return table


def _threshold_table(runs: "Sequence[Run]") -> Table:
    """What thresholds read, over the windows and along them, and what they cost against top-k."""
    from mreader.selectors.pairs import keep_pairs, mean_and_error

    table = Table("threshold of", "recovery", box=None, header_style="bold")
    for column in ("asked", "reads", "first quarter", "last quarter", "KL less top-k's", "at the same reads"):
        table.add_column(column, justify="right")
    pairs = {(pair.run.job, against): pair for against in _AGAINST for pair in keep_pairs(runs, against)}
    for run in runs:
        if run.keep_name == "threshold" and run.kl is not None:
            used, error = mean_and_error(run.reads_windows)
            table.add_row(
                run.job.selector,
                run.job.recovery,
                percent(run.budget),
                f"{100 * used:.2f}{_give_or_take(100 * error, 2)} %",
                *(percent(run.reads_of_quarter(quarter) or 0.0) for quarter in (0, 3)),
                *(_difference(pairs.get((run.job, against))) for against in _AGAINST),
            )
    return table


def _difference(pair: "Pair | None") -> str:
    return "" if pair is None else f"{pair.difference:+.4f}{_give_or_take(pair.error, 4)}"


def _give_or_take(error: float, digits: int) -> str:
    """The standard error; nothing where there is one window alone, which tells of none."""
    return f" ± {error:.{digits}f}" if isfinite(error) else ""


def _ablation_table(runs: "Sequence[Run]") -> Table:
    """Every variant of the reader, beside the reader as it is."""
    from mreader.selectors.ablations import ablation_pairs

    table = Table("the reader, but", box=None, header_style="bold")
    for column in ("asked", "reads", "k", "KL", "top-1", "KL less the reader's"):
        table.add_column(column, justify="right")
    pairs = {pair.run.job: pair for pair in ablation_pairs(runs)}
    for number, run in enumerate(runs):
        last = number + 1 == len(runs) or runs[number + 1].budget != run.budget
        names = (run.job.variant or "as it is", percent(run.budget))
        if run.kl is None or run.top1 is None or run.reads is None:
            table.add_row(*names, "", "", "infeasible", "", "", style="dim", end_section=last)
            continue
        figures = (percent(run.reads), str(run.k), f"{run.kl:.4f}", f"{run.top1:.4f}")
        table.add_row(*names, *figures, _difference(pairs.get(run.job)), end_section=last)
    return table
