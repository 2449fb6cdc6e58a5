"""mreader generate. What runs a model is imported by the command: it takes seconds."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from mreader.cli.console import err, key_values, percent, print_json, size
from mreader.cli.model import BudgetOptions, load_model
from mreader.cli.options import (
    AugmentedPath,
    Channels,
    Coordinates,
    Device,
    Dtype,
    Json,
    Rank,
    ReadsBudget,
    Score,
)
from mreader.errors import UsageError

if TYPE_CHECKING:
    from mreader.generate import Generation
    from mreader.runtime import Mode


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
    compile: Annotated[
        bool,
        typer.Option("--compile/--no-compile", help="On a GPU: compile the layers; a slower start, faster steps."),
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    stats: Annotated[bool, typer.Option("--stats", help="Say afterwards how fast it was and what it read.")] = False,
    json: Json = False,
) -> None:
    """Continue a prompt, reading only the channels that matter; prints what follows the prompt."""
    from mreader.generate import Sampling, encode_prompt, generate

    budget = BudgetOptions(channels, reads, coordinates, score, rank)
    if dense:
        _refuse_with_dense(budget)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    text = _read_prompt(prompt)
    if not text:
        raise UsageError("the prompt is empty", "give --prompt some text, or pipe it in")
    model, tokenizer = load_model(path, budget, dtype, device)
    ids = encode_prompt(tokenizer, text, chat)
    emit = (lambda piece: None) if json else _write
    mode: Mode = "never" if dense else "decode"
    generation = generate(model, tokenizer, ids, sampling, mode=mode, compiled=compile, emit=emit, note=_note)
    if json:
        print_json(asdict(generation))
        return
    _write("\n")
    if stats:
        _print_stats(generation)


def _refuse_with_dense(budget: BudgetOptions) -> None:
    for name, value in asdict(budget).items():
        if value is not None:
            raise UsageError(
                f"--{name} says nothing about --dense, which reads everything", f"leave --{name} or --dense out"
            )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    err.print(f"note: {escape(text)}")


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


def _read_prompt(prompt: str | None) -> str:
    """The option's text, else what stdin has. UsageError for bytes that are none."""
    try:
        text = sys.stdin.read() if prompt is None else prompt
        text.encode()  # what Python could not decode of an option it keeps as surrogates
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8", "convert it, for instance with iconv") from error
    return text
