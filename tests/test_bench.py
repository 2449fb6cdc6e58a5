"""`mreader bench` and `mreader tune`: shapes, arithmetic, what is counted, options, and their glue without a GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import CHANNELS, EXPERTS, HIDDEN, ROUTED, tiny_model
from commands import mreader

from mreader.bench import block, model, peers, reads, tune
from mreader.bench.block import make_row
from mreader.bench.layers import Call, augment_layer, count_layers, draw_calls
from mreader.bench.model import ModelBench, ModelRow, augment_experts
from mreader.bench.plot import plot_block
from mreader.bench.shapes import SHAPES, ModelShape
from mreader.bench.target import Target, find_target
from mreader.bench.traffic import Touched, count_touched, find_touched, touched_bytes
from mreader.bench.tune import TunedRow, as_measured, combinations, crossing, search
from mreader.budget import DISK, BlockShape, Budget, Layout, count_reads
from mreader.errors import UsageError
from mreader.formats.augmented import FormatOptions
from mreader.formats.codes import TERNARY
from mreader.kernels.layout import GPU
from mreader.kernels.tuning import LayerShape, known_tuning, read_measured
from mreader.progress import Progress
from mreader.reader import ExpertLayer, ReadSettings, read
from mreader.runtime import experts_modules

TINY = LayerShape(EXPERTS, ROUTED, HIDDEN, CHANNELS)
OPTIONS = FormatOptions(rank=8, channels=0.25)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")


def tiny_layer(seed: int = 0, dtype: torch.dtype = torch.float32) -> ExpertLayer:
    """A random layer of TINY."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(EXPERTS, 2, CHANNELS, HIDDEN, generator=generator).mul(0.05).to(dtype)
    down = torch.randn(EXPERTS, CHANNELS, HIDDEN, generator=generator).mul(0.05).to(dtype)
    return augment_layer(gate_up, down, "silu", OPTIONS, seed)


def tiny_target() -> Target:
    shape = ModelShape("tiny", TINY, 3, "silu", "qwen3_moe", {})
    return Target("tiny", TINY, 3, "silu", OPTIONS, 2, None, shape)


# Shapes


@pytest.mark.parametrize(
    ("name", "experts", "routed", "hidden", "channels", "model_layers", "activation"),
    [
        ("qwen3-30b-a3b", 128, 8, 2048, 768, 48, "silu"),
        ("olmoe", 64, 8, 2048, 1024, 16, "silu"),
        ("gemma4-26b", 128, 8, 2816, 704, 30, "gelu_pytorch_tanh"),
        ("qwen3.5-35b", 256, 8, 2048, 512, 40, "silu"),
    ],
)
def test_known_shapes(
    name: str, experts: int, routed: int, hidden: int, channels: int, model_layers: int, activation: str
) -> None:
    shape = SHAPES[name]
    assert shape.layer == LayerShape(experts, routed, hidden, channels)
    assert (shape.layers, shape.activation) == (model_layers, activation)


@pytest.mark.parametrize("name", SHAPES)
def test_the_whole_model_of_a_shape_has_such_layers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from mreader.formats.architectures import routing

    shape = SHAPES[name]
    config = AutoConfig.for_model(shape.model_type, **shape.config)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    experts: list[Any] = [m for m in whole.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "down_proj")]
    E, H, I = shape.layer.experts, shape.layer.hidden, shape.layer.channels
    assert len(experts) == shape.layers
    assert all(module.gate_up_proj.shape == (E, 2 * I, H) for module in experts)
    assert all(module.down_proj.shape == (E, H, I) for module in experts)
    assert routing(whole.config.to_dict()) == (shape.layer.routed, shape.activation)


# Targets


def test_the_default_budget_of_a_shape_reads_18_percent() -> None:
    target = find_target(None, None)
    shape = target.block_shape(GPU)
    settings = target.budget.resolve(shape)
    assert settings == ReadSettings(k=707, coordinates=80, score="variance", rank=32)
    total = count_reads(shape, settings.k, 80, "variance", 32).total
    assert total == pytest.approx(0.1796, abs=1e-4)


