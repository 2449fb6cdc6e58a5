"""mreader eval. What runs a model is imported by the command: it takes seconds."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mreader.cli.console import key_values, out, percent, print_json, progress
from mreader.cli.model import BudgetOptions, load_model
from mreader.cli.options import (
    AugmentedPath,
    Channels,
    Coordinates,
    Device,
    Dtype,
    Json,
    Quiet,
    Rank,
    ReadsBudget,
    Score,
    Verbose,
    verbosity,
)
from mreader.errors import UsageError


def eval_command(
    path: AugmentedPath,
    tokens: Annotated[Path | None, typer.Option(help=".npy file of token ids.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or folder of .py, .txt and .md files.")] = None,
    windows: Annotated[int, typer.Option(help="How many windows.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    channels: Channels = None,
    reads: ReadsBudget = None,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare the reader with the dense model, every token of every window through both."""
    from mreader.evaluate import cut_windows, evaluate, read_text, read_tokens

    if (tokens is None) == (text is None):
        raise UsageError("give one of --tokens and --text", "--tokens FILE.npy, or --text FILE_OR_FOLDER")
    given = read_tokens(tokens) if tokens is not None else None
    if text is not None and not text.exists():
        raise UsageError(f"{text} does not exist", "name a text file, or a folder of .py, .txt or .md files")
    budget = BudgetOptions(channels, reads, coordinates, score, rank)
    model, tokenizer = load_model(path, budget, dtype, device)
    ids = given if given is not None else read_text(text or Path(), tokenizer)
    with progress(verbosity(quiet, verbose)) as bar:
        evaluation = evaluate(model, cut_windows(ids, windows, length), bar)
    if json:
        print_json(asdict(evaluation))
        return
    out.print(
        key_values(
            {
                "KL(dense || reader)": f"{evaluation.kl:.4f} nats a token",
                "top-1 agreement": percent(evaluation.top1),
                "loss": f"{evaluation.nll:.4f} nats, dense {evaluation.nll_dense:.4f}",
                "reads": f"{percent(evaluation.reads)} of the routed experts' weights, k = {evaluation.k}",
            }
        )
    )
