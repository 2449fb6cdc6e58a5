"""`mreader bench serve`: its client against a small server, servers as processes, and what is made of the times.

vLLM itself: tests/test_vllm.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commands import mreader
from completions_server import running

from mreader.bench import serve
from mreader.bench.client import Answer, Client, Load, Served
from mreader.bench.plot import plot_serve
from mreader.bench.serve import (
    Engine,
    Measured,
    ServeBench,
    bench_serve,
    count_gpus,
    describe_failure,
    find_engines,
    prompt_tokens,
    refuse_contradictions,
    serving,
)
from mreader.errors import MreaderError, SourceError, UsageError
from mreader.progress import Progress

SERVER = Path(__file__).with_name("completions_server.py")
SMALL = Load(input_len=5, output_len=7, requests=3)


# The client


def test_every_user_asks_for_what_the_load_says_with_prompts_of_their_own() -> None:
    with running() as server:
        served = Client.of(server.url, vocabulary=50).measure(2, SMALL)
    assert served.concurrency == 2
    assert len(server.asked) == 2 * 3
    assert len({tuple(body.pop("prompt")) for body in server.asked}) == 6
    expected = {
        "model": "the model",
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.asked == [expected] * 6


def test_prompts_are_tokens_of_the_vocabulary_and_the_same_for_every_engine() -> None:
    prompts = []
    for _ in range(2):
        with running() as server:
            Client.of(server.url, vocabulary=4).measure(1, SMALL)
        prompts.append([body["prompt"] for body in server.asked])
    assert prompts[0] == prompts[1]
    assert {token for prompt in prompts[0] for token in prompt} == {0, 1, 2, 3}
    assert all(len(prompt) == 5 for prompt in prompts[0])


def test_users_ask_at_once() -> None:
    """The server answers only when it has as many requests as there are users."""
    with running(together=4) as server:
        Client.of(server.url, 50).measure(4, SMALL)
    assert len(server.asked) == 4 * 3


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ("short", "the server wrote 6 tokens in 6 pieces, 7 were asked for"),
        ("error", "the server broke off: .*out of memory"),
        ("refusal", "the server refuses: .*the prompt is too long"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(ends: str, cause: str) -> None:
    with running(ends=ends) as server, pytest.raises(MreaderError, match=cause):
        Client.of(server.url, 50).measure(1, SMALL)


def test_a_server_that_is_not_there_is_an_error() -> None:
    with running() as server:
        client = Client.of(server.url, 50)
    with pytest.raises(MreaderError, match=f"the server at {server.url}/v1/completions cannot be asked"):
        client.measure(1, SMALL)


def test_times_of_an_answer() -> None:
    answer = Answer(sent=10.0, first=10.5, last=12.5, tokens=5)
    assert answer.time_to_first_token == 0.5
    assert answer.time_per_token == 0.5  # four tokens after the first, in two seconds


def test_medians_and_throughput_of_several() -> None:
    answers = [Answer(0, 1, 5, 5), Answer(0, 2, 10, 5), Answer(1, 1.5, 13.5, 5)]
    served = Served.of(2, answers)
    assert (served.tpot, served.ttft) == (2.0, 1.0)
    assert served.throughput == pytest.approx(15 / 13.5)
    assert served.user_rate == 0.5


@pytest.mark.parametrize("wrong", [{"input_len": 0}, {"output_len": 1}, {"requests": 0}])
def test_a_load_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"is {next(iter(wrong.values()))}"):
        Load(**wrong)


# Servers


class FakeEngine(Engine):
    """What it starts is a server without vLLM."""

    def command(self, port: int, options: Sequence[str]) -> list[str]:
        return [sys.executable, str(SERVER), "--port", str(port), *options]


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_ends_when_this_process_is_told_to(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with (
            pytest.raises(SystemExit) as exit,
            serving(FakeEngine("sparse", "out"), [], tmp_path / "log") as url,
        ):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert exit.value.code == 128 + number
    with pytest.raises(MreaderError, match="cannot be asked"):
        Client.of(url, 50)


def test_a_hangup_that_nohup_has_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serving(FakeEngine("sparse", "out"), [], tmp_path / "log"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("failing", [False, True], ids=["at the end", "after an error"])
def test_a_server_ends_with_its_block_and_so_does_what_it_has_started(failing: bool, tmp_path: Path) -> None:
    child = tmp_path / "child"
    options = ["--child", str(child)]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with serving(FakeEngine("sparse", "out"), options, tmp_path / "log") as url:
            assert Client.of(url, 50).measure(1, SMALL).concurrency == 1
            assert is_running(int(child.read_text()))
            if failing:
                raise RuntimeError
    except RuntimeError:
        pass
    end = time.monotonic() + 20
    while is_running(int(child.read_text())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(int(child.read_text()))
    assert signal.getsignal(signal.SIGTERM) == handler


def test_no_proxy_stands_between(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(FakeEngine("sparse", "out"), [], tmp_path / "log") as url:
        assert Client.of(url, 50).measure(1, SMALL).concurrency == 1


def test_no_key_of_the_shell_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM would ask for it, and answer 401."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with serving(FakeEngine("sparse", "out"), [], tmp_path / "log") as url:
        assert Client.of(url, 50).measure(1, SMALL).concurrency == 1


def test_a_server_that_does_not_start_is_quoted_and_its_log_named(tmp_path: Path) -> None:
    with (
        pytest.raises(
            MreaderError, match="the dense server ended with status 1: MemoryError: no room for the cache"
        ) as error,
        serving(FakeEngine("dense", "out"), ["--die"], tmp_path / "log"),
    ):
        pass
    assert error.value.remedy == f"its log is {tmp_path / 'log'}"


def test_what_goes_wrong_later_names_the_log_as_well(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(MreaderError, match=r"sparse: the server refuses: .*the prompt is too long") as error,
        serving(FakeEngine("sparse", "out"), ["--ends", "refusal"], log) as url,
    ):
        Client.of(url, 50).measure(1, SMALL)
    assert error.value.remedy == f"its log is {log}"


def test_a_server_that_dies_in_an_answer_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(MreaderError, match="the sparse server ended with status 1: MemoryError: no room for the answer"),
        serving(FakeEngine("sparse", "out"), ["--ends", "death"], tmp_path / "log") as url,
    ):
        Client.of(url, 50).measure(1, SMALL)


def test_a_server_that_is_killed_says_by_what(tmp_path: Path) -> None:
    with (
        pytest.raises(MreaderError, match="the dense server was killed by SIGKILL"),
        serving(FakeEngine("dense", "out"), ["--ends", "kill"], tmp_path / "log") as url,
    ):
        Client.of(url, 50).measure(1, SMALL)


TRACEBACK = """(EngineCore pid=7) ERROR Traceback (most recent call last):
(EngineCore pid=7) ERROR   File "a.py", line 1
(EngineCore pid=7) ERROR mreader.errors.SourceError: tensor a.b is missing (convert again)
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (TRACEBACK, "mreader.errors.SourceError: tensor a.b is missing (convert again)"),
        (
            "usage: api_server.py\n [--model]\napi_server.py: error: no such option\n",
            "api_server.py: error: no such option",
        ),
        (
            "Traceback (most recent call last):\npydantic.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, the length is too long. [type=value_error, input_value=...]\n    For further information\n",
            "pydantic.ValidationError: 1 validation error for ModelConfig Value error, the length is too long.",
        ),
        (
            "Traceback (most recent call last):\nasyncio.exceptions.CancelledError: Task cancelled\n"
            "Traceback (most recent call last):\nvllm.EngineDeadError: EngineCore encountered an issue.\n",
            "vllm.EngineDeadError: EngineCore encountered an issue.",
        ),
        ("WARNING ImportError: not here\none\n\ntwo\nthree\nfour\n", "two | three | four"),
        ("", "it printed nothing"),
    ],
)
def test_the_first_error_of_a_log_says_why(log: str, why: str) -> None:
    assert describe_failure(log) == why


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ([], 1),
        (["--tensor-parallel-size", "4", "--dtype", "float32"], 4),
        (["-tp", "2", "-pp=2"], 4),
        (["--tensor_parallel_size=2", "--data-parallel-size", "3"], 6),
        (["--max-model-len", "2"], 1),
    ],
)
def test_gpus_of_a_server(options: list[str], gpus: int) -> None:
    assert count_gpus(options) == gpus


