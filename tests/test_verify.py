"""Every kind of damage to an augmented checkpoint is found, and named."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import mreader
from safetensors.torch import load_file, save_file
from sources import all_tensors, copied, edit_json, edit_shard, edit_tensor, make_source, shards

from mreader import FormatOptions
from mreader.convert import convert
from mreader.formats.codes import TERNARY
from mreader.formats.coding import pack, unpack
from mreader.sketch import rotate_rows

USAGE, SOURCE, VERIFY, UNSUPPORTED = 2, 3, 5, 6
PREFIX = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "source")


@pytest.fixture(scope="module")
def augmented(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: tests that change it copy it first."""
    out = tmp_path_factory.mktemp("augmented") / "out"
    convert(source, out, device="cpu")
    return out


@pytest.fixture
def out(augmented: Path, tmp_path: Path) -> Path:
    return copied(augmented, tmp_path / "out")


def change_tensor(out: Path, name: str, change: Callable[[torch.Tensor], Any], sealed: bool = False) -> None:
    """Change one tensor where it lies in the file, and leave the manifest as it is unless `sealed`."""
    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    dtype = {"U8": torch.uint8, "I8": torch.int8, "F16": torch.float16, "BF16": torch.bfloat16}[entry["dtype"]]
    tensor = torch.frombuffer(data[begin:end], dtype=dtype).clone().reshape(entry["shape"])
    changed = change(tensor)
    if isinstance(changed, torch.Tensor) and changed.shape == tensor.shape:  # otherwise it was changed in place
        tensor = changed
    data[begin:end] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)
    if sealed:
        seal(out)


def seal(out: Path, *names: str) -> None:
    """Let the manifest say that the files are as they should be."""

    def change(manifest: dict[str, Any]) -> None:
        for name in names or ("model.safetensors",):
            data = (out / name).read_bytes()
            manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    edit_json(out / "mreader_manifest.json", change)


def flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8)[tensor.nbytes // 2] ^= 1


def rewrite(out: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Another file with other tensors, and a manifest that says it is the right one."""
    path = out / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    seal(out)


def test_good(source: Path, out: Path) -> None:
    for arguments in ((), ("--source", source)):
        ran = mreader("verify", out, *arguments)
        assert (ran.code, ran.out) == (0, "")
        assert f"{out} is good" in ran.err
    ran = mreader("verify", out, "--source", source, "--json")
    tensors = len(all_tensors(out))
    assert json.loads(ran.out) == {"ok": True, "files": 9, "tensors": tensors, "layers_compared": 3, "unlisted": []}


@pytest.mark.parametrize("options", [FormatOptions(codes="quaternary"), FormatOptions(rank=0), FormatOptions(rank=192)])
def test_good_with_other_options(source: Path, tmp_path: Path, options: FormatOptions) -> None:
    convert(source, tmp_path / "out", options, device="cpu")
    assert mreader("verify", tmp_path / "out", "--source", source).code == 0


ALL_KINDS = (
    *(f"{PREFIX}.{part}" for part in ("gate_up_proj", "down_proj")),
    *(f"{PREFIX}.sketch_{part}" for part in ("codes", "scales", "errors", "signs")),
    *(f"{PREFIX}.{part}" for part in ("down_norms", "recovery_basis", "recovery_coeffs")),
    *("model.norm.weight", "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"),
)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_one_flipped_bit_is_found_by_the_checksum(out: Path, name: str) -> None:
    change_tensor(out, name, flip_a_bit)
    ran = mreader("verify", out)
    assert "model.safetensors has another sha256" in ran.cause
    assert ran.code == VERIFY


@pytest.mark.parametrize("name", [name for name in ALL_KINDS if not name.startswith(f"{PREFIX}.sketch")][:2])
def test_one_flipped_bit_of_an_expert_is_found_by_the_source(source: Path, out: Path, name: str) -> None:
    change_tensor(out, name, flip_a_bit, sealed=True)
    assert mreader("verify", out).code == 0
    ran = mreader("verify", out, "--source", source)
    kind = "down" if name.endswith("down_proj") else "gate"
    assert f"{PREFIX}.3.{kind}_proj.weight" in ran.cause
    assert "expert 3" in ran.cause
    assert ran.code == VERIFY


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"])
def test_one_flipped_bit_of_a_copied_tensor_is_found_by_the_source(source: Path, out: Path, name: str) -> None:
    change_tensor(out, name, flip_a_bit, sealed=True)
    ran = mreader("verify", out, "--source", source)
    assert name in ran.cause
    assert ran.code == VERIFY


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("sketch_codes", lambda t: t.flip(3), "sketch_codes"),
        ("sketch_codes", lambda t: t[0, 0, :40].bitwise_xor_(1), "sketch_codes"),
        ("sketch_codes", lambda t: t.__setitem__((..., -1), 1), "sketch_codes"),  # padding
        ("sketch_codes", lambda t: t.__setitem__((0, 0, 0, 0), 243 + int(t[0, 0, 0, 0]) % 13), "sketch_codes"),
        ("sketch_scales", lambda t: t.mul_(1.019), "sketch_scales"),
        ("sketch_scales", lambda t: t[2, 1, :, 17].zero_(), "sketch_scales (up of expert 2, channel 17, block"),
        ("sketch_scales", lambda t: t[2, 0, :, 17].mul_(2), "sketch_scales (gate of expert 2, channel 17, block"),
        ("sketch_errors", lambda t: t.mul_(1.015), "sketch_errors"),
        ("sketch_errors", lambda t: t[5, 1, 1, 79:].mul_(1.02), "sketch_errors (up of expert 5, channel 79, block 1)"),
        ("sketch_signs", lambda t: t[5:6].neg_(), "sketch_signs"),
        ("down_norms", lambda t: t[0, 79:].mul_(1.03), "down_norms (expert 0, channel 79)"),
        ("recovery_basis", lambda t: t[:, 3].mul_(1.01), "recovery_basis"),
        ("recovery_basis", lambda t: t.roll(1, 0), "recovery_coeffs"),  # they do not belong together any more
        ("recovery_coeffs", lambda t: t[4].mul_(1.02), "recovery_coeffs"),
        ("recovery_coeffs", lambda t: t[4, 3].mul_(1.02), "recovery_coeffs (expert 4, channel 3)"),
        ("recovery_coeffs", lambda t: t.roll(1, 2), "recovery_coeffs"),
    ],
)
def test_what_the_source_does_not_give_is_found_by_the_source(
    source: Path, out: Path, part: str, change: Callable[[torch.Tensor], Any], named: str
) -> None:
    """Where the checksums agree: somebody wrote the file so."""
    change_tensor(out, f"{PREFIX}.{part}", change, sealed=True)
    assert mreader("verify", out).code == 0
    ran = mreader("verify", out, "--source", source)
    assert f"{PREFIX}.{named}" in ran.cause
    assert ran.code == VERIFY


def recode(out: Path, weight: float) -> None:
    """Another ternary code for one weight of the first block of a row: for the one nearest to `weight` * s."""
    tensors = all_tensors(out)
    row = tensors[f"{PREFIX}.gate_up_proj"][0, 0, :1]
    block = rotate_rows(row, tensors[f"{PREFIX}.sketch_signs"])[0, 0]
    indices = unpack(tensors[f"{PREFIX}.sketch_codes"][0, 0, :128], TERNARY, 80)
    scale = float(tensors[f"{PREFIX}.sketch_scales"][0, 0, 0, 0])
    place = int((block.abs() - weight * scale).abs().argmin())
    sign = 1 if block[place] > 0 else -1
    indices[place, 0] = 1 if indices[place, 0] != 1 else 1 + sign
    codes = indices[:, 0].float() - 1
    kept = (codes * block).sum() / codes.square().sum()
    error = (block - kept.half().float() * codes).square().mean()
    change_tensor(out, f"{PREFIX}.sketch_codes", lambda t: t[0, 0, :128].copy_(pack(indices, TERNARY)))
    change_tensor(out, f"{PREFIX}.sketch_scales", lambda t: t[0, 0, 0, :1].fill_(kept.item()))
    change_tensor(out, f"{PREFIX}.sketch_errors", lambda t: t[0, 0, 0, :1].fill_(error.item()), sealed=True)


def test_another_code_on_the_border_is_as_good(source: Path, out: Path) -> None:
    """As another machine may choose, with the scale and the error that belong to it."""
    recode(out, 0.5)
    assert mreader("verify", out, "--source", source).code == 0


@pytest.mark.parametrize("part", ["scales", "errors"])
def test_another_code_with_what_does_not_belong_to_it_is_found(source: Path, out: Path, part: str) -> None:
    recode(out, 0.5)
    change_tensor(out, f"{PREFIX}.sketch_{part}", lambda t: t[0, 0, 0, :1].mul_(1.05), sealed=True)
    ran = mreader("verify", out, "--source", source)
    assert f"{PREFIX}.sketch_errors (gate of expert 0, channel 0, block 0)" in ran.cause
    assert ran.code == VERIFY


def test_a_worse_code_is_found(source: Path, out: Path) -> None:
    recode(out, 2.5)
    ran = mreader("verify", out, "--source", source)
    assert f"{PREFIX}.sketch_codes (gate of expert 0, channel 0, block 0)" in ran.cause
    assert ran.code == VERIFY


def test_another_recovery_map_that_is_as_good_is_good(source: Path, out: Path) -> None:
    """U in another order and sign, as another machine may find it: noise turns U where singular values are close."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    change_tensor(out, f"{PREFIX}.recovery_basis", lambda t: -t[:, order], sealed=True)
    change_tensor(out, f"{PREFIX}.recovery_coeffs", lambda t: -t[:, :, order], sealed=True)
    assert mreader("verify", out, "--source", source).code == 0


@pytest.fixture(scope="module")
def flat(source: Path, augmented: Path) -> tuple[Path, Path]:
    """Random weights, and their augmented checkpoint."""
    return source, augmented


@pytest.fixture(scope="module")
def decaying(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source whose down projections have main directions, as trained ones have, and its augmented checkpoint."""
    folder = tmp_path_factory.mktemp("decaying")
    source = make_source(folder / "source")
    decay = (1.0 / torch.arange(1, 193)).sqrt().unsqueeze(1)
    for shard in shards(source):
        edit_shard(
            shard,
            lambda tensors: [t.mul_(decay) for name, t in tensors.items() if "experts" in name and "down" in name],
        )
    convert(source, folder / "out", device="cpu")
    return source, folder / "out"


@pytest.mark.parametrize(("lost", "code"), [(4e-4, 0), (7e-4, VERIFY)])
@pytest.mark.parametrize("spectrum", ["flat", "decaying"])
def test_energy_that_a_recovery_map_may_miss(
    spectrum: str, lost: float, code: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of all energy, as the specification says, whether U keeps a quarter of it or most: U leans towards the
    directions that come next, by the angle at which ||U^T A||^2 falls by `lost` ||A||^2.
    """
    source, made = request.getfixturevalue(spectrum)
    out = copied(made, tmp_path / "out")
    down = all_tensors(out)[f"{PREFIX}.down_proj"].double()  # (E, I, H)
    left, sizes, _ = torch.linalg.svd(down.flatten(0, 1).T, full_matrices=False)
    energy = sizes.square()
    sine = (lost * energy.sum() / (energy[:32].sum() - energy[32:64].sum())).sqrt()
    basis = ((1 - sine.square()).sqrt() * left[:, :32] + sine * left[:, 32:64]).half()
    change_tensor(out, f"{PREFIX}.recovery_basis", lambda t: basis, sealed=True)
    change_tensor(out, f"{PREFIX}.recovery_coeffs", lambda t: (down @ basis.double()).half(), sealed=True)
    ran = mreader("verify", out, "--source", source)
    assert ran.code == code
    assert code == 0 or f"{PREFIX}.recovery_basis (energy" in ran.cause


def test_a_recovery_map_that_keeps_less_energy_is_found(source: Path, out: Path) -> None:
    """Orthonormal, and with the right coefficients, but not of the main directions."""
    down = all_tensors(out)[f"{PREFIX}.down_proj"].float()
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(192, 32, generator=generator)).Q.half()
    change_tensor(out, f"{PREFIX}.recovery_basis", lambda t: basis, sealed=True)
    change_tensor(out, f"{PREFIX}.recovery_coeffs", lambda t: (down @ basis.float()).half(), sealed=True)
    ran = mreader("verify", out, "--source", source)
    assert f"{PREFIX}.recovery_basis" in ran.cause
    assert ran.code == VERIFY


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj", "sketch_scales", "sketch_errors", "recovery_coeffs"])
def test_values_that_are_not_finite(out: Path, part: str, value: float) -> None:
    change_tensor(out, f"{PREFIX}.{part}", lambda t: t.view(-1).__setitem__(7, value), sealed=True)
    ran = mreader("verify", out)
    assert f"{PREFIX}.{part} holds NaN or infinity" in ran.cause
    assert ran.code == VERIFY


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{PREFIX}.down_norms"), [f"{PREFIX}.down_norms", "missing"]),
        (lambda t: t.pop("model.norm.weight"), ["model.norm.weight", "missing"]),
        (lambda t: t.update(extra=torch.zeros(3)), ["extra"]),
        (
            lambda t: t.update({f"{PREFIX}.down_norms": torch.zeros(6, 81, dtype=torch.float16)}),
            [f"{PREFIX}.down_norms", "[6, 81]", "[6, 80]"],
        ),
        (
            lambda t: t.update({f"{PREFIX}.sketch_scales": t[f"{PREFIX}.sketch_scales"].float()}),
            [f"{PREFIX}.sketch_scales", "F32", "F16"],
        ),
        (
            lambda t: t.update({f"{PREFIX}.down_proj": t[f"{PREFIX}.down_proj"].transpose(1, 2).contiguous()}),
            [f"{PREFIX}.down_proj", "[6, 192, 80]", "[6, 80, 192]"],
        ),
    ],
)
def test_tensors_that_are_not_those_of_the_format(
    out: Path, change: Callable[[dict[str, torch.Tensor]], Any], words: list[str]
) -> None:
    rewrite(out, change)
    ran = mreader("verify", out)
    assert [word for word in words if word not in ran.cause] == [], ran.err
    assert ran.code == VERIFY


