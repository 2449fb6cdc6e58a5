"""Conversion speed and memory against a plain copy, on random weights of a real model's shape.

    python examples/bench_convert.py --shape qwen3-30b-a3b --layers 1 --shards 4

Prints seconds, GB of source a second and peak resident memory of `mreader convert` and of a copy of the same files that
is flushed to disk as well, each in a process of its own, with the source in the page cache. The bound that the project
keeps to is shown beside the memory: 2.5 times one layer and 1 GB.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"num_experts": 128, "hidden_size": 2048, "moe_intermediate_size": 768},
    "gemma4-26b": {"num_experts": 128, "hidden_size": 2816, "moe_intermediate_size": 704},
    "olmoe": {"num_experts": 64, "hidden_size": 2048, "moe_intermediate_size": 1024},
}
COPY = """
import os, sys, pathlib
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    with open(path, "rb") as source, open(pathlib.Path(sys.argv[2]) / path.name, "wb") as target:
        while data := source.read(1 << 24):
            target.write(data)
        target.flush()
        os.fsync(target.fileno())
"""


@dataclass(frozen=True)
class Run:
    """Wall seconds and peak resident bytes of one process."""

    seconds: float
    peak: int


def make_source(folder: Path, shape: dict[str, Any], layers: int, shards: int) -> None:
    """A random BF16 checkpoint of `layers` layers, its tensors dealt out to `shards` files.

    Each tensor is a stretch of one long row of normal numbers, from a random place on: drawing all takes minutes.
    """
    import torch
    from safetensors.torch import save_file

    E, H, I = shape["num_experts"], shape["hidden_size"], shape["moe_intermediate_size"]
    names = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", (H, I) if part == "down" else (I, H))
        for layer in range(layers)
        for expert in range(E)
        for part in ("gate", "up", "down")
    ]
    per_shard = -(-len(names) // shards)
    normal = (torch.randn(16 * H * I) * 0.02).to(torch.bfloat16)
    where: dict[str, str] = {}

    def stretch(rows: int, columns: int) -> torch.Tensor:
        begin = random.randrange(len(normal) - rows * columns)
        return normal[begin : begin + rows * columns].view(rows, columns).clone()

    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(names[i * per_shard : (i + 1) * per_shard])
        save_file({n: stretch(*s) for n, s in part.items()}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts_per_tok": 8,
        "hidden_act": "silu",
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))


def run(command: list[str]) -> Run:
    """Run `command` to its end, with the operating system's own account of its memory."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)} failed")
    return Run(time.perf_counter() - start, usage.ru_maxrss * 1024)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--codes", default="ternary")
    parser.add_argument("--folder", type=Path, help="where to work; by default the folder for temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        (folder / "source").mkdir()
        # In a process of its own: Linux lets a child begin with its parent's peak memory, so this one stays small.
        task = (folder / "source", SHAPES[arguments.shape], arguments.layers, arguments.shards)
        maker = multiprocessing.get_context("spawn").Process(target=make_source, args=task)
        maker.start()
        maker.join()
        size = sum(file.stat().st_size for file in (folder / "source").iterdir())
        bound = 2.5 * size / arguments.layers + 1e9
        convert = [sys.executable, "-m", "mreader.cli.main", "convert", str(folder / "source"), str(folder / "out")]
        convert += ["-q", "--device", arguments.device, "--codes", arguments.codes]
        copy = [sys.executable, "-c", COPY, str(folder / "source"), str(folder / "out")]
        torch_import = run([sys.executable, "-c", "import torch"]).seconds
        print(f"{arguments.shape}, {arguments.layers} layers, {size / 1e9:.2f} GB, {arguments.shards} shards")
        print(f"device {arguments.device}, {os.cpu_count()} CPUs; importing torch alone takes {torch_import:.1f} s")
        print(f"{'':8} {'seconds':>8} {'GB/s':>6} {'peak GB':>8}   (bound {bound / 1e9:.2f} GB)")
        for _ in range(arguments.repeat):
            for what, command in (("convert", convert), ("copy", copy)):
                shutil.rmtree(folder / "out", ignore_errors=True)
                if what == "copy":
                    (folder / "out").mkdir()
                os.sync()  # what the disk still has to do for the one before is not this one's
                result = run(command)
                print(f"{what:8} {result.seconds:8.2f} {size / result.seconds / 1e9:6.2f} {result.peak / 1e9:8.2f}")


if __name__ == "__main__":
    main()
