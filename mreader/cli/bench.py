"""mreader bench. What measures is imported by the commands: it takes seconds."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mreader.cli.console import err, key_values, out, percent, print_json, progress, size
from mreader.cli.model import BudgetOptions
from mreader.cli.options import (
    AugmentedPath,
    Channels,
    Coordinates,
    Json,
    Quiet,
    Rank,
    ReadsBudget,
    Score,
    Verbose,
    verbosity,
)
from mreader.errors import UsageError

if TYPE_CHECKING:
    from mreader.bench.block import BlockBench
    from mreader.bench.model import ModelBench
    from mreader.bench.reads import ReadsRow
    from mreader.bench.serve import ServeBench
    from mreader.bench.target import Target
    from mreader.budget import Budget

Shape = Annotated[
    str | None,
    typer.Option(help="Random weights in a known shape: qwen3-30b-a3b (the default), olmoe, gemma4-26b, qwen3.5-35b."),
]
CheckpointOption = Annotated[
    Path | None, typer.Option(metavar="OUT", help="The layers of an augmented checkpoint instead.")
]
Batch = Annotated[str | None, typer.Option(help="Numbers of tokens, like 1,2,4.")]
Codes = Annotated[str | None, typer.Option(help="Code of random weights: ternary or quaternary.")]

bench_app = typer.Typer(no_args_is_help=True, help="Measure: the decode block, a whole model, DRAM reads, a server.")


@bench_app.command("block")
def block_command(
    shape: Shape = None,
    checkpoint: CheckpointOption = None,
    batch: Batch = None,
    channels: Channels = None,
    reads: ReadsBudget = None,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    codes: Codes = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the table into this file as well, like bench.png.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Time the sparse decode block beside dense ones: ours, transformers', and vLLM's where it is installed."""
    from mreader.bench.block import BATCHES, bench_block
    from mreader.bench.plot import plot_block, require_matplotlib
    from mreader.bench.target import find_target

    batches = parse_batches(batch, BATCHES)
    target = find_target(shape, checkpoint, codes, rank)
    budget = resolvable_budget(target, BudgetOptions(channels, reads, coordinates, score, rank))
    if plot is not None:
        require_matplotlib()
    with progress(verbosity(quiet, verbose)) as bar:
        bench = bench_block(target, budget, batches, bar)
    if json:
        print_json(bench.as_json())
    else:
        _print_block(bench)
    if plot is not None:  # last: a picture that cannot be written takes no figure with it
        plot_block(bench, plot)


@bench_app.command("model")
def model_command(
    path: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder of an augmented checkpoint; or give a --shape.")
    ] = None,
    shape: Shape = None,
    batch: Batch = None,
    channels: Channels = None,
    reads: ReadsBudget = None,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    codes: Codes = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Time the captured decode step of a whole model, dense and sparse."""
    from mreader.bench.model import BATCHES, bench_model, random_model
    from mreader.bench.target import find_target
    from mreader.bench.timing import require_cuda

    batches = parse_batches(batch, BATCHES)
    target = find_target(shape, path, codes, rank)
    budget = resolvable_budget(target, BudgetOptions(channels, reads, coordinates, score, rank))
    require_cuda()
    from mreader.runtime import load, set_budget

    with progress(verbosity(quiet, verbose)) as bar:
        if target.model is None:
            model = load(path or Path(), device="cuda")
        else:
            model = random_model(target.model, target.options, bar)
        set_budget(model, **asdict(budget))
        bench = bench_model(model, target.name, batches, bar, note=lambda text: err.print(text, markup=False))
    if json:
        print_json(bench.as_json())
    else:
        _print_model(bench)


@bench_app.command("reads")
def reads_command(
    shape: Shape = None,
    checkpoint: CheckpointOption = None,
    batch: Batch = None,
    channels: Channels = None,
    reads: ReadsBudget = None,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    codes: Codes = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare the bytes that the block reads from DRAM, by Nsight Compute, with those that are counted."""
    from mreader.bench.reads import BATCHES, bench_reads
    from mreader.bench.target import find_target

    batches = parse_batches(batch, BATCHES)
    target = find_target(shape, checkpoint, codes, rank)
    budget = resolvable_budget(target, BudgetOptions(channels, reads, coordinates, score, rank))
    with progress(verbosity(quiet, verbose)) as bar:
        rows = bench_reads(target, budget, batches, bar)
    if json:
        print_json({"target": target.name, "rows": [{**vars(row), "ratio": row.ratio} for row in rows]})
    else:
        _print_reads(rows)


