"""Train a small Mixture-of-Experts model on a folder of text, to try mreader with.

    python examples/train_tiny.py --text src --out tiny --steps 20      # does it work? a minute on two cores
    python examples/train_tiny.py --text src --out tiny --batch 128     # on a GPU: a model that writes plausible code

The folder OUT is an ordinary Hugging Face checkpoint: weights in BF16, tokenizer, configs and training.json.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

END = "<|endoftext|>"  # token 0: ends a text, starts the next one, and pads
SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".h", ".js", ".ts", ".rs", ".go", ".java"}
HELD_OUT = 0.05  # fraction of the tokens, from the end, that is never trained on

SHARED = {
    "num_hidden_layers": 4,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# model_type -> config; another architecture of transformers is another entry
ARCHITECTURES = {
    "olmoe": {
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 32,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "norm_topk_prob": True,
    },
}


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    texts = read_texts(args.text)
    tokenizer = train_tokenizer(texts, args.vocabulary)
    tokens = encode(tokenizer, texts)
    held_out = max(int(HELD_OUT * len(tokens)), args.length + 1)
    print(f"{len(texts)} files, {len(tokens):,} tokens, the last {held_out:,} of them held out")

    values = {**SHARED, **ARCHITECTURES[args.architecture], "vocab_size": args.vocabulary}
    config = AutoConfig.for_model(args.architecture, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(args.device)
    print(f"{args.architecture}, {model.num_parameters() / 1e6:.1f} million parameters, on {args.device}")

    start = time.perf_counter()
    last_loss = train(model, tokens[:-held_out], args)
    report = {
        "steps": args.steps,
        "tokens": args.steps * args.batch * args.length,
        "seconds": round(time.perf_counter() - start, 1),
        "last_loss": last_loss,
        "held_out_loss": held_out_loss(model, tokens[-held_out:], args.length),
        "torch": torch.__version__,
    }
    save(model, tokenizer, args.out, report)
    print(f"held-out loss {report['held_out_loss']:.3f} nats a token; saved to {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="folder of text or code, read with its subfolders")
    parser.add_argument("--out", type=Path, required=True, help="folder to save the model in")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="olmoe")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def read_texts(folder: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise SystemExit(f"{folder} holds no files that end in {', '.join(sorted(SUFFIXES))}")
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text can be encoded, whatever it holds."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=SHARED["max_position_embeddings"],
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts in one row, an end token after each."""
    return torch.tensor([token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_token_id]])


def train(model: PreTrainedModel, tokens: Tensor, args: argparse.Namespace) -> float:
    """AdamW with a warm-up and a cosine decay; returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = max(1, args.steps // 20)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm_up, total_iters=warm_up)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, args.steps - warm_up), args.learning_rate / 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [ramp, decay], [warm_up])
    model.train()
    loss = float("nan")
    for step, batch in enumerate(random_windows(tokens, args), start=1):
        # The router's loss keeps the experts equally busy; without it a few of them do all the work.
        output = model(input_ids=batch, labels=batch, output_router_logits=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == args.steps or step % max(1, args.steps // 20) == 0:
            loss = output.loss.item()
            print(f"step {step}/{args.steps}  loss {loss:.3f}", flush=True)
    return loss


def random_windows(tokens: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """(batch, length) tokens from random places, `steps` times."""
    if len(tokens) <= args.length:
        raise SystemExit(f"{len(tokens):,} tokens are too few for windows of {args.length}")
    places = tokens.unfold(0, args.length, 1)
    for _ in range(args.steps):
        yield places[torch.randint(len(places), (args.batch,))].to(args.device)


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, tokens: Tensor, length: int, windows: int = 16) -> float:
    """Next-token loss in nats, the mean over the first windows."""
    model.eval()
    batch = tokens[: len(tokens) // length * length].view(-1, length)[:windows].to(model.device)
    return float(model(input_ids=batch, labels=batch, output_router_logits=False).loss)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path, report: dict[str, object]) -> None:
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
