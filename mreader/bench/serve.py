"""vLLM as a server on one augmented checkpoint, dense and sparse, one after the other, under the same load."""

import argparse
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mreader.bench.client import Client, Load, Served, open_here
from mreader.budget import Budget
from mreader.errors import MreaderError, SourceError, UsageError
from mreader.formats.architectures import text_config
from mreader.formats.augmented import Augmented, open_augmented
from mreader.inspection import block_shape
from mreader.progress import Progress
from mreader.vllm.budget import DENSE, READS

CONCURRENCIES = (1, 2, 4, 8, 16, 32)
_SERVER = "vllm.entrypoints.openai.api_server"
_READY_WITHIN = 3600  # seconds: large models are read from slow disks, and compiled
_ENDS_WITHIN = 30
_DIES_WITHIN = 2
_REPORTED = re.compile(r"mreader: a decoded token reads (.+)")
# Of a pydantic error the second line says what is wrong.
_ERROR = re.compile(
    r"\b((?:\w+\.)*\w*(?:Error|Exception): (?:\d+ validation errors? for .+\n)?.+?)(?= \[type=|$)", re.MULTILINE
)
_BUDGET = re.compile(r'"mreader"|^--hf.overrides\.mreader')
_PLACE = re.compile(r"--(model|host|port|uds)(=|$)")
_GPUS = (
    ("--tensor-parallel-size", "--tensor_parallel_size", "-tp"),
    ("--pipeline-parallel-size", "--pipeline_parallel_size", "-pp"),
    ("--data-parallel-size", "--data_parallel_size", "-dp"),
)


@dataclass(frozen=True)
class Engine:
    """A server to measure.

    name:  "source", "dense" or "sparse"
    model: folder, or for the source also a Hub id
    reads: what MREADER_READS says to it; empty for the checkpoint's own budget, or another checkpoint
    """

    name: str
    model: str
    reads: str = ""

    def command(self, port: int, options: Sequence[str]) -> list[str]:
        """What starts it, under the running Python. `vllm serve` is the same, but not in every build of vLLM."""
        own = ["--model", self.model, "--host", "127.0.0.1", "--port", str(port)]
        return [sys.executable, "-m", _SERVER, *own, *options]


@dataclass(frozen=True)
class Measured:
    """What one engine did.

    reads: in its own words, of its log; None where it says nothing
    """

    engine: Engine
    reads: str | None
    rows: list[Served]


@dataclass(frozen=True)
class ServeBench:
    """A whole measurement: the engines in the order in which they ran, of which `dense` is what others compare with."""

    load: Load
    gpus: int
    engines: list[Measured]

    def ratio(self, row: Served) -> float:
        """How many times as long as `row`'s a token of the dense engine takes, with as many users."""
        (dense,) = (measured for measured in self.engines if measured.engine.name == DENSE)
        return next(other.tpot for other in dense.rows if other.concurrency == row.concurrency) / row.tpot

    def gpu_rate(self, row: Served) -> float:
        """Tokens of all answers a second and GPU."""
        return row.throughput / self.gpus

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        engines = [
            {
                "name": measured.engine.name,
                "model": measured.engine.model,
                "reads": measured.reads,
                "rows": [
                    {
                        "concurrency": row.concurrency,
                        "tpot_ms": 1e3 * row.tpot,
                        "ttft_ms": 1e3 * row.ttft,
                        "tokens_per_second_per_user": row.user_rate,
                        "tokens_per_second_per_gpu": self.gpu_rate(row),
                        "ratio": self.ratio(row),
                    }
                    for row in measured.rows
                ],
            }
            for measured in self.engines
        ]
        return {**asdict(self.load), "gpus": self.gpus, "engines": engines}


def find_engines(out: Path, source: str | None, reads: float | None) -> list[Engine]:
    """The engines of an augmented checkpoint, with its source where that is given."""
    stock = [] if source is None else [Engine("source", source)]
    budget = "" if reads is None else str(reads)
    return [*stock, Engine(DENSE, str(out), DENSE), Engine("sparse", str(out), budget)]


