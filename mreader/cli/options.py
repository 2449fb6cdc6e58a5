"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from mreader.cli.console import Verbosity

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, errors only.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say what is being done, also where there is no terminal.")
]
Device = Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu or cuda:N.")]
Token = Annotated[str | None, typer.Option(help="Hub token; by default the one that `hf auth login` stored.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the Hub repository.")]
AugmentedPath = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of an augmented checkpoint.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), bfloat16, float16 or float32.")]
Channels = Annotated[float | None, typer.Option(help="Fraction of the candidate channels computed exactly.")]
ReadsBudget = Annotated[float | None, typer.Option(help="Fraction of the dense reads instead, like 0.178.")]
Coordinates = Annotated[int | None, typer.Option(help="Coordinates screened of each block of 128.")]
Score = Annotated[str | None, typer.Option(help="How channels are ranked: norm, rho or variance.")]
Rank = Annotated[int | None, typer.Option(help="Columns of the recovery map in use; 0 is none.")]


def verbosity(quiet: bool, verbose: bool) -> Verbosity:
    """-q wins over -v."""
    if quiet:
        return Verbosity.QUIET
    return Verbosity.VERBOSE if verbose else Verbosity.NORMAL
