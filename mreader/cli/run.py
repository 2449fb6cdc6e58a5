"""mreader generate and eval. What runs a model is imported by the command that runs it: it takes seconds."""

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mreader.cli.console import err, key_values, out, percent, print_json, progress, size
from mreader.cli.options import (
    AugmentedPath,
    Channels,
    Coordinates,
    Device,
    Json,
    Quiet,
    Rank,
    ReadsBudget,
    Score,
    Verbose,
    verbosity,
)
from mreader.errors import SourceError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mreader.generate import Generation

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def generate_command(
    path: AugmentedPath,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; read from stdin where it is left out.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from this share of the probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    channels: Channels = None,
    reads: ReadsBudget = None,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    dense: Annotated[bool, typer.Option("--dense", help="Read everything: the source model.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (as stored), bfloat16, float16 or float32.")] = "auto",
    device: Device = "auto",
    stats: Annotated[bool, typer.Option("--stats", help="Say afterwards how fast it was and what it read.")] = False,
    json: Json = False,
) -> None:
    """Continue a prompt, reading only the channels that matter."""
    from mreader.generate import Sampling, encode_prompt, generate
    from mreader.runtime import set_budget

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    text = prompt if prompt is not None else sys.stdin.read()
    model, tokenizer = _load(path, dtype, device)
    set_budget(model, channels=channels, reads=reads, coordinates=coordinates, score=score, rank=rank)
    ids = encode_prompt(tokenizer, text, chat)
    emit = (lambda piece: None) if json else _write
    generation = generate(model, tokenizer, ids, sampling, mode="never" if dense else "decode", emit=emit)
    if json:
        print_json(asdict(generation))
        return
    _write("\n")
    if stats:
        _print_stats(generation)


def eval_command(
    path: AugmentedPath,
    tokens: Annotated[Path | None, typer.Option(help=".npy file of token ids.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or folder of .py, .txt and .md files.")] = None,
    windows: Annotated[int, typer.Option(help="How many windows.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    channels: Channels = None,
    reads: ReadsBudget = None,
    coordinates: Coordinates = None,
    score: Score = None,
    rank: Rank = None,
    dtype: Annotated[str, typer.Option(help="auto (as stored), bfloat16, float16 or float32.")] = "float32",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare the reader with the dense model, every token of every window through both."""
    from mreader.evaluate import cut_windows, evaluate, read_text, read_tokens
    from mreader.runtime import set_budget

    if (tokens is None) == (text is None):
        raise UsageError("give one of --tokens and --text", "--tokens FILE.npy, or --text FILE_OR_FOLDER")
    model, tokenizer = _load(path, dtype, device)
    set_budget(model, channels=channels, reads=reads, coordinates=coordinates, score=score, rank=rank)
    ids = read_tokens(tokens) if tokens is not None else read_text(text or Path(), tokenizer)
    with progress(verbosity(quiet, verbose)) as bar:
        evaluation = evaluate(model, cut_windows(ids, windows, length), bar)
    if json:
        print_json(evaluation.to_dict())
        return
    out.print(
        key_values(
            {
                "KL(dense || reader)": f"{evaluation.kl:.4f} nats a token",
                "top-1 agreement": percent(evaluation.top1),
                "loss": f"{evaluation.nll:.4f} nats, dense {evaluation.nll_dense:.4f}",
                "reads": f"{percent(evaluation.reads)} of the routed experts' weights, k = {evaluation.k}",
            }
        )
    )


def _load(path: Path, dtype: str, device: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from mreader.runtime import load

    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()  # one bar is enough
    if dtype not in _DTYPES:
        raise UsageError(f"dtype is {dtype}", f"choose one of {', '.join(_DTYPES)}")
    model = load(path, dtype=dtype, device=device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} has no tokenizer", "copy the tokenizer files of the source into it") from error
    return model, tokenizer


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_stats(generation: "Generation") -> None:
    err.print(
        key_values(
            {
                "tokens": str(generation.tokens),
                "speed": f"{generation.tokens_per_s:.1f} tokens/s" if generation.tokens_per_s else "one token only",
                "k": str(generation.k),
                "reads": f"{percent(generation.reads)} of the routed experts' weights",
                "a token": size(generation.bytes_per_token),
            }
        )
    )
