"""A whole model's captured decode step, dense and sparse, with everything else the same."""

# N sequences, E experts, H hidden size, I channels of an expert

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mreader.bench.layers import augment_layer, stored_parts
from mreader.bench.shapes import ModelShape
from mreader.bench.timing import require_cuda, time_steps
from mreader.errors import UsageError
from mreader.formats.augmented import FormatOptions
from mreader.kernels.tuning import device_name
from mreader.progress import Progress
from mreader.reader import ReadSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mreader.runtime import Mode

BATCHES = (1, 2, 4, 8, 16, 32)
_PROMPT, _MAX_LENGTH = 16, 256
_MODES: tuple["Mode", "Mode"] = ("never", "always")


@dataclass(frozen=True)
class ModelRow:
    """One batch: milliseconds of a step, which makes one token of each sequence."""

    batch: int
    dense: float
    sparse: float

    @property
    def ratio(self) -> float:
        return self.dense / self.sparse

    def tokens_per_second(self, milliseconds: float) -> float:
        return self.batch / milliseconds * 1e3


@dataclass(frozen=True)
class ModelBench:
    """A whole measurement.

    reads: of a token in one layer, as a fraction of the dense reads
    """

    device: str
    target: str
    layers: int
    settings: ReadSettings
    reads: float
    rows: list[ModelRow]

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        facts = {name: value for name, value in vars(self).items() if name not in ("settings", "rows")}
        rows = [
            {
                "batch": row.batch,
                "dense_ms": row.dense,
                "sparse_ms": row.sparse,
                "ratio": row.ratio,
                "dense_tokens_per_second": row.tokens_per_second(row.dense),
                "sparse_tokens_per_second": row.tokens_per_second(row.sparse),
            }
            for row in self.rows
        ]
        return {**facts, **vars(self.settings), "rows": rows}


def bench_model(
    model: "PreTrainedModel",
    name: str,
    batches: Sequence[int],
    progress: Progress,
    note: Callable[[str], None] = lambda text: None,
) -> ModelBench:
    """Measure the steps of a loaded model, under the budget that it has. UsageError without a CUDA device.

    note: told why the layers are not compiled, where they cannot be
    """
    device = require_cuda()
    from mreader.runtime import runtime_of

    runtime = runtime_of(model)
    progress.begin("batches", len(batches), "batches")
    rows = []
    for batch in batches:
        vocabulary = model.config.get_text_config().vocab_size
        prompts = torch.randint(3, vocabulary, (batch, _PROMPT), generator=torch.Generator().manual_seed(batch))
        dense, sparse = (_time_mode(model, prompts.to(model.device), mode, note) for mode in _MODES)
        rows.append(ModelRow(batch, dense, sparse))
        progress.advance(1)
    return ModelBench(device_name(device), name, runtime.layers, runtime.settings, runtime.reads.total, rows)


def random_model(shape: ModelShape, options: FormatOptions, progress: Progress) -> "PreTrainedModel":
    """A model of that shape on the GPU, random weights, its routed experts with a true sketch of theirs.

    Raises UsageError where its weights do not fit the GPU's memory.
    """
    device = require_cuda()
    from transformers import AutoConfig, AutoModelForCausalLM

    from mreader.runtime import experts_modules

    _require_memory(shape, torch.cuda.mem_get_info(device)[0])
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.model_type, **shape.config)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    experts = [module for _, module in experts_modules(model)]
    progress.begin("sketching", len(experts), "layers")
    for ordinal, module in enumerate(experts):
        augment_experts(module, shape.activation, options, ordinal)
        progress.advance(1)
    attach_random(model, options)
    return model.eval()


def augment_experts(module: Any, activation: str, options: FormatOptions, ordinal: int) -> None:
    """Give an experts module of a random model the parameters that a loaded augmented checkpoint has.

    Random weights are as random in another shape, so `down_proj` (E, H, I) is taken as (E, I, H) where it lies.
    """
    E, H, I = module.down_proj.shape
    gate_up, down = module.gate_up_proj.data.view(E, 2, I, H), module.down_proj.data.view(E, I, H)
    layer = augment_layer(gate_up, down, activation, options, ordinal)
    for part, value in stored_parts(layer).items():
        setattr(module, part, nn.Parameter(value, requires_grad=False))


def attach_random(model: "PreTrainedModel", options: FormatOptions) -> None:
    """Make a model read sparsely whose experts `augment_experts` prepared."""
    from mreader.runtime import Expected, attach

    tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    attach(model, options, Expected(tensors, element_size=model.dtype.itemsize))


def _require_memory(shape: ModelShape, free: int) -> None:
    layer = shape.layer
    weights = 2 * shape.layers * 3 * layer.experts * layer.channels * layer.hidden
    need = 1.3 * weights  # the sketch, and everything that is not a routed expert
    if need > free:
        raise UsageError(
            f"{free / 1e9:.1f} GB of GPU memory are free, and {shape.name} takes about {need / 1e9:.1f} GB",
            "choose a smaller shape",
        )


def _time_mode(model: "PreTrainedModel", prompts: Tensor, mode: "Mode", note: Callable[[str], None]) -> float:
    """Milliseconds of a captured step after short prompts (N, T)."""
    from mreader.captured import CapturedStep

    step = CapturedStep(model, len(prompts), _MAX_LENGTH, mode, compiled=True, note=note)
    tokens = step.prefill(prompts).argmax(-1, keepdim=True)
    return time_steps(lambda: step.step(tokens))
