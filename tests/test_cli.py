"""The command line on the small model: what it prints where, and what it exits with."""

import gc
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from sources import copied, edit_json
from transformers import PreTrainedModel

from mreader.cli.main import _COMMANDS, _Command, main
from mreader.generate import _refuse_too_long
from mreader.importing import uninterrupted, without_collecting

OWN_TEXT = Path(__file__).parent.parent / "mreader"


@dataclass(frozen=True)
class Ran:
    """Exit status, stdout and stderr of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value


@pytest.fixture
def mreader(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs the command line in this process."""

    def run(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["mreader", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        status = stopped.value.code
        return Ran(status if isinstance(status, int) else int(status is not None), printed.out, printed.err)

    return run


@pytest.fixture(scope="module")
def tokens(olmoe_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids of the project's own Python files."""
    from transformers import AutoTokenizer

    text = "".join(path.read_text() for path in sorted(OWN_TEXT.rglob("*.py")))[:20_000]
    file = tmp_path_factory.mktemp("tokens") / "own.npy"
    np.save(file, np.array(AutoTokenizer.from_pretrained(olmoe_tiny)(text)["input_ids"], dtype=np.uint16))
    return file


class TestGenerate:
    def test_text_goes_to_stdout_and_nothing_else(self, mreader: Callable[..., Ran], olmoe_augmented: Path) -> None:
        ran = mreader("generate", olmoe_augmented, "--prompt", "import os\n\n\ndef ", "--max-new-tokens", 8)
        assert ran.status == 0
        assert len(ran.out.strip()) > 0
        assert "import os" not in ran.out
        assert "tokens/s" not in ran.err

    def test_it_is_greedy_by_default_and_drawn_by_seed(
        self, mreader: Callable[..., Ran], olmoe_augmented: Path
    ) -> None:
        call = ["generate", olmoe_augmented, "--prompt", "class Config:", "--max-new-tokens", 12]
        assert mreader(*call).out == mreader(*call).out
        drawn = [mreader(*call, "--temperature", 1.5, "--seed", seed).out for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]

    def test_the_prompt_may_come_from_stdin(self, mreader: Callable[..., Ran], olmoe_augmented: Path) -> None:
        call = ["generate", olmoe_augmented, "--max-new-tokens", 6]
        assert mreader(*call, stdin="def main():").out == mreader(*call, "--prompt", "def main():").out

    def test_stats_say_what_was_read(self, mreader: Callable[..., Ran], olmoe_augmented: Path) -> None:
        call = ["generate", olmoe_augmented, "--prompt", "def f(", "--max-new-tokens", 4, "--json"]
        sparse, dense = mreader(*call, "--reads", 0.3).json, mreader(*call, "--dense").json
        assert 0.29 < sparse["reads"] <= 0.3
        assert sparse["k"] < 512
        assert (dense["reads"], dense["k"]) == (1.0, 512)
        # 4 layers of 8 experts of 3 matrices of 64 x 256 BF16 weights
        assert dense["bytes_per_token"] == 4 * 8 * 3 * 64 * 256 * 2
        assert sparse["bytes_per_token"] == pytest.approx(sparse["reads"] * dense["bytes_per_token"])
        assert sparse["tokens"] == dense["tokens"] == 4
        shown = mreader(*call[:-1], "--stats")
        assert "tokens/s" in shown.err
        assert "reads" in shown.err

    def test_all_channels_give_the_dense_text(self, mreader: Callable[..., Ran], olmoe_augmented: Path) -> None:
        call = ["generate", olmoe_augmented, "--prompt", "for i in ", "--max-new-tokens", 24, "--dtype", "float32"]
        assert mreader(*call, "--channels", 1.0).out == mreader(*call, "--dense").out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--prompt", ""], "the prompt is empty"),
            (["--prompt", "a\udcff"], "the prompt is not UTF-8"),
            (["--prompt", "a", "--reads", "0.1"], "the least possible is 17.32 %"),
            (["--prompt", "a", "--reads", "0.3", "--channels", "0.1"], "both channels and reads"),
            (["--prompt", "a", "--temperature", "-1"], "temperature is -1"),
            (["--prompt", "a", "--temperature", "nan"], "temperature is nan"),
            (["--prompt", "a", "--temperature", "inf"], "temperature is inf"),
            (["--prompt", "a", "--seed", "-1"], "seed is -1"),
            (["--prompt", "a", "--seed", str(2**64)], "seed is 18446744073709551616"),
            (["--prompt", "a", "--top-p", "nan"], "top-p is nan"),
            (["--prompt", "a", "--top-p", "0"], "top-p is 0"),
            (["--prompt", "a", "--max-new-tokens", "0"], "max-new-tokens is 0"),
            (["--prompt", "a", "--max-new-tokens", "2048"], "1 + 2048, are more than max_position_embeddings, 2048"),
            (["--prompt", "a " * 2000], " + 128, are more than max_position_embeddings, 2048"),
            (["--prompt", "a", "--chat"], "no chat template"),
            (["--prompt", "a", "--device", "cuda:99"], "cuda:99"),
            (["--prompt", "a", "--dtype", "int3"], "int3"),
            (["--prompt", "a", "--score", "best"], "best"),
        ],
    )
    def test_bad_options_end_in_two_lines(
        self, options: list[str], message: str, mreader: Callable[..., Ran], olmoe_augmented: Path
    ) -> None:
        ran = mreader("generate", olmoe_augmented, *options)
        assert ran.status == 2
        assert ran.out == ""
        lines = [line for line in ran.err.splitlines() if line.startswith(("error:", "help:"))]
        assert [line.split(":")[0] for line in lines] == ["error", "help"]
        assert message in " ".join(lines)

    @pytest.mark.parametrize(
        ("option", "value"),
        [("--channels", 0.1), ("--reads", 0.3), ("--coordinates", 80), ("--score", "rho"), ("--rank", 0)],
    )
    def test_a_budget_of_the_dense_model_is_refused(
        self, option: str, value: object, mreader: Callable[..., Ran], olmoe_augmented: Path
    ) -> None:
        ran = mreader("generate", olmoe_augmented, "--prompt", "a", "--dense", option, value)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err == (
            f"error: {option} says nothing about --dense, which reads everything\nhelp: leave {option} or --dense out\n"
        )

    def test_the_last_position_of_the_model_may_be_used(
        self, mreader: Callable[..., Ran], olmoe_augmented: Path, tmp_path: Path
    ) -> None:
        short = copied(olmoe_augmented, tmp_path / "short")
        edit_json(short / "config.json", lambda config: config.update(max_position_embeddings=4))
        call = ["generate", short, "--prompt", "a", "--max-new-tokens"]
        assert mreader(*call, 3).status == 0
        assert mreader(*call, 4).status == 2

    def test_a_model_without_a_last_position_is_left_alone(self) -> None:
        unlimited = SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace))
        _refuse_too_long(cast(PreTrainedModel, unlimited), 10**6, 10**6)

    def test_a_source_checkpoint_is_refused(self, mreader: Callable[..., Ran], olmoe_tiny: Path) -> None:
        ran = mreader("generate", olmoe_tiny, "--prompt", "a")
        assert ran.status == 2
        assert "is not an augmented checkpoint" in ran.err
        assert "mreader convert" in ran.err

    def test_the_chat_template_is_used(
        self, mreader: Callable[..., Ran], olmoe_augmented: Path, tmp_path: Path
    ) -> None:
        import shutil

        chatty = tmp_path / "chatty"
        shutil.copytree(olmoe_augmented, chatty)
        (chatty / "chat_template.jinja").write_text("# {{ messages[0]['content'] }}\ndef ")
        call = ["--max-new-tokens", 6]
        asked = mreader("generate", chatty, "--chat", "--prompt", "Sum", *call)
        assert asked.out == mreader("generate", olmoe_augmented, "--prompt", "# Sum\ndef ", *call).out


