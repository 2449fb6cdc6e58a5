"""mreader eval. What runs a model is imported by the command: it takes seconds."""

from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mreader.cli.compare import one_of
from mreader.cli.console import Verbosity, err, key_values, out, percent, print_json, progress
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
from mreader.formats.augmented import is_augmented, open_augmented

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from mreader.progress import Progress
    from mreader.selectors.harness import Harness
    from mreader.selectors.jobs import Job
    from mreader.selectors.runs import Run

_CALIBRATION_WINDOWS = 8
_KEYS = ("kl", "top1", "nll_dense", "nll", "reads", "k")


@dataclass(frozen=True)
class _Asked:
    """A model, what of it is read, and on which text: None for `given` where there is none."""

    path: Path
    budget: BudgetOptions
    selector: str
    keep: str
    recovery: str | None
    calibration: Path | None
    given: Path | None
    windows: tuple[int, int]
    dtype: str
    device: str

    @property
    def the_reader(self) -> bool:
        """Whether it is the reader, and the checkpoint can run it itself."""
        as_it_is = (self.selector, self.keep, self.recovery) == ("reader", "topk", None)
        return as_it_is and (is_augmented(self.path) or self.budget.reads is None)


def eval_command(
    path: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of an augmented checkpoint, or of a source with --reads.")
    ],
    tokens: Annotated[Path | None, typer.Option(help=".npy file of token ids.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or folder of .py, .txt and .md files.")] = None,
    windows: Annotated[int | None, typer.Option(help="How many windows; 16 by default.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a window; 256 by default.")] = None,
    generate: Annotated[
        int | None, typer.Option(help="Let both continue every window by so many tokens, and compare what they write.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness in place of a text, like arc_easy,piqa.")
    ] = None,
    task_folder: Annotated[Path | None, typer.Option(help="Folder of more tasks, in lm-eval's YAML.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Of every task, only the first so many.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples of a task at once; 1 by default.")] = None,
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
    loud = verbosity(quiet, verbose)
    given = None if tasks is not None else one_of(tokens, text)
    budget = BudgetOptions(channels, reads, coordinates, score, rank)
    size = (16 if windows is None else windows, 256 if length is None else length)
    asked = _Asked(path, budget, selector, keep, recovery, calibration, given, size, dtype, device)
    if tasks is not None:
        _refuse_with_tasks(
            tokens=tokens, text=text, windows=windows, length=length, generate=generate, layers=layers or None
        )
        _report_tasks(_run_tasks(asked, tasks.split(","), task_folder, examples, batch or 1, loud), json)
        return
    _refuse_without_tasks(**{"task-folder": task_folder, "examples": examples, "batch": batch})
    with progress(loud) as bar:
        found = (
            _compare_texts(asked, layers, bar) if generate is None else _compare_writing(asked, generate, layers, bar)
        )
    if json:
        print_json(found)
    else:
        out.print(key_values(_described(found, selector)))


