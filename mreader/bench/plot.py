"""Measurements as pictures. matplotlib is an extra of the package."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mreader.errors import UsageError

if TYPE_CHECKING:
    from mreader.bench.block import BlockBench
    from mreader.bench.serve import ServeBench


def require_matplotlib() -> None:
    """UsageError where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("matplotlib is not installed", "pip install 'mreader[plot]'")


def plot_block(bench: "BlockBench", file: Path) -> None:
    """Times over batches, and how many times as long as the sparse block each peer takes. UsageError where it fails."""
    batches = [row.batch for row in bench.rows]
    with _figure(file, 2) as (figure, (times, ratios)):
        times.plot(batches, [row.microseconds for row in bench.rows], "o-", color="black", label="sparse")
        times.plot(batches, [row.floor for row in bench.rows], ":", color="gray", label="floor of its bytes")
        ratios.axhline(1, color="black", linewidth=1)
        for name in bench.rows[0].peers:
            times.plot(batches, [row.peers[name] or float("nan") for row in bench.rows], "o-", label=name)
            ratios.plot(batches, [row.ratios[name] or float("nan") for row in bench.rows], "o-", label=name)
        for axes, label in ((times, "us a block"), (ratios, "times as fast as ...")):
            axes.set_xscale("log", base=2)
            axes.set_xticks(batches, [str(batch) for batch in batches])
            axes.set_xlabel("batch")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
            axes.legend()
        times.set_yscale("log")
        figure.suptitle(f"{bench.target}, {100 * bench.reads:.1f} % of the dense reads, {bench.device}")


def plot_serve(bench: "ServeBench", file: Path) -> None:
    """What a GPU writes a second over what a user reads, a line an engine. UsageError where it fails."""
    with _figure(file, 1) as (figure, axes):
        for measured in bench.engines:
            rates = [(row.user_rate, bench.gpu_rate(row)) for row in measured.rows]
            axes.plot(*zip(*rates, strict=True), "o-", label=measured.engine.name)
            for row, place in zip(measured.rows, rates, strict=True):
                axes.annotate(str(row.concurrency), place, textcoords="offset points", xytext=(5, 5), fontsize="small")
        axes.set_xlabel("tokens a second and user")
        axes.set_ylabel("output tokens a second and GPU")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.suptitle(
            f"prompts of {bench.load.input_len} tokens, answers of {bench.load.output_len}; users at a time"
        )


@contextmanager
def _figure(file: Path, columns: int) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which is in `file` when the block ends. UsageError where it cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(5.5 * columns, 4.2), layout="constrained")
    try:
        yield figure, axes
        _save(figure, file)
    finally:
        pyplot.close(figure)


def _save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be written: {error}", "choose another file, like bench.png") from error
