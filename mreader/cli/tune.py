"""mreader tune. What runs on the GPU is imported by the command: it takes seconds."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mreader.cli.bench import Batch, CheckpointOption, Codes, Shape, parse_batches, resolvable_budget
from mreader.cli.console import err, out, print_json, progress
from mreader.cli.model import BudgetOptions
from mreader.cli.options import Channels, Coordinates, Json, Quiet, Rank, ReadsBudget, Score, Verbose, verbosity


def tune_command(
    shape: Shape = None,
    checkpoint: CheckpointOption = None,
    batch: Batch = None,
    channels: Channels = None,
    reads: ReadsBudget = None,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    codes: Codes = None,
    file: Annotated[
        Path | None, typer.Option("--out", help="Write here instead of the file that every run on this machine reads.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find the fastest launch parameters of every kernel on this GPU, and keep them."""
    from mreader.bench.block import BATCHES
    from mreader.bench.target import find_target
    from mreader.bench.timing import require_cuda
    from mreader.bench.tune import as_measured, tune
    from mreader.kernels.tuning import device_name, read_measured, user_file, write_measured

    batches = parse_batches(batch, BATCHES)
    target = find_target(shape, checkpoint, codes, rank)
    budget = resolvable_budget(target, BudgetOptions(channels, reads, coordinates, score, rank))
    device = device_name(require_cuda())
    where = file or user_file()
    read_measured(where)  # a file that cannot be extended is found before the work, not after it
    with progress(verbosity(quiet, verbose)) as bar:
        rows = tune(target, budget, batches, bar)
    entry = as_measured(rows, device, target.layer)
    write_measured(where, (entry,))
    if json:
        print_json({"device": device, "file": str(where), **asdict(entry), "rows": [asdict(row) for row in rows]})
        return
    table = Table("batch", "us before", "us now", "dense us", "parameters", box=None)
    for row in rows:
        parameters = "; ".join(
            f"{kernel} {' '.join(f'{name}={value}' for name, value in found.items())}"
            for kernel, found in row.parameters.items()
        )
        table.add_row(str(row.batch), f"{row.before:.1f}", f"{row.sparse:.1f}", f"{row.dense:.1f}", parameters)
    out.print(table)
    if not quiet:
        err.print(f"written to {where}")
