"""The plugin in vLLM's CPU engine, against stock vLLM and the transformers runtime: `make test-vllm`.

float32 at temperature 0, token for token. Engines run in this process, the ranks of a parallel one in their own.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import save_tiny
from commands import mreader as mreader_command
from sources import edit_json, edit_shard
from transformers import AutoModelForCausalLM

import mreader
from mreader.bench.checkpoint import write_random
from mreader.bench.shapes import SHAPES, ModelShape
from mreader.errors import SourceError, UnsupportedError, UsageError
from mreader.formats.augmented import FormatOptions
from mreader.kernels.route import route
from mreader.kernels.tuning import LayerShape
from mreader.progress import Progress

HAS_VLLM = find_spec("vllm") is not None
pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not here: `make test-vllm` has it in its own venv"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
if HAS_VLLM:  # which reads them when it is imported
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="0|1")

MODELS = ("olmoe", "qwen3_moe")
# Whose tensors vLLM's model takes in by code of its own: other names, shared experts, a dense first layer.
OTHERS: dict[str, dict[str, Any]] = {"mixtral": {}, "deepseek_v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}}
NEW = 32
ALL, QUARTER = {"channels": 1.0}, {"channels": 0.25}
Tokens = list[list[int]]


def prompts(model: str) -> Tokens:
    """Five, of different lengths, one beyond a block of the cache."""
    vocabulary = 1000 if model == "olmoe" else 90
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in (5, 9, 17, 2, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<model>: sources; <model>-mreader: the same, converted."""
    root = tmp_path_factory.mktemp("vllm")
    shutil.copytree(Path(__file__).parent.parent / "examples/olmoe-tiny", root / "olmoe")
    # vLLM's OLMoE takes no notice of tie_word_embeddings, and would end in logits of zero
    untie(root / "olmoe")
    save_tiny(
        root / "qwen3_moe", "qwen3_moe", dtype=torch.float32, head_dim=64, norm_topk_prob=True, initializer_range=0.2
    )
    for model, sizes in OTHERS.items():
        save_tiny(root / model, model, dtype=torch.float32, initializer_range=0.2, **sizes)
    for model in (*MODELS, *OTHERS):
        mreader.convert(root / model, root / f"{model}-mreader", device="cpu")
    return root


