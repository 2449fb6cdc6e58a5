"""mreader inspect."""

from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from mreader.cli.console import key_values, out, percent, print_json, progress, size
from mreader.cli.options import AugmentedPath, Json, Quiet, Verbose, verbosity
from mreader.inspection import Inspection, inspect_checkpoint


def inspect_command(path: AugmentedPath, json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Show what an augmented checkpoint holds, and what each budget reads."""
    with progress(verbosity(quiet, verbose)) as bar:
        found = inspect_checkpoint(path, progress=bar)
    if json:
        print_json(asdict(found))
    else:
        _print_inspection(path, found)


def _print_inspection(path: Path, found: Inspection) -> None:
    options = found.options
    total = sum(found.bytes.values())
    out.print(
        key_values(
            {
                "checkpoint": str(path),
                "model": f"{found.model_type}, {found.layers} routed layers",
                "experts": f"{found.experts} a layer, {found.routed} routed; {found.hidden} x {found.channels}",
                "weights": found.dtype,
                "format": f"version {options['format_version']}, {options['codes']} codes, rank {options['rank']}, "
                f"seed {options['seed']}",
                "size": f"{size(total)}: " + ", ".join(f"{kind} {size(n)}" for kind, n in found.bytes.items()),
                "added": percent(found.added),
                "default": f"channels {options['channels']:g}, coordinates {options['coordinates']}, "
                f"score {options['score']} (marked * below)",
                "recovery map": f"keeps {percent(found.energy)} of the down weights' energy",
                "sketch": f"loses {percent(found.sketch_error)} of the gate and up weights' energy",
            }
        )
    )
    table = Table("channels", "coordinates", "k", "sketch", "exact", "recovery", "reads", "a token", box=None)
    for line in found.budgets:
        default = (line.channels, line.coordinates) == (options["channels"], options["coordinates"])
        table.add_row(
            f"{line.channels:g}{'*' if default else ''}",
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
