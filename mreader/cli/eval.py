"""mreader eval. What runs a model is imported by the command: it takes seconds."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mreader.cli.console import key_values, out, percent, print_json, progress
from mreader.cli.model import BudgetOptions, load_model
from mreader.cli.options import (
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
from mreader.formats.augmented import is_augmented

if TYPE_CHECKING:
    from mreader.evaluate import Evaluation
    from mreader.progress import Progress
    from mreader.selectors.harness import Run

_CALIBRATION_WINDOWS = 8
_KEYS = ("kl", "top1", "nll_dense", "nll", "reads", "k")


def eval_command(
    path: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of an augmented checkpoint, or of a source with --reads.")
    ],
    tokens: Annotated[Path | None, typer.Option(help=".npy file of token ids.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or folder of .py, .txt and .md files.")] = None,
    windows: Annotated[int, typer.Option(help="How many windows.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    channels: Channels = None,
    reads: ReadsBudget = None,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    selector: Annotated[str, typer.Option(help="Whose scores; `mreader compare` shows what there is.")] = "reader",
    keep: Annotated[str, typer.Option(help="topk, topk-expert or threshold.")] = "topk",
    recovery: Annotated[
        str | None, typer.Option(help="none, map or fitted; by default the reader's map, and none for others.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help=".npy file of token ids, text file or folder, for what has to be calibrated.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Reads and channels by layer; with --reads.")] = False,
    dtype: Dtype = "float32",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare the reader with the dense model, every token of every window through both."""
    if (tokens is None) == (text is None):
        raise UsageError("give one of --tokens and --text", "--tokens FILE.npy, or --text FILE_OR_FOLDER")
    budget = BudgetOptions(channels, reads, coordinates, score, rank)
    the_reader = (selector, keep, recovery) == ("reader", "topk", None)
    found: dict[str, Any]
    with progress(verbosity(quiet, verbose)) as bar:
        if the_reader and not layers and (is_augmented(path) or reads is None):
            found = asdict(_run_reader(path, tokens, text, (windows, length), budget, dtype, device, bar))
        else:
            chosen = (selector, keep, recovery or ("map" if selector == "reader" else "none"))
            given = tokens or text or Path()
            run = _run_selector(path, given, (windows, length), chosen, calibration, budget, dtype, device, bar)
            found = {key: getattr(run, key) for key in _KEYS}
            if layers:
                found["layers"] = [
                    {"layer": number, "reads": used, "k": kept}
                    for number, (used, kept) in enumerate(zip(run.reads_layers, run.kept_layers, strict=True))
                ]
    if json:
        print_json(found)
        return
    out.print(
        key_values(
            {
                f"KL(dense || {selector})": f"{found['kl']:.4f} nats a token",
                "top-1 agreement": percent(found["top1"]),
                "loss": f"{found['nll']:.4f} nats, dense {found['nll_dense']:.4f}",
                "reads": f"{percent(found['reads'])} of the routed experts' weights, k = {found['k']}",
                **{
                    f"layer {layer['layer']}": f"{percent(layer['reads'])}, {layer['k']:.1f} channels a token"
                    for layer in found.get("layers", [])
                },
            }
        )
    )


def _run_reader(
    path: Path,
    tokens: Path | None,
    text: Path | None,
    windows: tuple[int, int],
    budget: BudgetOptions,
    dtype: str,
    device: str,
    bar: "Progress",
) -> "Evaluation":
    """The reader as the model runs it."""
    from mreader.evaluate import cut_windows, evaluate, read_text, read_tokens

    given = read_tokens(tokens) if tokens is not None else None
    if text is not None and not text.exists():
        raise UsageError(f"{text} does not exist", "name a text file, or a folder of .py, .txt or .md files")
    model, tokenizer = load_model(path, budget, dtype, device)
    ids = given if given is not None else read_text(text or Path(), tokenizer)
    return evaluate(model, cut_windows(ids, *windows), bar)


def _run_selector(
    path: Path,
    given: Path,
    windows: tuple[int, int],
    chosen: tuple[str, str, str],
    calibration: Path | None,
    budget: BudgetOptions,
    dtype: str,
    device: str,
    bar: "Progress",
) -> "Run":
    """Any selector, simulated."""
    from mreader.evaluate import cut_windows, read_ids
    from mreader.selectors.grid import evaluate_job, quiet_loading, reader_plan
    from mreader.selectors.harness import Job

    if budget.reads is None or budget.channels is not None:
        raise UsageError("selectors are compared at equal reads", "give --reads, and not --channels")
    job = Job(*chosen, budget.reads)
    if job.needs_calibration and calibration is None:
        raise UsageError(
            f"{job.selector} with {job.keep} and {job.recovery} recovery needs calibration data",
            "give --calibration FILE",
        )
    evaluated = cut_windows(read_ids(given, path), *windows)
    calibrated = None
    if calibration is not None:
        calibrated = cut_windows(read_ids(calibration, path), _CALIBRATION_WINDOWS, windows[1])
    quiet_loading()
    options = (budget.coordinates, budget.score, budget.rank)
    return evaluate_job(path, job, evaluated, calibrated, reader_plan(*options), dtype, device, bar)