def untie(source: Path) -> None:
    """Store the output embedding as a tensor of its own."""
    edit_shard(
        source / "model.safetensors",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    edit_json(source / "config.json", lambda config: config.update(tie_word_embeddings=False))


@contextmanager
def engine(model: Path, budget: Any = None, **options: Any) -> Iterator[Any]:
    """vLLM with a model, and nothing left of it afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    overrides = {} if budget is None else {"hf_overrides": {"mreader": budget}}
    sizes = {"max_model_len": 96, "kv_cache_memory_bytes": 1 << 26}
    try:
        llm = LLM(
            str(model), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, **sizes, **overrides, **options
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()
    finally:
        cleanup_dist_env_and_memory()


def greedy() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)


@functools.cache
def served(model: Path, budget: str = "null", **options: Any) -> Tokens:
    """What vLLM answers to the prompts; the budget as JSON."""
    with engine(model, json.loads(budget), **options) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts(model.name.removesuffix("-mreader"))]
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(asked, greedy(), use_tqdm=False)]


def generated(model: Path, budget: dict[str, float]) -> Tokens:
    """What the transformers runtime answers, one prompt at a time."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    mreader.set_budget(loaded, **budget)
    loaded.generation_config.eos_token_id = None  # as ignore_eos
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    asked = prompts(model.name.removesuffix("-mreader"))
    return [loaded.generate(torch.tensor([prompt]), **arguments)[0, len(prompt) :].tolist() for prompt in asked]


def test_embeddings_that_vllm_does_not_tie_are_tied(folder: Path, tmp_path: Path) -> None:
    """Stock vLLM writes token 0 for ever with such an OLMoE."""
    mreader.convert(Path(__file__).parent.parent / "examples/olmoe-tiny", tmp_path / "olmoe-mreader", device="cpu")
    assert served(tmp_path / "olmoe-mreader", json.dumps(ALL)) == served(folder / "olmoe")


@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_stock_vllm_says_something(model: str, folder: Path) -> None:
    """Otherwise the tests below would compare nothing."""
    assert all(len(set(answer)) > 3 for answer in served(folder / model))


@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_all_channels_give_stock_vllm_s_tokens(model: str, folder: Path) -> None:
    assert served(folder / f"{model}-mreader", json.dumps(ALL)) == served(folder / model)


@pytest.mark.parametrize("model", MODELS)
def test_dense_gives_stock_vllm_s_tokens(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MREADER_READS", "dense")
    assert served(folder / f"{model}-mreader") == served(folder / model)


@pytest.mark.parametrize("model", MODELS)
def test_a_quarter_of_the_channels_gives_the_transformers_runtime_s_tokens(model: str, folder: Path) -> None:
    tokens = served(folder / f"{model}-mreader", json.dumps(QUARTER))
    assert tokens == generated(folder / f"{model}-mreader", QUARTER)
    assert tokens != served(folder / model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plain", [True, False], ids=["router of its own", "vLLM's router"])
def test_a_reader_that_is_given_logits_answers_alike(
    model: str, plain: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose kernels choose the experts of steps that only decode; here their definition does."""
    from mreader.vllm.experts import RoutedExpertsMethod

    chosen: list[int] = []

    def choose(self: Any, x: torch.Tensor, logits: torch.Tensor, *routing: Any) -> torch.Tensor:
        *routing, padding = routing
        chosen.append(len(x))
        ids, weights = route(logits, *routing)
        if padding is not None:
            ids = torch.where(padding[:, None], -1, ids)
        return self._sparse(x, ids, weights)  # type: ignore[no-any-return]

    expected = served(folder / f"{model}-mreader", json.dumps(QUARTER))
    served.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(RoutedExpertsMethod, "is_monolithic", True)
        patch.setattr(RoutedExpertsMethod, "_sparse_by_logits", choose)
        patch.setattr("mreader.vllm.experts.is_plain", lambda router: plain)
        assert served(folder / f"{model}-mreader", json.dumps(QUARTER)) == expected
    served.cache_clear()
    assert bool(chosen) == plain


def test_which_routers_the_kernels_stand_in_for() -> None:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    from mreader.vllm.experts import is_plain

    class Other(FusedTopKRouter):
        pass

    router = FusedTopKRouter(top_k=2, global_num_experts=8)
    assert is_plain(router)
    assert not is_plain(FusedTopKRouter(top_k=2, global_num_experts=8, scoring_func="sigmoid"))
    assert not is_plain(FusedTopKRouter(top_k=2, global_num_experts=512))
    assert not is_plain(Other(top_k=2, global_num_experts=8))
    for name, value in (("capture_fn", print), ("eplb_state", object()), ("_routing_replay_out", torch.empty(1))):
        router = FusedTopKRouter(top_k=2, global_num_experts=8)
        setattr(router, name, value)
        assert not is_plain(router)


@pytest.mark.parametrize(
    ("repacked", "whole", "asked", "expected"),
    [
        (object(), True, False, True),
        (None, True, False, False),
        (object(), False, False, False),
        (object(), True, True, False),
    ],
)
def test_when_vllm_hands_over_logits(repacked: object, whole: bool, asked: bool, expected: bool) -> None:
    """Kernels serve all experts, and nobody else asks which."""
    from mreader.vllm.experts import RoutedExpertsMethod

    method = SimpleNamespace(repacked=repacked, whole=whole, routing_is_asked_for=asked)
    assert RoutedExpertsMethod.is_monolithic.fget(method) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "asks"),
    [
        (SimpleNamespace(model_config=SimpleNamespace(enable_return_routed_experts=True)), True),
        (SimpleNamespace(aux_output_config=SimpleNamespace(enable_return_routed_experts=True)), True),
        (SimpleNamespace(model_config=SimpleNamespace(enable_return_routed_experts=False)), False),
        (SimpleNamespace(), False),
    ],
)
def test_whether_vllm_is_to_say_which_experts_served(config: Any, asks: bool) -> None:
    from mreader.vllm.experts import asks_for_routing

    assert asks_for_routing(config) == asks


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("experts", [False, True], ids=["channels dealt out", "experts dealt out"])
def test_two_ranks_with_all_channels_give_stock_vllm_s_tokens(model: str, experts: bool, folder: Path) -> None:
    tokens = served(
        folder / f"{model}-mreader", json.dumps(ALL), tensor_parallel_size=2, enable_expert_parallel=experts
    )
    assert tokens == served(folder / model)


def test_an_answer_does_not_depend_on_what_is_served_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive while others decode, so that steps mix both; the reader gets the decoding ones only."""
    from mreader.vllm import experts

    rows: list[int] = []
    read_share = experts.read_share
    monkeypatch.setattr(experts, "read_share", lambda x, *rest: (rows.append(len(x)), read_share(x, *rest))[1])
    answers: dict[str, list[int]] = {}
    with engine(folder / "olmoe-mreader", QUARTER, enable_prefix_caching=False) as llm:
        layers = 4
        step = llm.llm_engine.step
        for number, prompt in enumerate(prompts("olmoe")):
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy())
            rows.clear()
            step()
            assert rows == [number] * layers * (number > 0)
            step()
        while llm.llm_engine.has_unfinished_requests():
            for answer in step():
                if answer.finished:
                    answers[answer.request_id] = list(answer.outputs[0].token_ids)
    alone = served(folder / "olmoe-mreader", json.dumps(QUARTER))
    assert [answers[number] for number in sorted(answers)] == alone


@pytest.mark.parametrize(
    ("runtime", "longest", "capturing", "graphs", "expected"),
    [
        ("NONE", 1, False, "FULL_AND_PIECEWISE", False),
        ("NONE", 9, False, "FULL_AND_PIECEWISE", False),
        ("PIECEWISE", 1, False, "FULL_AND_PIECEWISE", True),
        ("PIECEWISE", 1, True, "FULL_AND_PIECEWISE", True),
        ("FULL", 1, True, "FULL_AND_PIECEWISE", False),
        ("FULL", 1, True, "FULL_DECODE_ONLY", False),
        ("NONE", 1, True, "FULL_DECODE_ONLY", False),  # as the second model runner records
        ("FULL", 3, True, "FULL_AND_PIECEWISE", True),  # drafted tokens: two beside each decoded one
        ("FULL", 1, True, "FULL", True),
    ],
)
def test_graphs_of_which_only_some_steps_decode_are_recorded_dense(
    runtime: str, longest: int, capturing: bool, graphs: str, expected: bool
) -> None:
    from vllm.config import CUDAGraphMode

    from mreader.vllm.experts import serves_any_mixture

    step = SimpleNamespace(max_query_len=longest, query_start_loc=torch.tensor([0, longest]))
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode[runtime], attn_metadata={"layer": step})
    assert serves_any_mixture(context, capturing, CUDAGraphMode[graphs]) == expected


def test_a_layer_holds_its_tensors_once(folder: Path) -> None:
    """Bytes on the device: the checkpoint's own, the native weights in the dtype asked for."""
    with engine(folder / "olmoe-mreader", QUARTER) as llm:
        bytes_of = llm.apply_model(_experts_bytes)[0]
    E, I, H, K, C, r = 32, 64, 256, 2, 2, 32
    native, codes, scales = 4 * 3 * E * I * H, E * K * H * 32, 2 * E * K * C * I
    assert bytes_of == native + codes + 2 * scales + H + 2 * E * I + 2 * H * r + 2 * E * I * r


def _experts_bytes(model: torch.nn.Module) -> int:
    experts = model.get_submodule("model.layers.1.mlp.experts")
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in experts.parameters()}
    return sum(storages.values())


class TestFailures:
    """At start, in one line, before a process is started for the model."""

    @pytest.fixture
    def broken(self, folder: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(folder / "olmoe-mreader", tmp_path / "olmoe-mreader"))

    def _fails(self, model: Path, error: type[Exception], message: str, budget: Any = None) -> None:
        with pytest.raises(error, match=message) as failure, engine(model, budget):
            pass
        assert len(str(failure.value).splitlines()) == 1

    @pytest.mark.parametrize("part", ["gate_up_proj", "sketch_codes", "recovery_coeffs"])
    def test_a_missing_tensor(self, part: str, broken: Path) -> None:
        name = f"model.layers.2.mlp.experts.{part}"
        edit_shard(broken / "model.safetensors", lambda tensors: tensors.pop(name))
        self._fails(broken, SourceError, rf"tensor {name} is missing")

    def test_a_tensor_that_vllm_does_not_deliver(self, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from mreader.vllm.experts import RoutedExpertsMethod

        take = RoutedExpertsMethod.take
        monkeypatch.setattr(
            RoutedExpertsMethod,
            "take",
            lambda self, part, tensor: None if (self.number, part) == (3, "down_norms") else take(self, part, tensor),
        )
        self._fails(broken, SourceError, r"tensor model\.layers\.3\.mlp\.experts\.down_norms is missing")

    def test_a_truncated_shard(self, broken: Path) -> None:
        file = broken / "model.safetensors"
        os.truncate(file, file.stat().st_size - 1000)
        self._fails(broken, SourceError, r"model\.safetensors is truncated")

    def test_a_newer_format(self, broken: Path) -> None:
        edit_json(broken / "config.json", lambda config: config["quantization_config"].update(format_version=2))
        self._fails(broken, UnsupportedError, "format version 2")

    def test_an_architecture_that_is_not_supported(self, broken: Path) -> None:
        edit_json(broken / "mreader_source.json", _as_dbrx)
        self._fails(broken, UnsupportedError, "model_type dbrx")

    def test_a_model_whose_experts_vllm_computes_otherwise(self, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from mreader.vllm.config import MreaderConfig

        method = MreaderConfig.get_quant_method
        monkeypatch.setattr(
            MreaderConfig,
            "get_quant_method",
            lambda self, layer, prefix: None if "layers.1.mlp" in prefix else method(self, layer, prefix),
        )
        self._fails(broken, UnsupportedError, "OlmoeForCausalLM computes the experts of layer 1 in a way of its own")

    @pytest.mark.parametrize(
        ("budget", "message"),
        [(0.01, "the least possible is"), ({"score": "best"}, "best"), ({"k": 3}, "has a key 'k'"), (2, "reads of 2")],
    )
    def test_a_budget_that_cannot_be(self, budget: Any, message: str, folder: Path) -> None:
        with pytest.raises(ValueError, match=message), engine(folder / "olmoe-mreader", budget):
            pass

    def test_a_plain_checkpoint_is_none_of_ours(self, folder: Path) -> None:
        with pytest.raises(UsageError, match="not an augmented checkpoint"):
            mreader.load(folder / "olmoe")


def _as_dbrx(record: dict[str, Any]) -> None:
    config = json.loads(record["texts"]["config.json"])
    record["texts"]["config.json"] = json.dumps({**config, "model_type": "dbrx"})


class TestServer:
    """`vllm serve`'s server, over HTTP."""

    @pytest.fixture(scope="class")
    def url(self, folder: Path) -> Iterator[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "olmoe-mreader")]
        options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "96", "--port", str(port)]
        overrides = ["--hf-overrides", json.dumps({"mreader": QUARTER}), "--served-model-name", "reader"]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
        server = subprocess.Popen([*command, *options, *overrides], env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_it_answers(server, f"{url}/health")
            yield url
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()

    def _ask(self, url: str, **more: Any) -> Any:
        asked = {"model": "reader", "prompt": prompts("olmoe")[0], "max_tokens": NEW, "temperature": 0}
        body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True, **more}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)

    def test_it_answers_and_streams_the_same_tokens(self, url: str, folder: Path) -> None:
        expected = served(folder / "olmoe-mreader", json.dumps(QUARTER))[0]
        assert json.load(self._ask(url))["choices"][0]["token_ids"] == expected
        lines = [line.decode().removeprefix("data: ").strip() for line in self._ask(url, stream=True)]
        events = [json.loads(line) for line in lines if line and line != "[DONE]"]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == expected
        assert len(events) > 8
        assert lines[-2:] == ["[DONE]", ""]


