"""The model card: what the Hub parses, what is carried over, and how an edited card is told from an untouched one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from mreader.card import CardFacts, Inherited, for_repo, inherited, is_untouched, model_card, read_facts
from mreader.errors import SourceError, UsageError
from mreader.formats.augmented import FormatOptions
from mreader.inspection import BudgetLine


def budget(channels: float, coordinates: int, k: int, reads: float) -> BudgetLine:
    return BudgetLine(channels, coordinates, "variance", k, 8192, 0.0, 0.0, 0.0, reads, 0)


FACTS = CardFacts(
    repo="lab/OLMoE-mreader",
    base_model="allenai/OLMoE-1B-7B",
    base_revision="a" * 40,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    options=FormatOptions(),
    source_bytes=13_800_000_000,
    augmented_bytes=16_100_000_000,
    budgets=(budget(0.0725, 80, 594, 0.1287), budget(0.2, 80, 1638, 0.372), budget(0.2, 128, 1638, 0.435)),
    sketch_error=0.4432,
    energy_kept=0.061,
    inherited=Inherited("other", "own", "LICENSE", ("en", "no"), ("moe", "olmo"), "image-text-to-text"),
)
SOURCE = """---
license: apache-2.0
language: no
tags: [moe, mreader]
datasets: [a/b]
pipeline_tag: text-generation
---
# Source
"""


class TestMetadata:
    def test_is_what_the_hub_reads(self) -> None:
        card = ModelCard(model_card(FACTS))
        assert card.data.to_dict() == {
            "base_model": "allenai/OLMoE-1B-7B",
            "base_model_relation": "quantized",
            "library_name": "transformers",
            "pipeline_tag": "image-text-to-text",
            "language": ["en", "no"],
            "license": "other",
            "license_name": "own",
            "license_link": "LICENSE",
            "tags": ["moe", "olmo", "mreader", "mixture-of-experts"],
        }

    def test_survives_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text(model_card(FACTS), encoding="utf-8")
        assert ModelCard.load(tmp_path / "README.md").data.license == "other"

    def test_local_source_says_nothing_it_does_not_know(self) -> None:
        text = model_card(replace(FACTS, base_model=None, base_revision=None, inherited=Inherited()))
        data = ModelCard(text).data.to_dict()
        assert data.keys() == {"library_name", "pipeline_tag", "tags"}
        assert data["pipeline_tag"] == "text-generation"
        assert "None" not in text

    @pytest.mark.parametrize("name", ["a: b", "- x", "'quote", "# no comment", "line\nbreak", "yes"])
    def test_yaml_is_escaped(self, name: str) -> None:
        text = model_card(replace(FACTS, inherited=Inherited(license=name, tags=(name,))))
        data = ModelCard(text).data
        assert data.license == name
        assert data.tags[0] == name


class TestBody:
    def test_says_how_to_run_and_what_it_costs(self) -> None:
        text = model_card(FACTS)
        for line in (
            "With mreader installed:",
            "mreader generate OLMoE-mreader --prompt",
            'AutoModelForCausalLM.from_pretrained("lab/OLMoE-mreader")',
            "| channels | coordinates | k | K*I | reads |",
            "| 0.0725 | 80 | 594 | 8,192 | 12.9% |",
            "| 0.2 | 80 | 1,638 | 8,192 | 37.2% |",
            "| 0.2 | 128 | 1,638 | 8,192 | 43.5% |",
            "| augmented | 16.10 GB |",
            "| added | +16.7% |",
            "| mean squared error of the sketch over mean squared weight | 44.3% |",
            "| energy of the down projections kept by U | 6.1% |",
        ):
            assert line in text

    def test_leaves_out_what_was_not_measured(self) -> None:
        text = model_card(replace(FACTS, budgets=(), sketch_error=None, energy_kept=None))
        assert "Budgets" not in text
        assert "energy" not in text

    def test_is_the_same_every_time(self) -> None:
        assert model_card(FACTS) == model_card(replace(FACTS))


class TestInherited:
    def test_metadata(self) -> None:
        expected = Inherited("apache-2.0", language=("no",), tags=("moe", "mreader"), pipeline_tag="text-generation")
        assert inherited(SOURCE) == expected

    def test_tag_is_not_doubled(self) -> None:
        data = ModelCard(model_card(for_repo(FACTS, "lab/m", SOURCE))).data
        assert data.tags == ["moe", "mreader", "mixture-of-experts"]

    @pytest.mark.parametrize("card", ["", "# none", "---\n{[\n---\n", "---\n- a\n---\n", "---\nlicense: []\n---\n"])
    def test_broken_card_gives_nothing(self, card: str) -> None:
        assert inherited(card) == Inherited()

    def test_of_our_own_card_is_the_same_again(self) -> None:
        again = for_repo(FACTS, FACTS.repo, model_card(FACTS))
        assert model_card(again) == model_card(FACTS)


class TestUntouched:
    def test_own_card(self) -> None:
        assert is_untouched(model_card(FACTS))
        assert is_untouched(model_card(FACTS).replace("\n", "\r\n"))

    @pytest.mark.parametrize(
        "edit",
        [
            lambda text: text.replace("license: other", "license: mit"),
            lambda text: text + "More.\n",
            lambda text: text.rsplit("<!--", 1)[0],
            lambda text: SOURCE,
            lambda text: "",
        ],
    )
    def test_edited_card(self, edit: object) -> None:
        assert callable(edit)
        assert not is_untouched(edit(model_card(FACTS)))


class TestReadFacts:
    def test_from_a_folder(self, tmp_path: Path) -> None:
        out = tmp_path / "olmoe"
        out.mkdir()
        options = FormatOptions("quaternary", rank=16, seed=7)
        config = {"model_type": "olmoe", "quantization_config": options.config_entry()}
        source = {"repo": None, "revision": None, "files": {"a.safetensors": {"bytes": 100}, "README.md": {"bytes": 9}}}
        written = {"a.safetensors": {"bytes": 120}, "config.json": {"bytes": 5}}
        (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (out / "mreader_manifest.json").write_text(json.dumps({"source": source, "files": written}), encoding="utf-8")
        facts = read_facts(out)
        assert (facts.repo, facts.base_model, facts.architecture) == ("olmoe", None, "olmoe")
        assert facts.options == options
        assert facts.added == pytest.approx(0.2)

    def test_of_another_folder(self, tmp_path: Path) -> None:
        config: dict[str, object] = {"model_type": "olmoe"}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(UsageError, match="is not an augmented checkpoint"):
            read_facts(tmp_path)
        config["quantization_config"] = FormatOptions().config_entry()
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(SourceError, match=r"mreader_manifest\.json is missing"):
            read_facts(tmp_path)
        (tmp_path / "mreader_manifest.json").write_text('{"source": {}, "files": {}}', encoding="utf-8")
        with pytest.raises(SourceError, match="lacks 'repo'"):
            read_facts(tmp_path)
