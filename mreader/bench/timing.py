"""Time on the GPU: a CUDA graph of many calls, replayed; the median of the replays."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch

from mreader.errors import UsageError

REPLAYS = 30
_WARM_UP = 5
_COPIED = 1 << 30  # bytes: far more than any cache


def require_cuda() -> torch.device:
    """The CUDA device in use. UsageError where there is none."""
    if not torch.cuda.is_available():
        raise UsageError(
            "there is no CUDA device, and this command measures one",
            "run it on a machine with an NVIDIA GPU, under a CUDA build of torch",
        )
    return torch.device("cuda", torch.cuda.current_device())


def time_calls(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median microseconds of one of the calls, over replays of a graph that holds all of them in order."""
    graph = _capture(calls)
    for _ in range(_WARM_UP):
        graph.replay()
    return 1000 * median(_milliseconds(graph.replay, replays)) / len(calls)


def time_steps(step: Callable[[], object], steps: int = REPLAYS) -> float:
    """Median milliseconds of a step that is run as it is: what it captures is its own business."""
    for _ in range(_WARM_UP):
        step()
    return median(_milliseconds(step, steps))


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy within the device's memory: what a kernel can hope for."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / (1e-6 * time_calls([lambda: target.copy_(source)]))


def _capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph of all calls, after each has run once: compilation and first allocations do not belong into it."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _milliseconds(run: Callable[[], object], times: int) -> list[float]:
    """Of each run, queued one behind the other: the device never waits for Python where runs are long enough."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]
