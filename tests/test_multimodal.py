"""Multimodal model types on the command line: their language model writes text, as that of any other type."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import MODEL_TYPES, VOCABULARY, is_in_transformers, save_tiny
from commands import mreader
from sources import all_tensors, read_json
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import mreader as package
from mreader.errors import UnsupportedError
from mreader.selectors.subject import open_subject

TYPES = ("aria", "gemma4", "glm4v_moe", "glm5_next", "hy_v4_vl", "minimax_m3_vl", "qwen3_5_moe", "qwen3_vl_moe")


def test_every_multimodal_type_is_tried() -> None:
    """But the one whose whole has no forward: tests/test_evaluate.py runs its thinker."""
    multimodal = {model_type for model_type, config in MODEL_TYPES.values() if "text_config" in config}
    assert multimodal == set(TYPES)


@pytest.fixture(scope="module", params=TYPES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not is_in_transformers(request.param):
        pytest.skip("this transformers does not have it")
    folder = tmp_path_factory.mktemp("multimodal")
    save_tiny(folder / "source", request.param)
    one_letter_a_token().save_pretrained(folder / "source")
    package.convert(folder / "source", folder / "out", device="cpu")
    return folder / "out"


def one_letter_a_token() -> PreTrainedTokenizerFast:
    """Token i is the letter of code point 32 + i."""
    tokenizer = Tokenizer(WordLevel({chr(32 + i): i for i in range(VOCABULARY)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ")


def test_selectors_see_the_weights_of_the_file(converted: Path) -> None:
    """Also of a type whose experts transformers has with their axes swapped (aria); clamped ones are refused."""
    stored = all_tensors(converted)
    prefixes = sorted(name.removesuffix("sketch_codes") for name in stored if name.endswith(".sketch_codes"))
    for folder in (converted, converted.parent / "source"):
        try:
            subject = open_subject(folder, "bfloat16", "cpu")
        except UnsupportedError:
            assert "swiglu_limit" in read_json(folder / "config.json")["text_config"]
            continue
        for prefix, layer in zip(prefixes, subject.layers, strict=True):
            torch.testing.assert_close(layer.gate_up, stored[f"{prefix}gate_up_proj"], rtol=0, atol=0)
            torch.testing.assert_close(layer.down, stored[f"{prefix}down_proj"], rtol=0, atol=0)


def test_generate(converted: Path) -> None:
    call = ("generate", converted, "--prompt", "SAY", "--max-new-tokens", "6", "--dtype", "float32", "--device", "cpu")
    sparse, dense = mreader(*call, "--channels", "1", "--json"), mreader(*call, "--dense", "--json")
    assert (sparse.code, dense.code) == (0, 0), sparse.err + dense.err
    assert json.loads(sparse.out)["text"] == json.loads(dense.out)["text"]
    assert json.loads(sparse.out)["tokens"] > 0
    assert mreader(*call, "--channels", "1").out.strip() == json.loads(dense.out)["text"].strip()


def test_eval(converted: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(1, 65) % (VOCABULARY - 10))
    call = ("eval", converted, "--tokens", tmp_path / "ids.npy", "--windows", "2", "--length", "16", "--json", "-q")
    ran = mreader(*call, "--channels", "1", "--dtype", "float32", "--device", "cpu")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["kl"] == pytest.approx(0, abs=1e-6)