FILES: list[tuple[str, Callable[[Path], Any], int, list[str]]] = [
    ("truncated shard", lambda f: os.truncate(f / "model.safetensors", 1_000_000), VERIFY, ["model.safetensors"]),
    ("missing shard", lambda f: (f / "model.safetensors").unlink(), VERIFY, ["safetensors"]),
    ("missing config", lambda f: (f / "config.json").unlink(), VERIFY, ["config.json"]),
    ("missing manifest", lambda f: (f / "mreader_manifest.json").unlink(), VERIFY, ["mreader_manifest.json"]),
    ("missing record", lambda f: (f / "mreader_source.json").unlink(), VERIFY, ["mreader_source.json"]),
    ("missing tokenizer", lambda f: (f / "tokenizer.json").unlink(), VERIFY, ["tokenizer.json is missing"]),
    ("longer tokenizer", lambda f: (f / "tokenizer.json").write_text("{}" * 20), VERIFY, ["tokenizer.json has 40"]),
    ("changed template", lambda f: (f / "chat template.jinja").write_text("{{ messagez }}"), VERIFY, ["chat template"]),
    ("config no JSON", lambda f: (f / "config.json").write_text("{"), VERIFY, ["config.json"]),
    ("manifest no JSON", lambda f: (f / "mreader_manifest.json").write_text("{"), VERIFY, ["mreader_manifest.json"]),
    ("manifest empty", lambda f: (f / "mreader_manifest.json").write_text("{}"), VERIFY, ["source"]),
    (
        "manifest with a file elsewhere",
        lambda f: edit_json(f / "mreader_manifest.json", lambda m: m["files"].update({"../x": {}})),
        VERIFY,
        ["../x"],
    ),
    (
        "manifest that forgets a shard",
        lambda f: edit_json(f / "mreader_manifest.json", lambda m: m["files"].pop("model.safetensors")),
        VERIFY,
        ["mreader_manifest.json", "model.safetensors"],
    ),
    (
        "manifest that forgets a file of the source",
        lambda f: edit_json(f / "mreader_manifest.json", lambda m: m["files"].pop("tokenizer.json")),
        VERIFY,
        ["mreader_manifest.json", "tokenizer.json"],
    ),
    (
        "manifest with a size in words",
        lambda f: edit_json(f / "mreader_manifest.json", lambda m: m["files"]["config.json"].update(bytes="many")),
        VERIFY,
        ["mreader_manifest.json", "many"],
    ),
    (
        "config with a rank in words",
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].update(rank="high")),
        VERIFY,
        ["config.json"],
    ),
    (
        "config with a rank below 0",
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].update(rank=-1)),
        VERIFY,
        ["rank is -1"],
    ),
    (
        "newer format",
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].update(format_version=2)),
        UNSUPPORTED,
        ["version 2", "version 1"],
    ),
    (
        "another method",
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].update(quant_method="gptq")),
        USAGE,
        ["not an augmented checkpoint"],
    ),
    (
        "an option that is missing",
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].pop("rank")),
        VERIFY,
        ["config.json", "rank"],
    ),
    (
        "another rank",
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].update(rank=16)),
        VERIFY,
        ["recovery_basis", "[192, 32]", "[192, 16]"],
    ),
    (
        "another budget",
        lambda f: edit_json(f / "config.json", lambda c: c["quantization_config"].update(channels=0.3)),
        VERIFY,
        ["config.json"],
    ),
]


