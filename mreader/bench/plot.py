"""The block beside its peers as a picture. matplotlib is an extra of the package."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from mreader.errors import UsageError

if TYPE_CHECKING:
    from mreader.bench.block import BlockBench


def require_matplotlib() -> None:
    """UsageError where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("matplotlib is not installed", "pip install 'mreader[plot]'")


def plot_block(bench: "BlockBench", file: Path) -> None:
    """Times over batches, and how many times as long as the sparse block each peer takes. UsageError where it fails."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    batches = [row.batch for row in bench.rows]
    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
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
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be written: {error}", "choose another file, like bench.png") from error
    finally:
        pyplot.close(figure)
