"""An augmented checkpoint of a known shape with random weights, and no source: to measure what needs a whole folder.

It is large (Qwen3-30B-A3B: 66 GB) and quick to write: one layer's experts are drawn and sketched once, on a GPU where
there is one, and lie under every layer's name. A layer still has weights of its own in memory, with a true sketch of
them, and a router of its own, so that what a decoded token reads is what it would read of a trained model.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from mreader.bench.layers import STD, draw_layer, stored_parts
from mreader.bench.shapes import ModelShape
from mreader.errors import UsageError
from mreader.formats.augmented import (
    MANIFEST,
    SOURCE,
    FormatOptions,
    describe_folder,
    layer_tensors,
    record_source,
    shard_index,
)
from mreader.formats.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, assemble
from mreader.formats.safetensors_file import (
    FileRecord,
    HashingFile,
    TensorSpec,
    data_order,
    encode_header,
    parse_header,
)
from mreader.formats.tensors import DTYPE_NAMES, TORCH_DTYPES, as_bytes
from mreader.output import require_space_for
from mreader.plan import SHARD_METADATA, Plan, Shard, make_plan
from mreader.progress import Progress

_SHARDS_AT_ONCE = 8


def with_layers(shape: ModelShape, layers: int) -> ModelShape:
    """The shape with so many layers, all of them routed. UsageError for none."""
    if layers < 1:
        raise UsageError(f"layers is {layers}", "a model has at least one")
    return replace(shape, layers=layers, config={**shape.config, "num_hidden_layers": layers})


def write_random(
    folder: Path, shape: ModelShape, options: FormatOptions, device: torch.device, progress: Progress
) -> None:
    """Write the checkpoint into `folder`, which is made, and must be empty.

    Matrices are normal, vectors are ones: the hidden states keep their size, and routers spread the tokens over all
    experts. `verify` finds nothing wrong with the checkpoint; `restore` does, since no source has these hashes.

    Raises UsageError where the folder holds something, NoSpaceError where its disk is too small.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is no empty folder", "name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(_source(shape), options)
    require_space_for(folder, plan.nbytes)
    experts = {part: tensor.cpu() for part, tensor in _draw_experts(shape, options, device).items()}
    given = {
        f"{layer.prefix}.{part}": experts[part]
        for layer in plan.architecture.layers
        for part in layer_tensors(layer, options)
    }
    seeds = {name: seed for seed, name in enumerate(plan.source.tensors, 1)}

    def value(name: str, spec: TensorSpec) -> Tensor:
        return given[name] if name in given else _draw(spec, seeds[name], device)

    progress.begin("writing", sum(shard.nbytes for shard in plan.shards))
    with ThreadPoolExecutor(_SHARDS_AT_ONCE) as pool:
        records = pool.map(lambda shard: _write_shard(folder, shard, value, progress), plan.shards)
        written = {shard.name: record for shard, record in zip(plan.shards, records, strict=True)}
    _write_records(folder, plan, written)


def _source(shape: ModelShape) -> Checkpoint:
    """The checkpoint that transformers would save of a model of that shape: config and header only."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(shape.model_type, **shape.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {
        name: TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in model.state_dict().items()
    }
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    described = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [type(model).__name__]}
    texts = {CONFIG: json.dumps({**described, "dtype": "bfloat16"}, indent=2)}
    header = encode_header(tensors, SHARD_METADATA)
    sizes = {
        CONFIG: len(texts[CONFIG].encode()),
        SINGLE: len(header) + sum(spec.nbytes for spec in tensors.values()),
    }
    return assemble(None, sizes, texts.__getitem__, lambda name: parse_header(header[8:], sizes[name], name))


def _draw_experts(shape: ModelShape, options: FormatOptions, device: torch.device) -> dict[str, Tensor]:
    return stored_parts(draw_layer(shape.layer, shape.activation, options, 0, device))


def _draw(spec: TensorSpec, seed: int, device: torch.device) -> Tensor:
    tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
    if tensor.ndim < 2:
        return tensor.fill_(1)
    return tensor.normal_(0, STD, generator=torch.Generator(device).manual_seed(seed))


def _write_shard(
    folder: Path, shard: Shard, value: Callable[[str, TensorSpec], Tensor], progress: Progress
) -> FileRecord:
    with HashingFile(folder / f"{shard.name}.part", folder / shard.name) as file:
        file.write(encode_header(shard.tensors, SHARD_METADATA))
        for name in data_order(shard.tensors):
            data = as_bytes(value(name, shard.tensors[name]).cpu())
            file.write(data)
            progress.advance(len(data))
        return file.commit()


def _write_records(folder: Path, plan: Plan, files: Mapping[str, FileRecord]) -> None:
    """Index, source record, manifest and, last, config.json: the folder is no checkpoint before."""
    source = plan.source
    index = {INDEX: shard_index({shard.name: shard.tensors for shard in plan.shards})} if len(plan.shards) > 1 else {}
    config = {**source.config, "quantization_config": plan.options.config_entry()}
    texts = {
        name: json.dumps(value, indent=2)
        for name, value in {**index, SOURCE: record_source(source), CONFIG: config}.items()
    }
    records = {name: FileRecord(sha256(text.encode()).hexdigest(), len(text.encode())) for name, text in texts.items()}
    sizes = {name: len(text.encode()) for name, text in source.texts.items()}
    sizes |= {name: header.nbytes for name, header in source.headers.items()}
    manifest = describe_folder(
        asdict(plan.options),
        {"mreader": version("mreader"), "torch": torch.__version__},
        {
            "repo": None,
            "revision": None,
            "files": {name: {"sha256": "", "bytes": size} for name, size in sizes.items()},
        },
        {**files, **records},
    )
    for name, text in {MANIFEST: json.dumps(manifest, indent=2), **texts}.items():
        (folder / name).write_text(text, encoding="utf-8")
