"""mreader restore."""

from pathlib import Path
from typing import Annotated

import typer

from mreader.cli.console import err, print_json, progress
from mreader.cli.options import Json, Quiet, Verbose, verbosity
from mreader.formats.augmented import open_augmented
from mreader.restore import restore


def restore_command(
    path: Annotated[str, typer.Argument(metavar="OUT", help="Folder of an augmented checkpoint.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write the source checkpoint into.")],
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the checkpoint that OUT was converted from into DST, file for file; run again, it resumes."""
    with progress(verbosity(quiet, verbose)) as bar:
        left_out = restore(path, destination, progress=bar)
    quantized = open_augmented(Path(path)).source.quantized
    if json:
        print_json({"destination": str(destination), "left_out": left_out, "dequantized_from": quantized})
    elif not quiet:
        if quantized:
            err.print(f"{destination} holds the dequantized model: the source itself is quantized ({quantized})")
        else:
            err.print(f"{destination} holds the source checkpoint, every file with its recorded sha256")
        for name in left_out:
            err.print(f"{name} is left out: what {path} holds is not the source's")