class TestEval:
    def _run(self, mreader: Callable[..., Ran], path: Path, tokens: Path, *options: object) -> dict[str, Any]:
        ran = mreader("eval", path, "--tokens", tokens, "--windows", 4, "--length", 64, "--json", *options)
        assert ran.status == 0, ran.err
        return ran.json

    def test_its_keys(self, mreader: Callable[..., Ran], olmoe_augmented: Path, tokens: Path) -> None:
        found = self._run(mreader, olmoe_augmented, tokens)
        assert set(found) == {"kl", "top1", "nll_dense", "nll", "reads", "k"}
        assert found["k"] == 62
        assert found["reads"] == pytest.approx(0.2943, abs=1e-4)
        assert 0 < found["kl"] < 0.3
        assert 0.7 < found["top1"] <= 1
        assert found["nll_dense"] < 4

    def test_all_channels_are_the_dense_model(
        self, mreader: Callable[..., Ran], olmoe_augmented: Path, tokens: Path
    ) -> None:
        found = self._run(mreader, olmoe_augmented, tokens, "--channels", 1.0)
        assert found["kl"] == pytest.approx(0, abs=1e-6)
        assert found["top1"] == 1
        assert found["nll"] == pytest.approx(found["nll_dense"], abs=1e-5)

    def test_what_helps_helps(self, mreader: Callable[..., Ran], olmoe_augmented: Path, tokens: Path) -> None:
        """More channels, recovery, and the variance score each bring the reader nearer to the dense model."""

        def kl(*options: object) -> float:
            return float(self._run(mreader, olmoe_augmented, tokens, *options)["kl"])

        base = kl("--score", "norm")
        assert kl("--score", "norm", "--channels", 0.2) < base
        assert kl("--score", "norm", "--rank", 0) > base
        assert kl("--score", "variance") < base

    def test_text_is_tokenized(self, mreader: Callable[..., Ran], olmoe_augmented: Path) -> None:
        ran = mreader("eval", olmoe_augmented, "--text", OWN_TEXT, "--windows", 1, "--length", 32)
        assert ran.status == 0
        assert "nats a token" in ran.out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "one of --tokens and --text"),
            (["--tokens", "none.npy"], "none.npy"),
            (["--tokens", "TOKENS", "--windows", "100000"], "ask for fewer"),
            (["--tokens", "TOKENS", "--length", "1"], "at least one window"),
            (["--text", "EMPTY"], "holds no text"),
            (["--tokens", "TOKENS", "--rank", "33"], "rank 33"),
        ],
    )
    def test_bad_options(
        self,
        options: list[str],
        message: str,
        mreader: Callable[..., Ran],
        olmoe_augmented: Path,
        tokens: Path,
        tmp_path: Path,
    ) -> None:
        places = {"TOKENS": str(tokens), "EMPTY": str(tmp_path)}
        ran = mreader("eval", olmoe_augmented, *[places.get(option, option) for option in options])
        assert ran.status == 2
        assert message in " ".join(ran.err.split())

    def test_ids_outside_the_vocabulary(
        self, mreader: Callable[..., Ran], olmoe_augmented: Path, tmp_path: Path
    ) -> None:
        np.save(tmp_path / "ids.npy", np.full(64, 60_000, dtype=np.uint16))
        ran = mreader("eval", olmoe_augmented, "--tokens", tmp_path / "ids.npy", "--windows", 1, "--length", 64)
        assert ran.status == 2
        assert "outside the vocabulary of 2048" in ran.err