@pytest.mark.parametrize(("damage", "code", "words"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_files(out: Path, damage: Callable[[Path], Any], code: int, words: list[str]) -> None:
    damage(out)
    ran = mreader("verify", out)
    assert [word for word in words if word not in ran.cause] == [], ran.err
    assert ran.code == code


def test_files_that_do_not_belong_to_it_are_named(source: Path, out: Path) -> None:
    """Also weights that no loader takes: in a folder of their own, or of a kind that gives way to safetensors."""
    (out / "notes.txt").write_text("mine")
    (out / "pytorch_model.bin").write_bytes(b"old")
    (out / "another").mkdir()
    save_file({"x": torch.zeros(1)}, out / "another" / "model.safetensors")
    (out / "nested" / "mine.txt").write_text("mine")
    (out / "README.md").write_text("the card that push-to-hub wrote")
    (out / ".git").mkdir()
    for kept_by_tools in (".git/config", ".gitattributes"):
        (out / kept_by_tools).write_text("")
    names = ["another/model.safetensors", "nested/mine.txt", "notes.txt", "pytorch_model.bin"]
    ran = mreader("verify", out, "--source", source)
    assert f"not part of it, and not checked: {', '.join(names)} (" in " ".join(ran.err.split())
    assert ran.code == 0
    assert json.loads(mreader("verify", out, "--json").out)["unlisted"] == names


@pytest.mark.parametrize(
    "name",
    [
        "model-00007-of-00009.safetensors",
        "consolidated.safetensors",
        "model.fp16.safetensors.index.json",
        "pytorch_model.bin.index.json",
    ],
)
def test_stale_weights_that_a_loader_may_take(out: Path, name: str) -> None:
    (out / name).write_bytes(b"of an earlier conversion")
    ran = mreader("verify", out)
    assert ran.cause.endswith(f"that loaders may take: {name}")
    assert "remove what is out of date" in ran.err
    assert ran.code == VERIFY


def test_all_stale_weights_are_named(source: Path, tmp_path: Path) -> None:
    """Of a checkpoint with an index, where loaders go by it, as well."""
    convert(source, tmp_path / "out", device="cpu", max_shard_bytes=700_000)
    for number in (8, 9):
        (tmp_path / "out" / f"model-0000{number}-of-00009.safetensors").write_bytes(b"stale")
    ran = mreader("verify", tmp_path / "out")
    assert ran.cause.endswith(": model-00008-of-00009.safetensors, model-00009-of-00009.safetensors")
    assert ran.code == VERIFY


def test_links_as_in_the_hub_cache(source: Path, augmented: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for path in augmented.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert mreader("verify", tmp_path / "snapshot", "--source", source).code == 0


def test_a_source_in_other_shards_with_other_files_beside_it(source: Path, out: Path, tmp_path: Path) -> None:
    """The same weights: what else lies there is not compared."""
    other = tmp_path / "source"
    other.mkdir()
    save_file(all_tensors(source), other / "model.safetensors")
    (other / "config.json").write_bytes((source / "config.json").read_bytes())
    (other / "notes.txt").write_text("mine")
    assert len(shards(source)) > 1
    assert mreader("verify", out, "--source", other).code == 0


def test_another_source(source: Path, out: Path, tmp_path: Path) -> None:
    name = f"{PREFIX}.3.up_proj.weight"
    other = copied(source, tmp_path / "source")
    edit_tensor(other, name, lambda t: t[7].neg_())
    ran = mreader("verify", out, "--source", other)
    assert name in ran.cause
    assert ran.code == VERIFY
    edit_tensor(other, name, lambda t: t.float())
    ran = mreader("verify", out, "--source", other)
    assert name in ran.cause
    assert "right source" in ran.err
    assert ran.code == VERIFY


def test_no_such_folder(source: Path, out: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in mreader("verify", tmp_path / "none").cause
    assert mreader("verify", tmp_path / "none").code == SOURCE
    assert str(tmp_path / "none") in mreader("verify", out, "--source", tmp_path / "none").cause
    assert mreader("verify", source).code == USAGE