def test_a_number_of_gpus_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"--tensor-parallel-size.*'two'"):
        count_gpus(["-tp", "two"])


@pytest.mark.parametrize(
    "options",
    [
        ["--hf-overrides", '{"mreader": "dense"}'],
        ['--hf-overrides={"mreader": 0.3}'],
        ["--hf-overrides.mreader", "0.3"],
        ["--hf_overrides.mreader=0.3"],
    ],
)
def test_a_budget_among_the_servers_options_is_refused(options: list[str]) -> None:
    with pytest.raises(UsageError, match="says what to read, also to the dense engine"):
        refuse_contradictions(options)


@pytest.mark.parametrize("options", [["--port", "8000"], ["--port=8000"], ["--host", "::1"], ["--model", "other"]])
def test_another_place_among_the_servers_options_is_refused(options: list[str]) -> None:
    """It would hold, and the server be waited for where it is not."""
    with pytest.raises(UsageError, match=f"{options[0]} is not for you to say"):
        refuse_contradictions(options)


def test_other_options_are_not() -> None:
    refuse_contradictions(
        ["--model-impl", "vllm", "--hf-overrides", '{"rope_scaling": null}', "--served-model-name", "mreader"]
    )


# The whole


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "Engine", FakeEngine)
    monkeypatch.setattr(serve, "find_spec", lambda name: object())