class TestInspect:
    def test_json(self, mreader: Callable[..., Ran], olmoe_augmented: Path) -> None:
        found = mreader("inspect", olmoe_augmented, "--json").json
        assert (found["layers"], found["experts"], found["routed"], found["channels"], found["hidden"]) == (
            4,
            32,
            8,
            64,
            256,
        )
        # 4 layers x 32 experts x 3 matrices of 64 x 256 BF16 weights
        assert found["bytes"]["native"] == 4 * 32 * 3 * 64 * 256 * 2
        # a ternary sketch of rotated weights, which are nearly Gaussian: rho / E[w^2] = 0.127 / 0.667
        assert found["sketch_error"] == pytest.approx(0.127 / 0.667, rel=0.03)
        assert 0.2 < found["energy"] < 0.5
        default = next(line for line in found["budgets"] if line["channels"] == 0.122)
        assert (default["k"], default["candidates"]) == (62, 512)
        assert default["reads"] == pytest.approx(default["sketch"] + default["exact"] + default["recovery"])

    def test_table(self, mreader: Callable[..., Ran], olmoe_augmented: Path) -> None:
        shown = mreader("inspect", olmoe_augmented).out
        for word in ("olmoe", "32 a layer", "ternary", "29.43 %", "62 of 512", "energy"):
            assert word in shown


def test_version_and_help(mreader: Callable[..., Ran]) -> None:
    assert mreader("--version").out.startswith("mreader 0.")
    shown = mreader("--help").out
    for command in ("convert", "inspect", "verify", "restore", "generate", "eval", "push-to-hub"):
        assert command in shown


