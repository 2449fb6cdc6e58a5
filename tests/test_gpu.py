"""On a CUDA device: the same conversion, the same model."""

from pathlib import Path

import pytest
import torch

import mreader
from mreader.evaluate import cut_windows, evaluate, read_text
from mreader.generate import Sampling, encode_prompt, generate
from mreader.runtime import set_budget

pytestmark = pytest.mark.gpu
OWN_TEXT = Path(__file__).parent.parent / "mreader"


@pytest.fixture(scope="module")
def converted_there(olmoe_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, its sketch and recovery map computed on the device."""
    out = tmp_path_factory.mktemp("cuda") / "olmoe-tiny"
    mreader.convert(olmoe_tiny, out, device="cuda:0")
    return out


@pytest.mark.parametrize("codes", ["ternary", "quaternary"])
def test_a_conversion_there_is_what_the_cpu_computes(codes: str, olmoe_tiny: Path, tmp_path: Path) -> None:
    mreader.convert(olmoe_tiny, tmp_path / "out", mreader.FormatOptions(codes=codes), device="cuda:0")
    mreader.verify(tmp_path / "out", olmoe_tiny)


@pytest.mark.parametrize("score", ["norm", "rho", "variance"])
def test_kl_is_the_cpu_s(score: str, converted_there: Path) -> None:
    from transformers import AutoTokenizer

    windows = cut_windows(read_text(OWN_TEXT, AutoTokenizer.from_pretrained(converted_there)), 4, 128)
    found = {}
    for device in ("cpu", "cuda:0"):
        model = mreader.load(converted_there, dtype=torch.float32, device=device)
        set_budget(model, score=score)
        found[device] = evaluate(model, windows).kl
    # Channels at the threshold fall to either side by the order of float32 sums
    assert found["cuda:0"] == pytest.approx(found["cpu"], rel=0.03)


def test_it_generates_there(converted_there: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted_there)
    model = mreader.load(converted_there, device="auto")
    assert model.device.type == "cuda"
    ids = encode_prompt(tokenizer, "def read(path):\n", chat=False)
    assert generate(model, tokenizer, ids, Sampling(max_new_tokens=16)).tokens > 1
