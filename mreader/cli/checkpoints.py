"""mreader inspect, verify and restore."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mreader.cli.console import counted, err, key_values, out, percent, print_json, progress, size
from mreader.cli.memory import keep_freed_memory
from mreader.cli.options import AugmentedPath, Json, Quiet, Verbose, verbosity
from mreader.inspection import Inspection, inspect_checkpoint
from mreader.restore import restore
from mreader.verify import verify


def inspect_command(path: AugmentedPath, json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Show what an augmented checkpoint holds, and what each budget reads."""
    with progress(verbosity(quiet, verbose)) as bar:
        found = inspect_checkpoint(path, progress=bar)
    if json:
        print_json(found.to_dict())
    else:
        _print_inspection(path, found)


def verify_command(
    path: AugmentedPath,
    source: Annotated[
        Path | None, typer.Option(help="The checkpoint that it was converted from: compare every weight with it.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check checksums, shapes and values; with --source, every weight bit for bit and everything computed from them."""
    keep_freed_memory()
    with progress(verbosity(quiet, verbose)) as bar:
        verified = verify(path, source, progress=bar)
    if json:
        print_json({"ok": True, **vars(verified)})
    elif not quiet:
        compared = f", {counted(verified.layers_compared, 'layer')} equal to the source's" if source else ""
        err.print(f"{path} is good: {counted(verified.files, 'file')}, {counted(verified.tensors, 'tensor')}{compared}")


def restore_command(
    path: AugmentedPath,
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write the source checkpoint into.")],
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the checkpoint that OUT was converted from into DST, file for file."""
    with progress(verbosity(quiet, verbose)) as bar:
        left_out = restore(path, destination, progress=bar)
    if json:
        print_json({"destination": str(destination), "left_out": left_out})
    elif not quiet:
        err.print(f"{destination} holds the source checkpoint, every file with its recorded sha256")
        for name in left_out:
            err.print(f"{name} is left out: what {path} holds is not the source's")


def _print_inspection(path: Path, found: Inspection) -> None:
    options = found.options
    total = sum(found.bytes.values())
    out.print(
        key_values(
            {
                "checkpoint": str(path),
                "model": f"{found.model_type}, {found.layers} routed layers",
                "experts": f"{found.experts} a layer, {found.routed} routed; {found.channels} channels, {found.hidden} wide",
                "weights": found.dtype,
                "format": f"version {options['format_version']}, {options['codes']} codes, rank {options['rank']}, "
                f"seed {options['seed']}",
                "size": f"{size(total)}: " + ", ".join(f"{kind} {size(n)}" for kind, n in found.bytes.items()),
                "added": percent(found.added),
                "recovery map": f"keeps {percent(found.energy)} of the down weights' energy",
                "sketch": f"mean squared error {percent(found.sketch_error)} of the weights'",
            }
        )
    )
    table = Table("channels", "coordinates", "k", "sketch", "exact", "recovery", "reads", "a token", box=None)
    for line in found.budgets:
        default = (line.channels, line.coordinates) == (options["channels"], options["coordinates"])
        table.add_row(
            f"{line.channels:g}",
            str(line.coordinates),
            f"{line.k} of {line.candidates}",
            *(percent(part) for part in (line.sketch, line.exact, line.recovery, line.reads)),
            size(line.bytes_per_token),
            style="bold" if default else None,
        )
    out.print(table)
    quality = Table("layer", "energy kept", "sketch error", box=None)
    for layer in found.quality:
        quality.add_row(str(layer.number), percent(layer.energy), percent(layer.sketch_error))
    out.print(quality)
