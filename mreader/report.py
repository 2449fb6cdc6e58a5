"""A comparison of selectors as a table, as figures, and as one page that needs nothing else."""

import csv
import html
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from mreader.errors import UsageError

if TYPE_CHECKING:
    from mreader.selectors.pairs import Pair
    from mreader.selectors.runs import Run

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:nth-child(-n+4), td:nth-child(-n+4) { text-align: left; }
.infeasible { color: #999; }
</style>
</head>
<body>
<h1>$title</h1>
$figures
<h2>All runs</h2>
<div class="wide"><table><thead><tr>$head</tr></thead><tbody>
$rows
</tbody></table></div>
</body>
</html>
""")
_COLUMNS = ("selector", "variant", "keep", "recovery", "reads_asked", "reads_used", "k", "kl", "top1", "note")
_PICTURES = ("png", "svg", "pdf")
_SMOOTHED = 16  # positions that a point of the drift figure averages


def refuse_bad_files(csv: Path | None, html: Path | None, plot: Path | None) -> None:
    """UsageError where one of the files could not be written after hours of work."""
    if (html is not None or plot is not None) and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("matplotlib is not installed", "pip install 'mreader[plot]'")
    for file in (csv, html, plot):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise UsageError(f"{file} cannot be written", "name a file in a folder that there is")
    if plot is not None:
        _kind_of_picture(plot)


def _kind_of_picture(file: Path) -> str:
    kind = file.suffix.lstrip(".").lower()
    if kind not in _PICTURES:
        raise UsageError(f"{file} is no picture", "name a .png, .svg or .pdf file")
    return kind


def write_csv(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """One line a run, the keys of the first as header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    _write(file, text.getvalue().encode())


def write_plot(runs: "Sequence[Run]", file: Path) -> None:
    """KL against the reads really used, a line a selector; of ablations, what each change does to it."""
    _, draw = _figures(runs)[0]
    _write(file, _picture(runs, draw, _kind_of_picture(file)))


def write_html(runs: "Sequence[Run]", title: str, file: Path) -> None:
    """Figures and table in one file."""
    drawn = [
        f"<h2>{html.escape(name)}</h2>\n{_picture(runs, draw, 'svg').decode().partition('<svg')[2].join(('<svg', ''))}"
        for name, draw in _figures(runs)
    ]
    page = _PAGE.substitute(
        title=html.escape(title),
        figures="\n".join(drawn),
        head="".join(f"<th>{name}</th>" for name in _COLUMNS),
        rows="\n".join(_html_row(run) for run in in_order(runs)),
    )
    _write(file, page.encode())


def in_order(runs: "Sequence[Run]") -> "list[Run]":
    """Best first at every budget; what cannot keep to it comes last."""
    return sorted(runs, key=lambda run: (run.budget, run.kl is None, run.kl or 0.0))


Draw = Callable[[Any, "Sequence[Run]"], None]


def _figures(runs: "Sequence[Run]") -> list[tuple[str, Draw]]:
    """What there is to see, the most important first."""
    if any(run.job.variant for run in runs):
        return [("What one change does to KL, at equal reads", _draw_ablations)]
    return [
        ("KL against reads", _draw_kl),
        ("Keep rules: threshold against top-k at the same reads", _draw_pairs),
        ("Reads of thresholds over the position in a window", _draw_drift),
        ("Channels kept by layer", _draw_layers),
    ]


def _html_row(run: "Run") -> str:
    cells = (run.row()[name] for name in _COLUMNS)
    shown = (
        "" if cell is None else f"{cell:.4f}" if isinstance(cell, float) else html.escape(str(cell)) for cell in cells
    )
    return f"<tr{' class=infeasible' if run.kl is None else ''}>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>"


def _picture(runs: "Sequence[Run]", draw: Draw, kind: str) -> bytes:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    try:
        draw(axes, [run for run in runs if run.kl is not None])
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", fontsize="small")
        bytes_ = io.BytesIO()
        figure.savefig(bytes_, format=kind, dpi=150)
    finally:
        pyplot.close(figure)
    return bytes_.getvalue()


def _color(run: "Run") -> str:
    """One for each selector, the same in all figures."""
    from mreader.selectors.scores import SCORES

    return "black" if run.job.selector == "reader" else f"C{list(SCORES).index(run.job.selector) - 1}"


def _draw_kl(axes: Any, runs: "Sequence[Run]") -> None:
    lines: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.keep_name in ("topk", "threshold"):
            lines.setdefault((run.job.selector, run.keep_name), []).append(run)
    for (selector, keep), members in lines.items():
        best = sorted(_best_by_budget(members), key=lambda run: run.reads or 0.0)
        axes.plot(
            [100 * (run.reads or 0.0) for run in best],
            [run.kl for run in best],
            "o-" if keep == "topk" else "x:",
            color=_color(members[0]),
            label=f"{selector}, {keep}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("reads, % of the dense ones")
    axes.set_ylabel("KL(dense || sparse), nats a token")


def _best_by_budget(runs: "Sequence[Run]") -> "list[Run]":
    """The recovery with the lowest KL at every budget."""
    best: dict[float, Run] = {}
    for run in sorted(runs, key=lambda run: run.kl or 0.0):
        best.setdefault(run.budget, run)
    return list(best.values())


def _draw_pairs(axes: Any, runs: "Sequence[Run]") -> None:
    from mreader.selectors.pairs import keep_pairs

    pairs = keep_pairs(runs)
    names = [f"{run.job.selector}, {run.job.recovery}, {100 * run.budget:.4g} %" for run in (p.run for p in pairs)]
    _draw_differences(axes, pairs, names)
    axes.set_xlabel("KL of the threshold less that of top-k at the reads it used, % of the latter")


def _draw_ablations(axes: Any, runs: "Sequence[Run]") -> None:
    from mreader.selectors.ablations import ablation_pairs

    pairs = ablation_pairs(runs)
    names = [f"{run.job.variant}, {100 * run.budget:.4g} %" for run in (pair.run for pair in pairs)]
    _draw_differences(axes, pairs, names)
    axes.set_xlabel("KL less that of the reader as it is, % of the latter")


def _draw_differences(axes: Any, pairs: "Sequence[Pair]", names: Sequence[str]) -> None:
    """Of each pair the difference of the first, relative to the other; bars are two standard errors."""
    units = [100 / (pair.other.kl or 1.0) for pair in pairs]
    axes.errorbar(
        [unit * pair.difference for unit, pair in zip(units, pairs, strict=True)],
        range(len(pairs)),
        xerr=[2 * unit * pair.error for unit, pair in zip(units, pairs, strict=True)],
        fmt="o",
    )
    axes.figure.set_figheight(max(5.0, 0.2 * len(pairs)))
    axes.set_yticks(range(len(pairs)), names, fontsize="small")
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1)


def _draw_drift(axes: Any, runs: "Sequence[Run]") -> None:
    for run in _largest_thresholds(runs):
        smooth = _smoothed(run.reads_positions)
        middles = [_SMOOTHED * i + _SMOOTHED / 2 for i in range(len(smooth))]
        axes.plot(middles, [100 * value for value in smooth], color=_color(run), label=run.job.selector)
    axes.set_xlabel("position in the window")
    axes.set_ylabel("reads, % of the dense ones")


def _draw_layers(axes: Any, runs: "Sequence[Run]") -> None:
    for run in _largest_thresholds(runs):
        axes.plot(range(len(run.kept_layers)), run.kept_layers, "o-", color=_color(run), label=run.job.selector)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer")
    axes.set_ylabel("channels kept a token")


def _largest_thresholds(runs: "Sequence[Run]") -> "list[Run]":
    """Of every selector the threshold at the largest budget, nothing recovered."""
    largest = max((run.budget for run in runs), default=0.0)
    return [r for r in runs if r.keep_name == "threshold" and r.job.recovery == "none" and r.budget == largest]


def _smoothed(values: Sequence[float]) -> list[float]:
    parts = (values[i : i + _SMOOTHED] for i in range(0, len(values), _SMOOTHED))
    return [sum(part) / len(part) for part in parts]


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error}", "choose another file") from error
