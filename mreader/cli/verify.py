"""mreader verify."""

from pathlib import Path
from typing import Annotated

import typer

from mreader.cli.console import counted, err, print_json, progress
from mreader.cli.memory import keep_freed_memory
from mreader.cli.options import AugmentedPath, Json, Quiet, Verbose, verbosity
from mreader.verify import verify


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
        if verified.unlisted:
            names = ", ".join(verified.unlisted)
            err.print(
                f"not part of it, and not checked: {names} (push-to-hub leaves them out, a copy of the folder does not)"
            )
