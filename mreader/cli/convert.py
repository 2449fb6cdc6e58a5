"""mreader convert."""

import time
from pathlib import Path
from typing import Annotated

import typer

from mreader.cli.console import counted, err, hide_hub_progress, key_values, percent, print_json, progress, size
from mreader.cli.memory import end_at_once, keep_freed_memory
from mreader.cli.options import Device, Json, Quiet, Revision, Token, Verbose, verbosity
from mreader.convert import convert, plan_conversion
from mreader.device import pick_device, refuse_unknown_device
from mreader.errors import UsageError
from mreader.formats.augmented import DEFAULT_OPTIONS, FormatOptions
from mreader.output import free_bytes, read_finished, require_space, require_writable
from mreader.plan import MAX_SHARD_BYTES, Plan

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


def convert_command(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Folder of a checkpoint, or a Hub id like Qwen/Qwen3-30B-A3B.")
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Folder to write; a conversion that was interrupted is resumed.")
    ],
    codes: Annotated[str, typer.Option(help="Sketch code: ternary or quaternary.")] = DEFAULT_OPTIONS.codes,
    rank: Annotated[int, typer.Option(help="Rank of the recovery map.")] = DEFAULT_OPTIONS.rank,
    seed: Annotated[int, typer.Option(help="Seed of the rotation signs.")] = DEFAULT_OPTIONS.seed,
    channels: Annotated[float, typer.Option(help="Default budget: fraction of channels.")] = DEFAULT_OPTIONS.channels,
    coordinates: Annotated[int, typer.Option(help="Default coordinates of a block.")] = DEFAULT_OPTIONS.coordinates,
    score: Annotated[str, typer.Option(help="Default score: norm, rho or variance.")] = DEFAULT_OPTIONS.score,
    revision: Revision = None,
    token: Token = None,
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16: dequantize a source whose weights are quantized.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Fill shards up to this size.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again over another conversion in OUT.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the augmented checkpoint of SOURCE into OUT. Run again, it resumes."""
    level = verbosity(quiet, verbose)
    options = FormatOptions(codes, rank, seed, channels, coordinates, score)
    limit = _parse_size(max_shard_size)
    if dry_run:
        refuse_unknown_device(device)
        if device.startswith("cuda"):
            pick_device(device)
        plan = plan_conversion(
            source, options, out=out, revision=revision, token=token, max_shard_bytes=limit, dtype=dtype
        )
        target = Path(out)
        if overwrite or read_finished(target) is None:
            require_writable(target)
        _report(plan, target, json, None)
        require_space(target, plan)
        return
    keep_freed_memory()
    end_at_once()
    if not Path(source).is_dir():
        hide_hub_progress(level)
    start = time.perf_counter()
    with progress(level) as bar:
        plan = convert(
            source,
            out,
            options,
            revision=revision,
            token=token,
            device=device,
            max_shard_bytes=limit,
            dtype=dtype,
            overwrite=overwrite,
            progress=bar,
        )
    if json or not quiet:
        _report(plan, Path(out), json, time.perf_counter() - start)


def _report(plan: Plan, out: Path, json: bool, seconds: float | None) -> None:
    """To stdout as JSON, to stderr for a person."""
    layers = plan.architecture.layers
    facts = {
        "out": str(out),
        "model_type": plan.architecture.model_type,
        "layers": len(layers),
        "experts": layers[0].experts,
        "channels": layers[0].channels,
        "hidden": layers[0].hidden,
        "dtype": layers[0].dtype,
        "tensors": sum(len(shard.tensors) for shard in plan.shards),
        "shards": {shard.name: shard.nbytes for shard in plan.shards},
        "quantized": plan.source.quantized,
        "source_bytes": plan.source.on_disk.nbytes,
        "bytes": plan.nbytes,
        "added_bytes": plan.added_bytes,
        "memory_bytes": plan.memory,
        "free_bytes": free_bytes(out),
    }
    if json:
        print_json({**facts, **({} if seconds is None else {"seconds": seconds})})
        return
    weights = sum(shard.nbytes for shard in plan.shards)
    rows = {
        "model": f"{plan.architecture.model_type}, {counted(len(layers), 'layer')} of {layers[0].experts} experts "
        f"({layers[0].hidden} x {layers[0].channels}, {layers[0].dtype})",
        "source": f"{size(plan.source.on_disk.nbytes)} in {counted(len(plan.source.on_disk.headers), 'file')}",
        **(
            {"dequantized": f"from {plan.source.quantized}: {size(plan.source.nbytes)} in BF16"}
            if plan.source.quantized
            else {}
        ),
        "augmented": f"{size(weights)} in {counted(len(plan.shards), 'shard')} "
        f"(+{percent(plan.added_bytes / plan.source.nbytes)}), up to {size(plan.nbytes)} with all other files",
        "memory": f"up to {size(plan.memory)}",
        "free disk": size(free_bytes(out)),
    }
    if seconds is not None:
        rows = {key: value for key, value in rows.items() if key not in ("memory", "free disk")}
        rows["in place"] = f"{out}, after {seconds:.1f} s"
    err.print(key_values(rows))


def _parse_size(text: str) -> int:
    """Bytes of "5GB", "500MB" or a plain number: decimal units, as on the Hub."""
    stripped = text.strip().upper()
    unit = next((u for u in _UNITS if u and stripped.endswith(u)), "")
    try:
        value = int(float(stripped.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError) as error:
        raise UsageError(f"max-shard-size is {text}", f"write it like 5GB; {MAX_SHARD_BYTES} bytes is usual") from error
    if value < 1:
        raise UsageError(f"max-shard-size is {text}", "choose more than nothing")
    return value
