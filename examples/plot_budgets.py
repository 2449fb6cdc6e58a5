"""KL to the dense model against reads, for one augmented checkpoint: what a budget costs.

    python examples/plot_budgets.py build/olmoe-tiny --text mreader --png docs/budgets.png

Prints a Markdown table. Needs `pip install mreader[plot]`.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer

import mreader
from mreader.evaluate import Evaluation, cut_windows, evaluate, read_text
from mreader.runtime import set_budget

CHANNELS = (0.03, 0.0725, 0.122, 0.2, 0.3, 0.45)
# name -> what set_budget is told beside the channels
LINES = {
    "variance score, recovery": {"score": "variance", "rank": 32},
    "norm score, recovery": {"score": "norm", "rank": 32},
    "norm score, no recovery": {"score": "norm", "rank": 0},
}


def measure(out: Path, text: Path, windows: int, length: int) -> dict[str, list[Evaluation]]:
    """Every line of the plot, one evaluation a budget."""
    model = mreader.load(out, dtype=torch.float32)
    ids = cut_windows(read_text(text, AutoTokenizer.from_pretrained(out)), windows, length)
    found: dict[str, list[Evaluation]] = {}
    for name, options in LINES.items():
        for channels in CHANNELS:
            set_budget(model, channels=channels, coordinates=80, **options)
            found.setdefault(name, []).append(evaluate(model, ids))
    return found


def draw(found: dict[str, list[Evaluation]], title: str, png: Path) -> None:
    """KL over reads, one line a score."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, evaluations in found.items():
        axes.plot([100 * e.reads for e in evaluations], [e.kl for e in evaluations], marker="o", label=name)
    axes.set(yscale="log", xlabel="reads, % of the routed experts' weights", ylabel="KL, nats a token", title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(png, dpi=150)


def main() -> None:
    """Parse the command line, measure, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--png", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    arguments = parser.parse_args()
    found = measure(arguments.out, arguments.text, arguments.windows, arguments.length)
    draw(
        found,
        f"{arguments.out.name}, {arguments.windows} x {arguments.length} tokens of {arguments.text}",
        arguments.png,
    )
    print("| | k | reads | KL | top-1 |\n|---|---|---|---|---|")
    for name, evaluations in found.items():
        for e in evaluations:
            print(f"| {name} | {e.k} | {100 * e.reads:.1f} % | {e.kl:.4f} | {100 * e.top1:.1f} % |")


if __name__ == "__main__":
    main()