def test_bench_serve_measures_dense_and_sparse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    load = ("--concurrency", "1,2", "--input-len", "9", "--output-len", "32", "--requests", "2", "--reads", "0.35")
    server = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "96")
    ran = mreader_command("bench", "serve", folder / "olmoe-mreader", *load, "--json", "--", *server)
    assert ran.code == 0, ran.err
    dense, sparse = json.loads(ran.out)["engines"]
    assert dense["reads"] == "all of its experts' 512 channels, dense"
    assert re.fullmatch(
        r"\d+ of its experts' 512 channels, 80 coordinates, score variance: 3[45]\.\d\d %", sparse["reads"]
    )
    for engine in (dense, sparse):
        assert [row["concurrency"] for row in engine["rows"]] == [1, 2]
        assert all(row["tpot_ms"] > 0 and row["ttft_ms"] > 0 for row in engine["rows"])


def test_a_checkpoint_of_random_weights_is_served(tmp_path: Path) -> None:
    """It has no tokenizer, and experts that are the same in every layer."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4}
    more = {"vocab_size": 1000, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**SHAPES["qwen3-30b-a3b"].config, **sizes, **more, "head_dim": 64, "max_position_embeddings": 96}
    shape = ModelShape("tiny", LayerShape(16, 4, 256, 96), 2, "silu", "qwen3_moe", config)
    write_random(tmp_path / "random", shape, FormatOptions(channels=1.0), torch.device("cpu"), Progress())
    every = {"channels": 1.0}
    tokens = served(tmp_path / "random", json.dumps(every))
    assert tokens == generated(tmp_path / "random", every)
    assert all(len(set(answer)) > 3 for answer in tokens)


def _wait_until_it_answers(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert server.poll() is None, "the server has ended"
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    pytest.fail("the server did not answer")