def test_a_checkpoint_says_its_own_shape_and_budget(olmoe_augmented: Path) -> None:
    target = find_target(None, olmoe_augmented)
    config = json.loads((olmoe_augmented / "config.json").read_text())
    assert target.layer.experts == config["num_experts"]
    assert target.layer.hidden == config["hidden_size"]
    assert target.options == FormatOptions()
    assert target.model is None


@pytest.mark.parametrize(
    ("shape", "codes", "cause"),
    [("qwen4", None, "no shape qwen4"), ("olmoe", "octal", "octal")],
)
def test_an_unknown_shape_or_code_is_named(shape: str, codes: str | None, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        find_target(shape, None, codes)


def test_options_that_contradict_each_other_are_refused(olmoe_augmented: Path) -> None:
    with pytest.raises(UsageError, match="both a shape and a checkpoint"):
        find_target("olmoe", olmoe_augmented)
    with pytest.raises(UsageError, match="a checkpoint has its own"):
        find_target(None, olmoe_augmented, "ternary")


# Layers and calls


@pytest.mark.parametrize(("free", "layers"), [(10**12, 6), (15e9, 6), (12e9, 4)])
def test_as_many_layers_as_memory_holds(free: float, layers: int) -> None:
    assert count_layers(find_target("qwen3-30b-a3b", None), int(free)) == layers


def test_too_little_memory_for_a_measurement_is_said_in_gigabytes() -> None:
    with pytest.raises(UsageError, match=r"4\.0 GB of GPU memory are free, and 4 layers of qwen3-30b-a3b take 9\.7 GB"):
        count_layers(find_target("qwen3-30b-a3b", None), 4 * 10**9)


def test_a_random_layer_reads_like_a_converted_one() -> None:
    layer = tiny_layer()
    call = draw_calls(TINY, 4, 1, layer.down)[0]
    # Everything kept is the dense result, whatever the sketch; a quarter kept is near it, so the sketch is true
    dense = read(call.x, call.ids, call.weights, layer, ReadSettings(ROUTED * CHANNELS, 128, "variance", 8))
    some = read(call.x, call.ids, call.weights, layer, ReadSettings(ROUTED * CHANNELS // 2, 128, "variance", 8))
    random = read(
        call.x,
        call.ids,
        call.weights,
        replace(layer, codes=layer.codes.flip(-2)),
        ReadSettings(ROUTED * CHANNELS // 2, 128, "variance", 0),
    )
    assert (some - dense).norm() < 0.5 * (random - dense).norm()
    assert torch.allclose(layer.basis.float().mT @ layer.basis.float(), torch.eye(8), atol=2e-3)  # FP16


def test_calls_take_layers_in_turn_and_route_each_token_to_distinct_experts() -> None:
    calls = draw_calls(TINY, 5, 3, torch.empty(0, dtype=torch.bfloat16))
    assert [call.layer for call in calls] == [0, 1, 2] * 4
    for call in calls:
        assert call.x.shape == (5, HIDDEN)
        assert call.x.dtype == call.weights.dtype == torch.bfloat16
        assert all(len(set(ids.tolist())) == ROUTED for ids in call.ids)
        assert torch.allclose(call.weights.float().sum(-1), torch.ones(5), atol=1e-2)  # BF16
    assert not torch.equal(calls[0].ids, calls[3].ids)


# What a call reads


@pytest.mark.parametrize("layout", [DISK, GPU])
@pytest.mark.parametrize(
    "settings", [ReadSettings(41, 80, "variance", 8), ReadSettings(0, 1, "norm", 0), ReadSettings(7, 128, "rho", 3)]
)
def test_one_token_reads_what_is_counted(layout: Layout, settings: ReadSettings) -> None:
    shape = BlockShape(HIDDEN, CHANNELS, ROUTED, 8, TERNARY, 2, layout)
    layer = tiny_layer()
    call = draw_calls(TINY, 1, 1, layer.down)[0]
    touched = find_touched(layer, call, settings)
    # 192 hidden are 2 blocks of 128, the second one half padding
    assert touched == Touched(ROUTED, ROUTED * 2 * settings.coordinates, settings.k)
    counted = count_reads(shape, settings.k, settings.coordinates, settings.score, settings.rank).bytes
    assert touched_bytes(shape, touched, settings) == pytest.approx(counted, abs=1)


def test_what_tokens_share_is_read_once() -> None:
    layer = tiny_layer()
    one = draw_calls(TINY, 1, 1, layer.down)[0]
    twice = Call(0, one.x.repeat(2, 1), one.ids.repeat(2, 1), one.weights.repeat(2, 1))
    settings = ReadSettings(41, 80, "variance", 8)
    assert find_touched(layer, twice, settings) == find_touched(layer, one, settings)


def test_touched_by_hand() -> None:
    ids = torch.tensor([[0, 2], [2, 1], [9, -1]])  # the last token has no expert that exists
    picked = torch.zeros(3, 1, 4, dtype=torch.bool)
    picked[0, 0, :2] = picked[1, 0, 1:3] = picked[2] = True
    kept = torch.zeros(3, 2, 5, dtype=torch.bool)
    kept[0, 0, 0] = kept[0, 1, 1] = kept[1, 0, 1] = kept[1, 0, 3] = kept[2] = True
    # rows: expert 0 two, expert 2 three of both tokens together, expert 1 two; channels: 0: {0}, 2: {1, 3}
    assert count_touched(ids, picked, kept, experts=3) == Touched(experts=3, rows=7, channels=3)


# Rows


def test_ratios_bandwidth_and_floor_of_a_row() -> None:
    row = make_row(8, 40.0, {"dense": 100.0, "vllm": None}, 80_000_000, 4e12, sparse_up_to=64)
    assert row.ratios == {"dense": 2.5, "vllm": None}
    assert row.bandwidth == pytest.approx(2e12)  # 80 MB in 40 us
    assert row.floor == pytest.approx(20.0)  # 80 MB at 4 TB/s
    assert row.runtime == "sparse"


@pytest.mark.parametrize(("batch", "runtime"), [(64, "sparse"), (65, "dense")])
def test_a_row_says_where_the_runtime_takes_dense(batch: int, runtime: str) -> None:
    assert make_row(batch, 1.0, {}, 1, 1.0, sparse_up_to=64).runtime == runtime


def test_rows_of_a_model() -> None:
    row = ModelRow(batch=8, dense=10.0, sparse=5.0)
    assert row.ratio == 2.0
    assert row.tokens_per_second(row.sparse) == 1600.0
    bench = ModelBench("GPU", "tiny", 3, ReadSettings(7, 80, "norm", 0), 0.2, [row])
    (found,) = bench.as_json()["rows"]
    assert found == {
        "batch": 8,
        "dense_ms": 10.0,
        "sparse_ms": 5.0,
        "ratio": 2.0,
        "dense_tokens_per_second": 800.0,
        "sparse_tokens_per_second": 1600.0,
    }


# The profiler

NCU = """==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "screen_kernel" - 0: 0%....50%....100% - 1 pass
a line of the program
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",\
"CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4242","python3.12","127.0.0.1","screen_kernel","1","7","(512, 1, 1)","(12, 8, 1)","0","9.0",\
"Command line profiler metrics","dram__bytes_read.sum","byte","3,500,032"
"1","4242","python3.12","127.0.0.1","exact_kernel(float*, int)","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",\
"Command line profiler metrics","dram__bytes_read.sum","byte","8500000"
"2","4242","python3.12","127.0.0.1","screen_kernel","1","7","(512, 1, 1)","(12, 8, 1)","0","9.0",\
"Command line profiler metrics","dram__bytes_read.sum","byte","500,000"
==PROF== Disconnected from process 4242
"""


def test_counters_are_summed_by_kernel() -> None:
    assert reads.parse_counters(NCU.splitlines()) == {"screen_kernel": 4_000_032, "exact_kernel": 8_500_000}


def test_a_row_of_reads_is_of_one_call() -> None:
    row = reads.make_reads_row(8, 2, 10_000, Counter({"screen": 4_000, "exact": 7_000}))
    assert (row.counted, row.measured, row.kernels) == (5_000, 5_500, {"screen": 2_000, "exact": 3_500})
    assert row.ratio == pytest.approx(1.1)


def test_without_the_profiler_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "require_cuda", lambda: torch.device("cpu"))
    monkeypatch.setenv("PATH", "")
    ran = mreader("bench", "reads")
    assert ran.code == 2
    assert ran.cause == "error: Nsight Compute (ncu) is not installed"
    assert "nsight-compute" in ran.err.splitlines()[1]


def fake_profiler(folder: Path, script: str) -> str:
    """An `ncu` that runs a shell script; its arguments are ncu's own."""
    file = folder / "ncu"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def job() -> reads.Job:
    return reads.Job("olmoe", None, "ternary", 32, vars(find_target("olmoe", None).budget), 8)


def test_the_profiler_leaves_clocks_alone_and_its_figures_arrive(tmp_path: Path) -> None:
    (tmp_path / "csv").write_text(NCU)
    ncu = fake_profiler(
        tmp_path,
        f'echo "$@" >{tmp_path}/arguments; for last; do :; done\n'
        f'echo \'{{"calls": 2, "counted": 12000000}}\' >"$last"; cat {tmp_path}/csv',
    )
    row = reads._profile(ncu, job())
    assert (row.batch, row.counted, row.measured) == (8, 6_000_000, 6_250_016)
    assert "--clock-control none" in (tmp_path / "arguments").read_text()


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM: no permission'; exit 1", "may not read the GPU's counters"),
        ("echo 'first line' >&2; echo 'it broke' >&2; exit 1", "Nsight Compute failed: it broke"),
        ("exit 0", "Nsight Compute failed: it printed nothing"),
    ],
)
def test_a_profiler_that_fails_is_quoted(tmp_path: Path, script: str, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        reads._profile(fake_profiler(tmp_path, script), job())


def test_the_child_finds_the_parent_s_target() -> None:
    assert job().target() == find_target("olmoe", None)
    assert Budget(**job().budget) == find_target("olmoe", None).budget


# Tuning


def test_every_combination_of_a_kernel_s_values_is_tried() -> None:
    tried = combinations({"warps": [1, 2], "columns": [64, 128]})
    assert tried == [
        {"warps": 1, "columns": 64},
        {"warps": 1, "columns": 128},
        {"warps": 2, "columns": 64},
        {"warps": 2, "columns": 128},
    ]


def test_the_search_takes_each_kernel_s_best_over_the_best_before() -> None:
    candidates = {"a": combinations({"x": [1, 2, 3]}), "b": combinations({"y": [1, 2]})}

    def measure(kernel: str, parameters: Any) -> float | None:
        x, y = parameters["a"]["x"], parameters["b"]["y"]
        return None if x == 3 else 10.0 - 3 * x + x * y

    assert search({"a": {"x": 1}, "b": {"y": 2}}, candidates, measure) == {"a": {"x": 2}, "b": {"y": 1}}


def test_noise_does_not_replace_a_first_choice() -> None:
    times = {1: 10.0, 2: 9.97}
    start = {"a": {"x": 1}}
    assert search(start, {"a": combinations({"x": [1, 2]})}, lambda _, p: times[p["a"]["x"]]) == start


def test_a_start_that_the_gpu_cannot_run_is_replaced() -> None:
    found = search({"a": {"x": 1}}, {"a": combinations({"x": [1, 2]})}, lambda _, p: None if p["a"]["x"] == 1 else 5.0)
    assert found == {"a": {"x": 2}}


@pytest.mark.parametrize(
    ("ahead", "behind", "expected"),
    [
        ((1, 2, 4), (8, 16), 4),
        ((), (1, 2), 0),
        ((1, 2, 4), (), None),  # still ahead: nobody knows up to where
        ((1,), (64,), None),  # anywhere between
        ((1, 2, 4, 16), (8,), 4),  # ahead again by noise: the first crossing counts
    ],
)
def test_where_dense_takes_over(ahead: Sequence[int], behind: Sequence[int], expected: int | None) -> None:
    assert crossing({**dict.fromkeys(ahead, (1.0, 2.0)), **dict.fromkeys(behind, (2.0, 1.0))}) == expected


def test_what_was_found_becomes_an_entry() -> None:
    rows = [TunedRow(1, 20.0, 18.0, 30.0, {"screen": {"warps": 2}}), TunedRow(2, 25.0, 40.0, 39.0, {})]
    entry = as_measured(rows, "GPU", TINY)
    assert (entry.device, entry.shape, entry.sparse_up_to) == ("GPU", TINY, 1)
    assert entry.batches == {1: {"screen": {"warps": 2}}, 2: {}}


# Command line


@pytest.mark.parametrize(
    "arguments", [("bench", "block"), ("bench", "model", "--shape", "olmoe"), ("bench", "reads"), ("tune",)]
)
@no_gpu
def test_without_a_cuda_device_every_command_ends_in_one_clear_line(arguments: tuple[str, ...]) -> None:
    ran = mreader(*arguments)
    assert ran.code == 2
    assert ran.cause == "error: there is no CUDA device, and this command measures one"
    assert ran.out == ""


@pytest.mark.parametrize("command", [("bench", "block"), ("bench", "model"), ("bench", "reads"), ("tune",)])
@pytest.mark.parametrize(
    ("option", "value", "cause"),
    [
        ("--batch", "1,two", "batch is 1,two"),
        ("--batch", "0,1", "batch is 0,1"),
        ("--batch", "", "batch is"),
        ("--shape", "qwen4", "there is no shape qwen4"),
        ("--codes", "octal", "unknown codes 'octal'"),
        ("--channels", "1.5", "channels of 1.5"),
        ("--reads", "0.001", "less than sketch and recovery"),
        ("--coordinates", "129", "129 coordinates"),
        ("--score", "best", "best"),
        ("--rank", "-1", "rank is -1"),
    ],
)
def test_options_are_judged_before_anything_else(command: tuple[str, ...], option: str, value: str, cause: str) -> None:
    ran = mreader(*command, option, value)
    assert ran.code == 2
    assert cause in ran.cause


def test_a_plot_without_matplotlib_is_refused_before_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert mreader("bench", "block", "--plot", "x.png").cause == "error: matplotlib is not installed"


# The glue, with time standing still


def sparse_reference(stack: Sequence[ExpertLayer], settings: ReadSettings) -> Callable[[Call], Any]:
    """`sparse_block` in torch."""
    return lambda call: lambda: read(call.x, call.ids, call.weights, stack[call.layer], settings)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for the GPU: every measurement runs one call on the CPU, and finds 10 us.

    The sparse block is the torch reference, as the interpreter takes seconds for a call of its kernels.
    returns: how many calls each measurement had
    """
    pytest.importorskip("triton", reason="the dense peer is a Triton kernel")
    measured: list[int] = []

    def run_once(calls: Sequence[Callable[[], object]], replays: int = 1) -> float:
        measured.append(len(calls))
        calls[0]()
        return 10.0

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1))
    monkeypatch.setattr(block, "measure_copy_bandwidth", lambda device: 4e12)
    for module in (block, tune):
        monkeypatch.setattr(module, "require_cuda", lambda: torch.device("cpu"))
        monkeypatch.setattr(module, "time_calls", run_once)
        monkeypatch.setattr(module, "sparse_block", sparse_reference)
    return measured


@no_gpu
def test_the_block_s_table_and_json(still: list[int], tmp_path: Path) -> None:
    target = tiny_target()
    bench = block.bench_block(target, target.budget, [1, 3], Progress())
    assert (bench.layers, bench.calls, bench.cached) == (3, 12, False)
    assert bench.candidates == ROUTED * CHANNELS
    found = json.loads(json.dumps(bench.as_json(), allow_nan=False))
    assert found["target"] == "tiny"
    assert found["k"] == bench.settings.k == 60
    assert [row["batch"] for row in found["rows"]] == [1, 3]
    first = found["rows"][0]
    assert {"dense", "grouped_mm", "batched_mm"} <= set(first["peers"])
    assert first["ratios"]["dense"] == 1.0
    shape = target.block_shape(GPU)
    assert first["bytes"] == pytest.approx(count_reads(shape, 60, 80, "variance", 8).bytes, abs=1)
    plot_block(bench, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@no_gpu
def test_the_command_prints_both(still: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mreader.bench.target.get_shape", lambda name: replace(SHAPES["olmoe"], name="x", layer=TINY))
    assert {"device", "rows", "copy_bandwidth", "reads"} <= set(
        json.loads(mreader("bench", "block", "--rank", "8", "--batch", "2", "--json").out)
    )
    table = mreader("bench", "block", "--rank", "8", "--batch", "2")
    assert table.code == 0, table.err
    for heading in ("batch", "us", "dense us", "grouped_mm us", "batched_mm us", "ratio", "reads", "TB/s", "floor us"):
        assert heading in table.out


@no_gpu
def test_peers_agree_with_the_dense_reference() -> None:
    pytest.importorskip("triton", reason="the dense peer is a Triton kernel")
    stack = [tiny_layer(seed, torch.bfloat16) for seed in range(2)]
    call = draw_calls(TINY, 5, 2, stack[0].down)[1]
    everything = ReadSettings(ROUTED * CHANNELS, 1, "norm", 0)
    expected = read(call.x.float(), call.ids, call.weights.float(), stack[1], everything)
    for peer in peers.find_peers(stack, Progress()):
        found = peer.prepare(call)().float()
        # BF16 products, and an intermediate rounded to BF16
        assert (found - expected).norm() < 1e-2 * expected.norm(), peer.name


def test_vllm_is_called_as_its_own_layers_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tiny_layer()
    call = draw_calls(TINY, 2, 1, layer.down)[0]
    given: dict[str, Any] = {}

    def fused_experts(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, *, activation: Any) -> Any:
        given.update(w1=w1, w2=w2, weights=weights, ids=ids, activation=activation)
        return x

    package = "vllm.model_executor.layers.fused_moe"
    modules = {
        package: SimpleNamespace(fused_experts=fused_experts),
        f"{package}.activation": SimpleNamespace(MoEActivation=lambda name: f"enum of {name}"),
    }
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.import_module", modules.__getitem__)
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    peer = peers._vllm("gelu_pytorch_tanh", [peers._stock_experts(layer)], Progress())
    assert peer is not None
    peer.prepare(call)()
    assert torch.equal(given["w1"], layer.gate_up.flatten(1, 2))
    assert torch.equal(given["w2"], layer.down.transpose(1, 2))
    assert given["w2"].is_contiguous()
    assert (given["weights"].dtype, given["ids"].dtype) == (torch.float32, torch.int32)
    assert given["activation"] == "enum of gelu_tanh"
    assert peers._vllm("relu", [], Progress()) is None


@pytest.mark.slow
@no_gpu
def test_the_sparse_block_runs_a_call_on_its_layer() -> None:
    stack = [tiny_layer(seed, torch.bfloat16) for seed in range(2)]
    call = draw_calls(TINY, 1, 2, stack[0].down)[1]
    settings = ReadSettings(ROUTED * CHANNELS, 80, "variance", 0)
    found = block.sparse_block(stack, settings)(call)().float()
    expected = sparse_reference(stack, settings)(call)().float()
    assert (found - expected).norm() < 1e-2 * expected.norm()  # BF16


def test_a_peer_that_would_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch, still: list[int]) -> None:
    def prepare(call: Call) -> Callable[[], torch.Tensor]:
        return lambda: call.x

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10**12))
    calls = draw_calls(TINY, 2, 1, torch.empty(0))
    assert block._time_peer(peers.Peer("small", prepare, lambda routed: 100 * routed), calls) == 10.0
    assert block._time_peer(peers.Peer("large", prepare, lambda routed: 200 * routed), calls) is None


@no_gpu
def test_tuning_tries_everything_and_writes_an_entry(
    still: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mreader.bench.target.get_shape", lambda name: replace(SHAPES["olmoe"], name="x", layer=TINY))
    monkeypatch.setattr("mreader.bench.timing.require_cuda", lambda: torch.device("cpu"))
    few = replace(known_tuning(), candidates={"finish": {"columns": [16, 32], "warps": [4]}})
    monkeypatch.setattr(tune, "known_tuning", lambda: few)
    ran = mreader("tune", "--batch", "1,2", "--rank", "8", "--out", tmp_path / "tuning.toml", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert set(found["batches"]) == {"1", "2"}
    assert found["sparse_up_to"] is None
    (entry,) = read_measured(tmp_path / "tuning.toml")
    assert (entry.device, entry.shape) == ("cpu", TINY)
    assert entry.batches[1] == {"finish": few.default["finish"]}, "nothing is faster where all take the same time"
    tried, alone = [2 * still[-1]] * 3, [still[-1]] * 3  # an ordinary kernel behind each block that is tried
    assert still == 2 * (tried + alone)


def random_tiny_model(name: str, channels: float) -> Any:
    """What `random_model` does, from a tiny model on the CPU."""
    whole = tiny_model(name, dtype=torch.float32)
    for ordinal, (_, module) in enumerate(experts_modules(whole)):
        augment_experts(module, "silu", OPTIONS, ordinal)
    model.attach_random(whole, replace(OPTIONS, channels=channels))
    return whole


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
def test_a_random_model_reads_sparsely(name: str) -> None:
    from mreader.runtime import reader_mode

    whole = random_tiny_model(name, channels=1.0)
    ids = torch.randint(1, 90, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), reader_mode(whole, "always"):
        everything = whole(input_ids=ids).logits
    with torch.no_grad(), reader_mode(whole, "never"):
        dense = whole(input_ids=ids).logits
    # All channels kept is the dense model, up to the order of float32 sums
    assert torch.allclose(everything, dense, atol=1e-5)


@no_gpu
def test_both_modes_of_a_model_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mreader.runtime import runtime_of

    whole = random_tiny_model("qwen3_moe", channels=0.25)
    logits = []

    def run_once(step: Callable[[], torch.Tensor]) -> float:
        logits.append(step())
        return 2.0

    monkeypatch.setattr(model, "require_cuda", lambda: torch.device("cpu"))
    monkeypatch.setattr(model, "time_steps", run_once)
    monkeypatch.setattr("mreader.compiled.lower", lambda graph, inputs: graph)  # the C++ compiler takes half a minute
    bench = model.bench_model(whole, "tiny", [3], Progress())
    assert bench.rows == [ModelRow(3, dense=2.0, sparse=2.0)]
    assert (bench.layers, bench.reads) == (runtime_of(whole).layers, runtime_of(whole).reads.total)
    dense, sparse = logits
    assert dense.shape == (3, 96)
    assert not torch.allclose(dense, sparse, atol=1e-4), "a quarter of the channels is not all of them"


# On the GPU


@pytest.mark.gpu
def test_a_small_block_is_measured(olmoe_augmented: Path) -> None:
    ran = mreader("bench", "block", "--checkpoint", olmoe_augmented, "--batch", "1,4", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert all(row["microseconds"] > 0 for row in found["rows"])
    assert found["copy_bandwidth"] > 1e10


@pytest.mark.gpu
def test_a_small_model_is_measured(olmoe_augmented: Path) -> None:
    ran = mreader("bench", "model", olmoe_augmented, "--batch", "1,4", "--json")
    assert ran.code == 0, ran.err
    assert all(row["sparse_ms"] > 0 for row in json.loads(ran.out)["rows"])
