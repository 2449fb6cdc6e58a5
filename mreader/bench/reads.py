"""DRAM bytes that the decode block reads by Nsight Compute's counters, against those that are counted.

A child process runs the block under the profiler, on layers that it takes in turn, and counts what these very calls
touch. The profiler only looks: clocks and caches stay as they are.
"""

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mreader.bench.block import sparse_block
from mreader.bench.layers import draw_calls, make_layers
from mreader.bench.target import Target, find_target
from mreader.bench.timing import require_cuda
from mreader.bench.traffic import find_touched, touched_bytes
from mreader.budget import Budget
from mreader.errors import UsageError
from mreader.progress import Progress

BATCHES = (1, 8)
_METRIC = "dram__bytes_read.sum"
_NCU = "ncu"
_OPTIONS = (
    *("--metrics", _METRIC, "--csv", "--print-units", "base", "--profile-from-start", "off"),
    # As they are in use: a cache that was emptied before every kernel would read twice what two kernels share.
    *("--clock-control", "none", "--cache-control", "none"),
)


@dataclass(frozen=True)
class ReadsRow:
    """One batch, bytes of a call.

    counted:  in whole sectors, what tokens share counted once
    measured: by the profiler
    kernels:  name -> bytes measured
    """

    batch: int
    counted: int
    measured: int
    kernels: dict[str, int]

    @property
    def ratio(self) -> float:
        return self.measured / self.counted


@dataclass(frozen=True)
class Job:
    """What the child process is asked to do."""

    shape: str | None
    checkpoint: str | None
    codes: str | None
    stored_rank: int | None
    budget: dict[str, Any]
    batch: int

    def target(self) -> Target:
        """The target that the parent resolved, again."""
        return find_target(self.shape, Path(self.checkpoint) if self.checkpoint else None, self.codes, self.stored_rank)


def bench_reads(target: Target, budget: Budget, batches: Sequence[int], progress: Progress) -> list[ReadsRow]:
    """Measure and count. UsageError without a CUDA device or the profiler, or where it may not read the counters."""
    require_cuda()
    profiler = require_profiler()
    progress.begin("batches", len(batches), "batches")
    rows = []
    for batch in batches:
        random = target.folder is None
        job = Job(
            shape=target.name if random else None,
            checkpoint=str(target.folder) if target.folder else None,
            codes=target.options.codes if random else None,
            stored_rank=target.options.rank if random else None,
            budget=asdict(budget),
            batch=batch,
        )
        rows.append(_profile(profiler, job))
        progress.advance(1)
    return rows


def require_profiler() -> str:
    """The profiler's path. UsageError where it is not installed."""
    found = shutil.which(_NCU)
    if found is None:
        raise UsageError(
            "Nsight Compute (ncu) is not installed",
            "install the package nsight-compute of NVIDIA's CUDA repository, or put its ncu into PATH",
        )
    return found


def parse_counters(lines: Iterable[str]) -> Counter[str]:
    """Kernel -> bytes read from DRAM, of what `ncu --csv` prints between its own remarks and the program's."""
    table = [line for line in lines if line.startswith('"')]
    found: Counter[str] = Counter()
    for row in csv.DictReader(table):
        if row.get("Metric Name") == _METRIC:
            found[row["Kernel Name"].partition("(")[0]] += round(float(row["Metric Value"].replace(",", "")))
    return found


def make_reads_row(batch: int, calls: int, counted: int, counters: Counter[str]) -> ReadsRow:
    """The row of a batch: everything divided by the calls.

    counted, counters: of all calls together
    """
    kernels = {name: round(nbytes / calls) for name, nbytes in counters.items()}
    return ReadsRow(batch, round(counted / calls), round(sum(counters.values()) / calls), kernels)


def run_job(job: Job, report: Path) -> None:
    """In the child: count, compile, then run every call once under the profiler."""
    device = require_cuda()
    from mreader.kernels.layout import GPU

    target = job.target()
    shape = target.block_shape(GPU)
    settings = Budget(**job.budget).resolve(shape)
    layers = make_layers(target, device, Progress())
    calls = draw_calls(target.layer, job.batch, len(layers), layers[0].down)
    counted = sum(touched_bytes(shape, find_touched(layers[c.layer], c, settings), settings) for c in calls)
    prepare = sparse_block(layers, settings)
    prepared = [prepare(call) for call in calls]
    for run in prepared:  # compiles, and leaves the last layers in the cache, not the first
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for run in prepared:
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    report.write_text(json.dumps({"calls": len(calls), "counted": counted}), encoding="utf-8")


def _profile(profiler: str, job: Job) -> ReadsRow:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [profiler, *_OPTIONS, sys.executable, "-m", __name__, json.dumps(asdict(job)), str(report)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if "ERR_NVGPUCTRPERM" in ran.stdout + ran.stderr:
            raise UsageError(
                "Nsight Compute may not read the GPU's counters",
                "ask the machine's administrator to allow it: https://developer.nvidia.com/ERR_NVGPUCTRPERM",
            )
        counters = parse_counters(ran.stdout.splitlines())
        if ran.returncode or not report.exists() or not counters:
            lines = (ran.stderr.strip() or ran.stdout.strip() or "it printed nothing").splitlines()
            raise UsageError(f"Nsight Compute failed: {lines[-1]}", "run `ncu --version` to see whether it works here")
        done = json.loads(report.read_text(encoding="utf-8"))
    return make_reads_row(job.batch, done["calls"], done["counted"], counters)


if __name__ == "__main__":
    run_job(Job(**json.loads(sys.argv[1])), Path(sys.argv[2]))