def count_gpus(options: Sequence[str]) -> int:
    """How many GPUs a server with these options takes. UsageError where one of them is no number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in _GPUS:
        parser.add_argument(*names, type=int, default=1)
    try:
        sizes, _ = parser.parse_known_args(options)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}", "see `vllm serve --help`") from error
    return math.prod(vars(sizes).values())


def refuse_contradictions(options: Sequence[str]) -> None:
    """UsageError where options of the servers say what to read, which would hold for the dense one as well, or what to
    serve and where, which would be asked elsewhere.
    """
    for option in options:
        if _BUDGET.search(option):
            raise UsageError(
                f"{option} says what to read, also to the dense engine", "give --reads to `mreader bench serve`"
            )
        if _PLACE.match(option):
            raise UsageError(f"{option} is not for you to say: this command chooses it", "leave it out")


def refuse_reads(opened: Augmented, reads: float | None) -> None:
    """UsageError where no layer can be read so. A GPU lays out more for a sketch: what is short of that, it says."""
    Budget.of(opened.options).change(reads=reads).resolve(block_shape(opened))


def require_vllm() -> None:
    """UsageError where it is not installed."""
    if find_spec("vllm") is None:
        raise UsageError(
            "vLLM is not installed here, and this command measures it",
            "install vLLM 0.25 or newer as its documentation says, and mreader beside it",
        )


def bench_serve(
    out: Path,
    source: str | None,
    reads: float | None,
    concurrencies: Sequence[int],
    load: Load,
    options: Sequence[str],
    progress: Progress,
) -> ServeBench:
    """Serve and measure, engine by engine.

    reads:         the sparse engine's budget as a fraction of the dense reads, None for the checkpoint's own
    concurrencies: users at a time
    options:       of the servers

    Raises what `open_augmented` raises, UsageError without vLLM, for options that contradict the engines and for reads
    that cannot be, and MreaderError where a server does not start or breaks off, with its own words.
    """
    refuse_contradictions(options)
    gpus = count_gpus(options)
    opened = open_augmented(out)
    refuse_reads(opened, reads)
    vocabulary = prompt_tokens(opened.checkpoint.config)
    require_vllm()
    engines = find_engines(out, source, reads)
    progress.begin("serving", len(engines) * len(concurrencies), "measurements")
    with _logs() as logs:
        measured = [
            _measure(engine, concurrencies, load, options, vocabulary, logs / f"{engine.name}.log", progress)
            for engine in engines
        ]
    return ServeBench(load, gpus, measured)


@contextmanager
def _logs() -> Iterator[Path]:
    """A folder for what servers print. After an error it stays, and the error says where; not so after Ctrl-C."""
    folder = Path(mkdtemp(prefix="mreader-serve-"))
    stays = False
    try:
        yield folder
    except Exception:
        stays = True
        raise
    finally:
        if not stays:
            shutil.rmtree(folder)


def _measure(
    engine: Engine,
    concurrencies: Sequence[int],
    load: Load,
    options: Sequence[str],
    vocabulary: int,
    log: Path,
    progress: Progress,
) -> Measured:
    rows = []
    with serving(engine, options, log) as url:
        client = Client.of(url, vocabulary)
        for concurrency in concurrencies:
            # The first steps of a new size compile kernels.
            client.measure(concurrency, replace(load, requests=1))
            row = client.measure(concurrency, load)
            progress.note(
                f"{engine.name}, {concurrency} at a time: {1e3 * row.tpot:.2f} ms a token, "
                f"the first after {1e3 * row.ttft:.0f} ms"
            )
            progress.advance(1)
            rows.append(row)
    found = _REPORTED.search(log.read_text(errors="replace"))
    return Measured(engine, found[1] if found else None, rows)


def prompt_tokens(config: Mapping[str, Any]) -> int:
    """Prompts are of tokens below this: the lower half of a model's; placeholders of images and the like come last."""
    size = text_config(config).get("vocab_size")
    if not isinstance(size, int) or size < 2:
        raise SourceError(f"vocab_size of config.json is {size!r}", "restore it from the source's config.json")
    return size // 2


@contextmanager
def serving(engine: Engine, options: Sequence[str], log: Path) -> Iterator[str]:
    """The engine's server while the block lasts; its URL. Its process group ends with the block, however that ends.

    log: what it prints

    Raises MreaderError, which names the log, where it ends before it answers, and for one that the block raises.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as output, _leaving_when_told():
        server = subprocess.Popen(
            engine.command(port, options),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A key would be asked of no one but this process.
            env={name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"} | {READS: engine.reads},
            start_new_session=True,
        )
        told = 0  # bytes of the log that were there while all was well
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_it_answers(server, url)
            told = log.stat().st_size
            yield url
        except MreaderError as error:
            ended = _describe_end(server, log, told)
            cause = f"the {engine.name} server {ended}" if ended else f"{engine.name}: {error.cause}"
            where = f"its log is {log}"
            raise MreaderError(cause, f"{error.remedy}; {where}" if error.remedy and not ended else where) from error
        finally:
            _end(server)


@contextmanager
def _leaving_when_told() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that closes, end the process as an exception does: once, and it cleans up."""

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number in numbers if before[number] != signal.SIG_IGN]  # nohup has SIGHUP ignored
    for number in heeded:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def _wait_until_it_answers(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _READY_WITHIN
    while time.monotonic() < end:
        if server.poll() is not None:
            raise MreaderError("the server ended before it answered")
        with suppress(OSError), open_here(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise MreaderError(f"the server did not answer within {_READY_WITHIN} s")


def _describe_end(server: subprocess.Popen[bytes], log: Path, told: int) -> str | None:
    """How a server ended, and why, by its log from byte `told` on; None while it runs."""
    with suppress(subprocess.TimeoutExpired):  # its connections close before it does
        status = server.wait(_DIES_WITHIN)
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}: {describe_failure(log.read_bytes()[told:].decode(errors='replace'))}"
    return None


def describe_failure(log: str) -> str:
    """Why a server failed: the first error behind a traceback in its log, or its last line's, or else its last lines.

    Tasks that are cancelled are so because of something else.
    """
    _, _, traced = log.partition("Traceback (most recent call last)")
    errors = (" ".join(error[1].split()) for error in _ERROR.finditer(traced))
    if error := next((error for error in errors if "CancelledError" not in error.split(":")[0]), None):
        return error
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = 1 if lines and " error: " in lines[-1] else 3
    return " | ".join(lines[-told:]) or "it printed nothing"


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server and all that it has started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):  # the second one also for children that outlive it
        with suppress(ProcessLookupError):
            os.killpg(server.pid, kind)
        with suppress(subprocess.TimeoutExpired):
            server.wait(_ENDS_WITHIN)
