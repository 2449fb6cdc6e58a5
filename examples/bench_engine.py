#!/usr/bin/env python3
"""Milliseconds a token of vLLM's engine, in this process: what decoding costs, without a server around it.

    python examples/random_checkpoint.py qwen3-30b-a3b OUT        # or any augmented checkpoint
    python examples/bench_engine.py OUT                           # sparse
    MREADER_READS=dense python examples/bench_engine.py OUT       # all channels of the same weights
    python examples/bench_engine.py OUT --stock                   # vLLM's own experts: OUT's shape, random weights

N requests of 32 random tokens each are answered together: (time of 129 tokens - time of 1) / 128, median of three.
Tokens are drawn at temperature 1, so that requests do not come to be routed alike. `mreader bench serve` measures what
users of a server see.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from mreader.cli.console import fail
from mreader.formats.augmented import open_augmented

PROMPT, ANSWER, REPEATS = 32, 129, 3


def main() -> None:
    """Parse the command line and measure; a failure ends in one line."""
    args = parse_arguments()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        open_augmented(args.out)
        measure(args.out, args.batch, args.stock, args.engine)
    except Exception as error:
        fail(error)


def measure(out: Path, batches: list[int], stock: bool, more: dict[str, Any]) -> None:
    """Start the engine, and print a line a batch."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = stock_folder(out, Path(scratch)) if stock else out
        engine = start(folder, batches, stock, more)
        print(f"{'N':>4} {'ms a token':>11} {'tokens/s':>9}")
        for batch in batches:
            seconds = time_per_token(engine, batch)
            print(f"{batch:>4} {1e3 * seconds:>11.2f} {batch / seconds:>9.0f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of an augmented checkpoint")
    parser.add_argument("--stock", action="store_true", help="measure vLLM's own experts in the same shape")
    parser.add_argument("--batch", type=numbers, default="1,2,4,8,16,32,64", help="requests at a time (%(default)s)")
    parser.add_argument("--engine", type=json.loads, default="{}", help="more arguments of vllm.LLM, as JSON")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """Of "1,2,4". ValueError where one is none, or below 1."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def stock_folder(out: Path, scratch: Path) -> Path:
    """A folder with OUT's config as the source had it, and no weights."""
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (scratch / "config.json").write_text(json.dumps(config))
    for path in out.glob("*token*"):
        shutil.copy(path, scratch)
    return scratch


def start(folder: Path, batches: list[int], stock: bool, more: dict[str, Any]) -> Any:
    """The engine; with a CUDA graph a batch, where it has graphs."""
    from vllm import LLM

    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=2 * (PROMPT + ANSWER),
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        **({"load_format": "dummy"} if stock else {}),
        **{"compilation_config": {"cudagraph_capture_sizes": batches}, **more},
    )
    if stock:
        engine.apply_model(draw)
    return engine


def draw(model: Any) -> None:
    """Weights as `random_checkpoint.py` draws them, since vLLM's dummies are the same in every router."""
    import torch

    with torch.inference_mode():
        for seed, parameter in enumerate(model.parameters()):
            generator = torch.Generator(parameter.device).manual_seed(seed)
            if parameter.ndim < 2:
                parameter.data.fill_(1)
            else:
                parameter.data.normal_(0, 0.02, generator=generator)


def time_per_token(engine: Any, batch: int) -> float:
    """Median seconds of a decode step of `batch` requests."""
    chance = random.Random(batch)
    vocabulary = engine.llm_engine.vllm_config.model_config.get_vocab_size()

    def prompts() -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": chance.choices(range(vocabulary), k=PROMPT)} for _ in range(batch)]

    generate(engine, prompts(), 5)  # compiles what the batch needs
    steps = []
    for _ in range(REPEATS):
        asked = prompts()
        steps.append((generate(engine, asked, ANSWER) - generate(engine, asked, 1)) / (ANSWER - 1))
    return median(steps)


def generate(engine: Any, prompts: list[dict[str, list[int]]], tokens: int) -> float:
    """Seconds until all prompts have so many tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    if any(len(answer.outputs[0].token_ids) != tokens for answer in answers):
        raise SystemExit(f"an answer has not the {tokens} tokens that were asked for")
    return seconds


if __name__ == "__main__":
    main()