@bench_app.command("serve")
def serve_command(
    path: AugmentedPath,
    server: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- OPTIONS", help="Options of the servers, as `vllm serve` takes them.", show_default=False
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the source: measure stock vLLM on it as well.")
    ] = None,
    reads: ReadsBudget = None,
    concurrency: Annotated[str | None, typer.Option(help="Numbers of users at a time, like 1,8,16.")] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    requests: Annotated[int, typer.Option(help="Requests of each user, one after the other.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw the table into this file as well, like serve.png.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve OUT with vLLM, dense and then sparse, and time the tokens that users get."""
    from mreader.bench.client import Load
    from mreader.bench.plot import plot_serve, require_matplotlib
    from mreader.bench.serve import CONCURRENCIES, bench_serve

    concurrencies = parse_numbers(concurrency, CONCURRENCIES, "concurrency", "users")
    load = Load(input_len, output_len, requests)
    if plot is not None:
        require_matplotlib()
    with progress(verbosity(quiet, verbose)) as bar:
        bench = bench_serve(path, source, reads, concurrencies, load, server or [], bar)
    if json:
        print_json(bench.as_json())
    else:
        _print_serve(bench)
    if plot is not None:  # last: a picture that cannot be written takes no figure with it
        plot_serve(bench, plot)


def parse_batches(text: str | None, default: tuple[int, ...]) -> list[int]:
    """The batches in "1,2,4": see `parse_numbers`."""
    return parse_numbers(text, default, "batch", "tokens")


def parse_numbers(text: str | None, default: tuple[int, ...], name: str, what: str) -> list[int]:
    """The numbers in "1,2,4", ascending, each once. UsageError where it is not that, or one is below 1."""
    if text is None:
        return list(default)
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError(f"{name} is {text}", f"give numbers of {what}, like 1,2,4") from error
    if numbers[0] < 1:
        raise UsageError(f"{name} is {text}", f"give numbers of {what} from 1 on")
    return numbers


def resolvable_budget(target: "Target", given: BudgetOptions) -> "Budget":
    """The budget given over the target's own, once it is known to mean something where a GPU lays out the sketch."""
    from mreader.kernels.layout import GPU

    budget = target.budget.change(**asdict(given))
    budget.resolve(target.block_shape(GPU))
    return budget


def _print_block(bench: "BlockBench") -> None:
    settings = bench.settings
    out.print(
        key_values(
            {
                "GPU": f"{bench.device}, copies at {bench.copy_bandwidth / 1e12:.2f} TB/s",
                "block": f"{bench.target}, {bench.codes} codes; {bench.layers} layers in turn, {bench.calls} calls",
                "budget": f"k = {settings.k} of {bench.candidates}, {settings.coordinates} coordinates, rank "
                f"{settings.rank}, score {settings.score}: {percent(bench.reads)} of the dense reads",
            }
        )
    )
    if bench.cached:
        err.print("the layers fit the L2 cache together: these times are not those of weights in DRAM")
    peers = list(bench.rows[0].peers)
    headings = [heading for peer in peers for heading in (f"{peer} us", "ratio")]
    table = Table("batch", "us", *headings, "reads", "bytes", "TB/s", "floor us", "runtime", box=None)
    for row in bench.rows:
        times = []
        for peer in peers:
            time, ratio = row.peers[peer], row.ratios[peer]
            times += ["-", "-"] if time is None or ratio is None else [f"{time:.1f}", f"{ratio:.2f}x"]
        table.add_row(
            str(row.batch),
            f"{row.microseconds:.1f}",
            *times,
            percent(bench.reads),
            size(row.bytes),
            f"{row.bandwidth / 1e12:.2f}",
            f"{row.floor:.1f}",
            row.runtime,
        )
    out.print(table)


def _print_model(bench: "ModelBench") -> None:
    settings = bench.settings
    out.print(
        key_values(
            {
                "GPU": bench.device,
                "model": f"{bench.target}, {bench.layers} routed layers",
                "budget": f"k = {settings.k}, {settings.coordinates} coordinates, rank {settings.rank}: "
                f"{percent(bench.reads)} of the dense reads",
            }
        )
    )
    table = Table("batch", "dense ms", "sparse ms", "ratio", "dense tokens/s", "sparse tokens/s", box=None)
    for row in bench.rows:
        table.add_row(
            str(row.batch),
            f"{row.dense:.2f}",
            f"{row.sparse:.2f}",
            f"{row.ratio:.2f}x",
            f"{row.tokens_per_second(row.dense):,.0f}",
            f"{row.tokens_per_second(row.sparse):,.0f}",
        )
    out.print(table)


def _print_reads(rows: "list[ReadsRow]") -> None:
    kernels = list(dict.fromkeys(kernel for row in rows for kernel in row.kernels))
    table = Table("batch", "counted", "measured", "ratio", *kernels, box=None)
    for row in rows:
        parts = [size(row.kernels.get(kernel, 0)) for kernel in kernels]
        table.add_row(str(row.batch), size(row.counted), size(row.measured), f"{row.ratio:.3f}", *parts)
    out.print(table)


def _print_serve(bench: "ServeBench") -> None:
    load = bench.load
    out.print(
        key_values(
            {
                "load": f"{load.requests} prompts of {load.input_len} tokens a user, answers of {load.output_len}",
                "GPUs": str(bench.gpus),
                **{measured.engine.name: measured.reads or measured.engine.model for measured in bench.engines},
            }
        )
    )
    table = Table("users", "engine", "ms a token", "ratio", "first ms", "tokens/s a user", "tokens/s a GPU", box=None)
    for rows in zip(*(measured.rows for measured in bench.engines), strict=True):
        for measured, row in zip(bench.engines, rows, strict=True):
            table.add_row(
                str(row.concurrency),
                measured.engine.name,
                f"{1e3 * row.tpot:.2f}",
                f"{bench.ratio(row):.2f}x",
                f"{1e3 * row.ttft:.0f}",
                f"{row.user_rate:,.1f}",
                f"{bench.gpu_rate(row):,.0f}",
            )
    out.print(table)
