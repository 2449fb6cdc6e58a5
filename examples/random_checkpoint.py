#!/usr/bin/env python3
"""Writes an augmented checkpoint of a known model's shape with random weights, where no source fits or is at hand.

usage: python examples/random_checkpoint.py qwen3-30b-a3b OUT     (66 GB)

It has no tokenizer: `vllm serve OUT --skip-tokenizer-init` takes prompts as token ids, and so does `mreader bench
serve OUT -- --skip-tokenizer-init`. What is random and what is true: mreader/bench/checkpoint.py.
"""

import argparse
from pathlib import Path

from mreader.bench.checkpoint import with_layers, write_random
from mreader.bench.shapes import SHAPES, get_shape
from mreader.bench.target import DEFAULT_CHANNELS
from mreader.cli.console import Verbosity, fail, progress
from mreader.device import pick_device
from mreader.formats.augmented import FormatOptions


def main() -> None:
    args = parse_arguments()
    try:
        shape = get_shape(args.shape)
        if args.layers is not None:
            shape = with_layers(shape, args.layers)
        with progress(Verbosity.NORMAL) as bar:
            write_random(args.out, shape, FormatOptions(channels=args.channels), pick_device(args.device), bar)
    except Exception as error:
        fail(error)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write an augmented checkpoint of random weights.")
    parser.add_argument("shape", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, where there is less room")
    parser.add_argument("--channels", type=float, default=DEFAULT_CHANNELS, help="default budget (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu or cuda:N")
    return parser.parse_args()


if __name__ == "__main__":
    main()