def test_prompts_are_of_the_lower_half_of_the_text_model_s_tokens() -> None:
    text = {"vocab_size": 101}
    assert prompt_tokens({"model_type": "qwen3_moe", **text}) == 50
    assert prompt_tokens({"model_type": "qwen3_vl_moe", "text_config": text}) == 50
    assert prompt_tokens({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": text}}) == 50
    with pytest.raises(SourceError, match=r"vocab_size of config\.json is None"):
        prompt_tokens({"model_type": "qwen3_moe"})


def test_engines_and_what_they_read(tmp_path: Path) -> None:
    dense, sparse = find_engines(tmp_path, None, None)
    assert (dense.name, dense.model, dense.reads) == ("dense", str(tmp_path), "dense")
    assert (sparse.name, sparse.model, sparse.reads) == ("sparse", str(tmp_path), "")
    source, _, sparse = find_engines(tmp_path, "org/model", 0.25)
    assert (source.name, source.model, sparse.reads) == ("source", "org/model", "0.25")


def test_a_server_gets_its_options_after_ours() -> None:
    command = Engine("dense", "out").command(8123, ["-tp", "2"])
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert command[3:] == ["--model", "out", "--host", "127.0.0.1", "--port", "8123", "-tp", "2"]


def test_every_engine_is_measured_under_its_own_budget(
    fake_vllm: None, olmoe_augmented: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MREADER_READS", "dense")  # of the shell: no engine takes its budget from there
    bench = bench_serve(olmoe_augmented, "org/model", None, (1, 3), SMALL, ["-tp", "2"], Progress())
    assert [(measured.engine.name, measured.reads) for measured in bench.engines] == [
        ("source", "what the checkpoint says"),
        ("dense", "dense"),
        ("sparse", "what the checkpoint says"),
    ]
    assert [[row.concurrency for row in measured.rows] for measured in bench.engines] == [[1, 3]] * 3
    assert bench.gpus == 2


def small_bench() -> ServeBench:
    def rows(*tpots: float) -> list[Served]:
        return [Served(c, tpot, 0.02, c / tpot) for c, tpot in zip((1, 8), tpots, strict=True)]

    dense = Measured(Engine("dense", "out", "dense"), "all channels", rows(0.008, 0.016))
    sparse = Measured(Engine("sparse", "out"), None, rows(0.004, 0.010))
    return ServeBench(SMALL, 2, [dense, sparse])


def test_ratios_are_to_dense_and_rates_by_gpu() -> None:
    found = small_bench().as_json()
    assert {key: found[key] for key in ("input_len", "output_len", "requests", "gpus")} == {
        "input_len": 5,
        "output_len": 7,
        "requests": 3,
        "gpus": 2,
    }
    dense, sparse = found["engines"]
    assert [row["ratio"] for row in dense["rows"]] == [1, 1]
    assert [row["ratio"] for row in sparse["rows"]] == pytest.approx([2, 1.6])
    assert sparse["rows"][1] == {
        "concurrency": 8,
        "tpot_ms": 10.0,
        "ttft_ms": 20.0,
        "tokens_per_second_per_user": 100.0,
        "tokens_per_second_per_gpu": 400.0,
        "ratio": pytest.approx(1.6),
    }


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_serve(small_bench(), tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UsageError, match="cannot be written"):
        plot_serve(small_bench(), tmp_path / "serve.unknown")


def test_the_command_prints_a_table_or_json(fake_vllm: None, olmoe_augmented: Path) -> None:
    arguments = ("bench", "serve", olmoe_augmented, "--concurrency", "2,1", "--input-len", 4, "--output-len", 3, "-q")
    ran = mreader(*arguments, "--", "--max-model-len", 96)
    assert (ran.code, ran.err) == (0, "")
    lines = [line.split() for line in ran.out.splitlines()]
    assert [line[:2] for line in lines[-4:]] == [["1", "dense"], ["1", "sparse"], ["2", "dense"], ["2", "sparse"]]
    found: dict[str, Any] = json.loads(mreader(*arguments, "--json").out)
    assert [engine["name"] for engine in found["engines"]] == ["dense", "sparse"]
    assert [row["concurrency"] for row in found["engines"][1]["rows"]] == [1, 2]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--concurrency", "many"), "concurrency is many"),
        (("--concurrency", "0,1"), "concurrency is 0,1"),
        (("--output-len", "1"), "output len is 1"),
        (("--reads", "1.5"), "reads of 1.5 asked for"),
        (("--reads", "0.01"), "less than sketch and recovery alone need"),
        (("--", "-tp", "x"), "invalid int value"),
        (("--", "--port", "8000"), "--port is not for you to say"),
        (("--", '--hf-overrides={"mreader": 0.2}'), "says what to read"),
    ],
)
def test_what_cannot_be_is_said_before_a_server_starts(
    options: tuple[str, ...], cause: str, fake_vllm: None, olmoe_augmented: Path
) -> None:
    ran = mreader("bench", "serve", olmoe_augmented, *options)
    assert ran.code == 2
    assert cause in ran.cause


def test_the_table_is_there_even_if_the_picture_cannot_be(
    fake_vllm: None, olmoe_augmented: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--concurrency", 1, "--input-len", 4, "--output-len", 3, "--plot", tmp_path / "serve.unknown", "-q")
    ran = mreader("bench", "serve", olmoe_augmented, *arguments)
    assert (ran.code, "cannot be written" in ran.cause) == (2, True)
    assert "ms a token" in ran.out


@pytest.mark.parametrize(("error", "stays"), [(None, False), (MreaderError("?"), True), (KeyboardInterrupt(), False)])
def test_logs_stay_where_an_error_names_them(
    error: BaseException | None,
    stays: bool,
    fake_vllm: None,
    olmoe_augmented: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(Progress):
        def note(self, text: str) -> None:
            if error is not None:
                raise error

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with suppress(MreaderError, KeyboardInterrupt):
        bench_serve(olmoe_augmented, None, None, (1,), SMALL, [], Failing())
    assert [path.name for path in tmp_path.glob("*/*")] == (["dense.log"] if stays else [])


def test_a_folder_that_is_no_augmented_checkpoint(olmoe_tiny: Path) -> None:
    ran = mreader("bench", "serve", olmoe_tiny)
    assert ran.code == 2
    assert "is not an augmented checkpoint" in ran.cause


def test_without_vllm_one_line_says_so(olmoe_augmented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    ran = mreader("bench", "serve", olmoe_augmented)
    assert ran.code == 2
    assert "vLLM is not installed here" in ran.cause