def test_arguments_are_called_as_in_the_readme() -> None:
    for name, arguments in {"convert": ["SOURCE", "OUT"], "restore": ["OUT", "DST"], "compare": ["MODEL"]}.items():
        command = _Command(name, *_COMMANDS[name]).load()
        assert [p.metavar for p in command.params if p.param_type_name == "argument"] == arguments


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_of_all_commands_is_that_of_each(name: str) -> None:
    command = _Command(name, *_COMMANDS[name])
    assert command.load().help.split("\n\n")[0].replace("\n", " ") == command.help


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--version"], ["--help"], ["nonsense"], ["--nonsense"]),
        *(["convert", "--help"], ["convert", "--nonsense"], ["convert", "/nowhere/at all", "out"]),
        *(["convert", "SOURCE", "out", option, "9999"] for option in ("--codes", "--rank", "--score", "--device")),
        ["convert", "SOURCE", "out", "--dry-run"],
    ],
    ids=" ".join,
)
def test_what_computes_nothing_does_not_import_torch(arguments: list[str], olmoe_tiny: Path) -> None:
    arguments = [str(olmoe_tiny) if argument == "SOURCE" else argument for argument in arguments]
    code = f"""
import sys
from mreader.cli.main import main
sys.argv = ["mreader", *{arguments}]
try:
    main()
except SystemExit:
    sys.exit(99 if "torch" in sys.modules else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(("first", "frozen"), [("", True), ("import torch", False)])
def test_a_conversion_ends_without_looking_for_garbage_where_it_imported_torch(
    first: str, frozen: bool, olmoe_tiny: Path, tmp_path: Path
) -> None:
    code = f"""
import atexit, gc, os, sys
from mreader.cli.main import main
{first}
# Called after all that is registered later. Python makes nothing of an exit status here.
atexit.register(lambda: os._exit(0 if (gc.get_freeze_count() > 10_000) == {frozen} else 99))
sys.argv = ["mreader", "convert", {str(olmoe_tiny)!r}, {str(tmp_path / "out")!r}, "-q", "--device", "cpu"]
main()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


_INTERRUPTED = """
import signal, sys
from mreader.device import pick_device
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background begins without
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
try:
    pick_device("cpu")
except KeyboardInterrupt:
    print(hasattr(sys.modules.get("torch"), "__version__"))
"""


def test_an_interrupt_waits_until_torch_is_imported() -> None:
    """In the middle it may crash the process, and more so where a thread then imports torch a second time."""
    ran = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


def test_in_a_thread_nothing_waits_for_an_interrupt() -> None:
    """Signals come to the main thread, and no other may say what becomes of them."""
    with ThreadPoolExecutor(1) as pool:
        before = signal.getsignal(signal.SIGINT)
        assert pool.submit(lambda: uninterrupted().__enter__()).result() is None
        assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_again_after_an_import_if_it_was_before(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with suppress(ImportError), without_collecting():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(
    "first", ["", "import mreader.verify", "from mreader.convert import plan_conversion", "from mreader import load"]
)
def test_functions_named_like_their_modules_stay_functions(first: str) -> None:
    code = f"""
{first}
import mreader
mreader.convert.__name__, mreader.restore.__name__, mreader.verify.__name__
from mreader import *
import mreader.restore
assert all(callable(getattr(mreader, name)) for name in mreader.__all__)
assert all(callable(thing) for thing in (convert, restore, verify))
assert set(mreader.__all__) <= set(dir(mreader))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("arguments", [["nonsense"], ["convert"], ["generate", "x", "--no-such-option"]])
def test_wrong_usage_is_status_2(arguments: list[str], mreader: Callable[..., Ran]) -> None:
    assert mreader(*arguments).status == 2


def test_debug_shows_the_traceback(
    mreader: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "Traceback" not in mreader("inspect", tmp_path).err
    monkeypatch.setenv("MREADER_DEBUG", "1")
    assert "Traceback" in mreader("inspect", tmp_path).err


def test_data_on_stdout_survives_a_closed_pipe(olmoe_augmented: Path) -> None:
    command = f"{sys.executable} -m mreader.cli.main inspect {olmoe_augmented} --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == '{\n  "model'
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_in_two_lines(mreader: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where native code turns it into an error of its own, as safetensors does."""

    def interrupted(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise ValueError("could not determine the shape") from error

    monkeypatch.setattr("mreader.cli.inspect.inspect_checkpoint", interrupted)
    before = signal.getsignal(signal.SIGINT)
    ran = mreader("inspect", "anything")
    assert ran.status == 130
    assert ran.err.startswith("error: interrupted\nhelp: ")
    assert signal.getsignal(signal.SIGINT) == before