def _refuse_with_tasks(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--{name} says nothing about tasks, which bring their texts", f"leave --{name} out")


def _refuse_without_tasks(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--{name} is for tasks", f"leave --{name} out, or give --tasks")


def _refuse_calibration(asked: _Asked) -> None:
    if asked.calibration is not None:
        raise UsageError(
            f"{asked.selector} with {asked.keep} needs no calibration data",
            "leave --calibration out, or give another --selector, --keep or --recovery",
        )


def _compare_texts(asked: _Asked, layers: bool, bar: "Progress") -> dict[str, Any]:
    """Every token of the windows through both."""
    if asked.the_reader and not layers:
        from mreader.evaluate import evaluate

        model, ids = _load_with_windows(asked)
        return asdict(evaluate(model, ids, bar))
    harness, job = _harness(asked, bar)
    bar.begin("evaluating", harness.windows.numel(), "tokens")
    run = harness.run(job)
    if run.kl is None:
        raise UsageError(run.note, "give another budget, or another recovery")
    return {key: getattr(run, key) for key in _KEYS} | (_by_layer(run) if layers else {})


def _compare_writing(asked: _Asked, tokens: int, layers: bool, bar: "Progress") -> dict[str, Any]:
    """What both write after each window."""
    if asked.the_reader and not layers:
        from mreader.continuation import compare_continuations
        from mreader.runtime import reader_mode, runtime_of

        model, prompts = _load_with_windows(asked)
        dense, sparse = (partial(reader_mode, model, mode) for mode in ("never", "decode"))
        found = compare_continuations(model, dense, sparse, prompts, tokens, bar)
        runtime = runtime_of(model)
        return asdict(found) | {"reads": runtime.reads.total, "k": runtime.settings.k}
    harness, job = _harness(asked, bar)
    found, run = harness.diverge(job, tokens)
    return asdict(found) | {"reads": run.reads, "k": run.k} | (_by_layer(run) if layers else {})


def _by_layer(run: "Run") -> dict[str, Any]:
    pairs = zip(run.reads_layers, run.kept_layers, strict=True)
    return {"layers": [{"layer": number, "reads": used, "k": kept} for number, (used, kept) in enumerate(pairs)]}


def _load_with_windows(asked: _Asked) -> "tuple[PreTrainedModel, Tensor]":
    """The augmented checkpoint as the runtime runs it, and its windows."""
    from mreader.evaluate import cut_windows, read_ids

    _refuse_calibration(asked)
    open_augmented(asked.path)  # what is wrong with it is said first
    windows = cut_windows(read_ids(asked.given or Path(), asked.path), *asked.windows)
    model, _ = load_model(asked.path, asked.budget, asked.dtype, asked.device)
    return model, windows


def _harness(asked: _Asked, bar: "Progress") -> "tuple[Harness, Job]":
    """Any selector, simulated."""
    from mreader.evaluate import cut_windows, read_ids
    from mreader.selectors.grid import open_harness, reader_of
    from mreader.selectors.jobs import Job
    from mreader.selectors.subject import Texts

    budget = asked.budget
    if budget.reads is None or budget.channels is not None:
        raise UsageError("selectors are compared at equal reads", "give --reads, and not --channels")
    recovery = asked.recovery or ("map" if asked.selector == "reader" else "none")
    reader = reader_of(asked.path, budget.coordinates, budget.score, budget.rank)
    job = Job(asked.selector, asked.keep, recovery, budget.reads, reader=reader)
    if not job.needs_calibration:
        _refuse_calibration(asked)
    elif asked.calibration is None:
        raise UsageError(
            f"{job.selector} with {job.keep} and {job.recovery} recovery needs calibration data",
            "give --calibration FILE",
        )
    evaluated = cut_windows(read_ids(asked.given or Path(), asked.path), *asked.windows)
    calibrated = None
    if asked.calibration is not None:
        calibrated = cut_windows(read_ids(asked.calibration, asked.path), _CALIBRATION_WINDOWS, asked.windows[1])
    return open_harness(asked.path, Texts(evaluated, calibrated), asked.dtype, asked.device, bar), job


def _described(found: dict[str, Any], selector: str) -> dict[str, str]:
    """What a person reads of either comparison."""
    rows = {
        f"KL(dense || {selector})": f"{found['kl']:.4f} nats a token",
        "top-1 agreement": percent(found["top1"]),
    }
    if "nll" in found:
        rows["loss"] = f"{found['nll']:.4f} nats, dense {found['nll_dense']:.4f}"
    else:
        rows["first difference"] = f"after {found['first_difference']:.1f} tokens, mean over prompts"
        rows["identical"] = f"{percent(found['identical'])} of the prompts"
        rows["repetition"] = f"{percent(found['repetition'])} of 4-grams, dense {percent(found['repetition_dense'])}"
    rows["reads"] = f"{percent(found['reads'])} of the routed experts' weights, k = {found['k']}"
    for layer in found.get("layers", []):
        rows[f"layer {layer['layer']}"] = f"{percent(layer['reads'])}, {layer['k']:.1f} channels a token"
    return rows


def _run_tasks(
    asked: _Asked, names: Sequence[str], folder: Path | None, examples: int | None, batch: int, loud: Verbosity
) -> dict[str, Any]:
    """lm-eval's tasks, by the model as it runs."""
    from mreader.runtime import runtime_of
    from mreader.tasks import require_lm_eval, run_tasks

    if (asked.selector, asked.keep, asked.recovery) != ("reader", "topk", None):
        raise UsageError("tasks are for the reader as the model runs it", "leave out --selector, --keep and --recovery")
    _refuse_calibration(asked)
    require_lm_eval()
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "name the folder that holds the tasks' YAML files")
    model, tokenizer = load_model(asked.path, asked.budget, asked.dtype, asked.device)
    runtime = runtime_of(model)
    # lm-eval draws bars of its own, and says much
    with nullcontext() if err.is_terminal and loud != Verbosity.QUIET else redirect_stderr(StringIO()):
        scores = run_tasks(model, tokenizer, [name.strip() for name in names], folder, examples, batch)
    return {
        "tasks": [asdict(score) for score in scores],
        "reads": runtime.reads.total,
        "k": runtime.settings.k,
    }


def _report_tasks(found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
        return
    table = Table("task", "metric", box=None, header_style="bold")
    for column in ("dense", "sparse", "difference", "examples"):
        table.add_column(column, justify="right")
    for score in found["tasks"]:
        error = "" if score["error"] is None else f" ± {score['error']:.4f}"
        table.add_row(
            score["task"],
            score["metric"],
            f"{score['dense']:.4f}",
            f"{score['sparse']:.4f}",
            f"{score['difference']:+.4f}{error}",
            "" if score["examples"] is None else str(score["examples"]),
        )
    out.print(table)
    out.print(f"reads {percent(found['reads'])} of the routed experts' weights, k = {found['k']}")
