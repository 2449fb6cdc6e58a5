"""Conversions in processes of their own, which can be killed at a moment that the test chooses."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mreader.cli.memory import keep_freed_memory

# Forks of a process that has imported everything and has no threads yet.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["mreader.convert", "mreader.augment"])

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


def changes(folder: Path, task: Callable[..., Any], *arguments: Any) -> list[str]:
    """What a whole run changes in `folder`, in order: "open NAME", "os.rename OLD NEW", "os.remove NAME", ..."""
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_recorded, args=(sender, folder, task, arguments))
    process.start()
    sender.close()
    try:
        recorded: list[str] = receiver.recv()
    finally:
        process.join()
    assert process.exitcode == 0
    return recorded


def count_changes(folder: Path, task: Callable[..., Any], *arguments: Any) -> int:
    """How many changes to `folder` a whole run makes."""
    return len(changes(folder, task, *arguments))


def peak_memory(task: Callable[..., Any], *arguments: Any) -> int:
    """The largest resident set, in bytes, of a process that does `task`.

    A process that pytest starts itself would begin with pytest's own; the fork server has no more than the imports.
    """
    peak = _PROCESSES.Value("q", 0)
    process = _PROCESSES.Process(target=_measured, args=(peak, task, arguments))
    process.start()
    process.join()
    assert process.exitcode == 0
    return int(peak.value)


def _run(task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)  # the same bytes in every process
    os.environ["HF_HUB_OFFLINE"] = "1"
    task(*arguments)


def _killed_at(step: int, folder: Path, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    left = step

    def count(_: str) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    _on_change(folder, count)
    _run(task, arguments)


def _recorded(sender: Connection, folder: Path, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    recorded: list[str] = []
    _on_change(folder, recorded.append)
    _run(task, arguments)
    sender.send(recorded)


def _measured(peak: Any, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    keep_freed_memory()  # as the command does
    _run(task, arguments)
    peak.value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _on_change(folder: Path, call: Callable[[str], None]) -> None:
    """Call before every change to `folder` or to what is in it, with what it is."""

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
                names = [os.fsdecode(a) for a in arguments[:2] if isinstance(a, str | bytes | os.PathLike)]
                names = names if event == "os.rename" else names[:1]  # the mode of "open" is text as well
                call(" ".join([event, *(os.path.relpath(n, folder) if Path(n).is_absolute() else n for n in names)]))

    sys.addaudithook(hook)


def convert(source: Path, out: Path, max_shard_bytes: int, overwrite: bool = False) -> None:
    from mreader.convert import convert as task

    task(source, out, device="cpu", max_shard_bytes=max_shard_bytes, overwrite=overwrite)


def restore(out: Path, destination: Path) -> None:
    from mreader.restore import restore as task

    task(out, destination)


def restore_with_limit(out: Path, destination: Path, largest_file: int) -> None:
    """The command, where no file may grow larger. Its exit status is that of the process."""
    _command_with_limit(largest_file, "restore", str(out), str(destination), "-q")


def restore_slowly(out: Path, destination: Path) -> None:
    """A restore that takes at least half a second."""
    from mreader.progress import Progress
    from mreader.restore import restore as task

    class Slow(Progress):
        def begin(self, what: str, total: int, unit: str = "bytes") -> None:
            self.second = 2 * max(total, 1)

        def advance(self, amount: int) -> None:
            time.sleep(amount / self.second)

    task(out, destination, progress=Slow())


def convert_with_limit(source: Path, out: Path, max_shard_bytes: int, largest_file: int) -> None:
    """The command, where no file may grow larger. Its exit status is that of the process."""
    size = str(max_shard_bytes)
    _command_with_limit(
        largest_file, "convert", str(source), str(out), "--device", "cpu", "-q", "--max-shard-size", size
    )


def _command_with_limit(largest_file: int, *arguments: str) -> None:
    from mreader.cli.main import main

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does when it starts: an error is raised instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["mreader", *arguments]
    main()


def convert_at_once(source: Path, out: Path) -> None:
    """A conversion into one shard."""
    convert(source, out, 10**12)


def convert_to_slow_disk(source: Path, out: Path) -> None:
    """A conversion that computes much faster than it writes, so that all that may wait to be written does."""
    from mreader.convert import convert as task
    from mreader.progress import Progress

    class Slow(Progress):
        def advance(self, nbytes: int) -> None:
            time.sleep(nbytes / 60e6)

    task(source, out, device="cpu", progress=Slow())


def convert_slowly(source: Path, out: Path, max_shard_bytes: int) -> None:
    """A conversion that takes a second longer."""
    from mreader.convert import convert as task
    from mreader.progress import Progress

    class Slow(Progress):
        def layer(self, number: int, layers: int) -> None:
            time.sleep(0.1)

    task(source, out, device="cpu", max_shard_bytes=max_shard_bytes, progress=Slow())
