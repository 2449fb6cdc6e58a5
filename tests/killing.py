"""Conversions in processes of their own, which can be killed at a moment that the test chooses."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Forks of a process that has imported everything and has no threads yet.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["mreader.convert"])

# What Python reports (PEP 578) before it changes the file system.
_CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")


def start(task: Callable[..., Any], *arguments: Any) -> BaseProcess:
    process = _PROCESSES.Process(target=_run, args=(task, arguments))
    process.start()
    return process


def run(task: Callable[..., Any], *arguments: Any) -> int:
    """The exit status of `task(*arguments)` in a process of its own; negative for a signal."""
    process = start(task, *arguments)
    process.join()
    return int(process.exitcode or 0)


def run_and_kill(delay: float, task: Callable[..., Any], *arguments: Any) -> int:
    """The same, killed after `delay` seconds if it runs that long."""
    process = start(task, *arguments)
    time.sleep(delay)
    process.kill()
    process.join()
    return int(process.exitcode or 0)


def run_and_kill_at(step: int, folder: Path, task: Callable[..., Any], *arguments: Any) -> int:
    """The same, killed right before its change number `step` (from 0) to anything in `folder`."""
    return run(_killed_at, step, folder, task, arguments)


def count_changes(folder: Path, task: Callable[..., Any], *arguments: Any) -> int:
    """How many changes to `folder` a whole run makes."""
    counter = _PROCESSES.Value("i", 0)
    process = _PROCESSES.Process(target=_counted, args=(counter, folder, task, arguments))
    process.start()
    process.join()
    assert process.exitcode == 0
    return int(counter.value)


def _run(task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)  # the same bytes in every process
    os.environ["HF_HUB_OFFLINE"] = "1"
    task(*arguments)


def _killed_at(step: int, folder: Path, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    left = step

    def count() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    _on_change(folder, count)
    _run(task, arguments)


def _counted(counter: Any, folder: Path, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    def count() -> None:
        counter.value += 1

    _on_change(folder, count)
    _run(task, arguments)


def _on_change(folder: Path, call: Callable[[], None]) -> None:
    """Call before every change to `folder` or to what is in it."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            changes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            path, changes = arguments[0] if arguments else None, event in _CHANGES
        if changes and isinstance(path, str | bytes | os.PathLike):
            name = os.fsdecode(path)
            # relative to an open folder, as shutil.rmtree does it
            inside = name.startswith(str(folder)) or (event in _CHANGES and not Path(name).is_absolute())
            if inside:
                call()

    sys.addaudithook(hook)


def convert(source: Path, out: Path, max_shard_bytes: int, overwrite: bool = False) -> None:
    from mreader.convert import convert as task

    task(source, out, device="cpu", max_shard_bytes=max_shard_bytes, overwrite=overwrite)


def restore(out: Path, destination: Path) -> None:
    from mreader.restore import restore as task

    task(out, destination)


def convert_slowly(source: Path, out: Path, max_shard_bytes: int) -> None:
    """A conversion that takes a second longer."""
    from mreader.convert import convert as task
    from mreader.progress import Progress

    class Slow(Progress):
        def layer(self, number: int, layers: int) -> None:
            time.sleep(0.1)

    task(source, out, device="cpu", max_shard_bytes=max_shard_bytes, progress=Slow())
