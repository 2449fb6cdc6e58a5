"""The model card of an augmented checkpoint: what the Hub reads (front matter) and what a person reads (the rest)."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData

from mreader.errors import SourceError
from mreader.formats.augmented import MANIFEST, FormatOptions, parse_config_entry, read_manifest
from mreader.formats.checkpoint import CONFIG, read_config

if TYPE_CHECKING:
    from mreader.inspection import BudgetLine

DEFAULT_PIPELINE = "text-generation"
_ORDER = ["base_model", "base_model_relation", "library_name", "pipeline_tag", "language"]
_MARK = re.compile(r"<!-- written by mreader, ([0-9a-f]{64}): an edited card is never overwritten -->\n?\Z")


@dataclass(frozen=True)
class Inherited:
    """What a card takes over from the card of the source model; None or () where that says nothing."""

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    pipeline_tag: str | None = None


@dataclass(frozen=True)
class CardFacts:
    """Everything that a card states.

    repo:            id on the Hub under which the card appears
    base_model:      Hub id of the source, None where it was a local folder
    base_revision:   commit of the source, None where unknown
    model_type:      `model_type` of config.json
    architecture:    first of `architectures` of config.json
    options:         options of the conversion
    source_bytes, augmented_bytes: bytes of all safetensors files of the source and of the augmented checkpoint
    budgets:         rows of the table of budgets
    sketch_error:    mean squared error of the sketch over mean squared weight, None where not measured
    energy_kept:     share of the down projections' energy in the recovery basis U, 0 to 1, None where not measured
    inherited:       metadata of the source's card
    dequantized_from: the method by which the source's weights are quantized, None where they are not
    """

    repo: str
    base_model: str | None
    base_revision: str | None
    model_type: str
    architecture: str
    options: FormatOptions
    source_bytes: int
    augmented_bytes: int
    budgets: "Sequence[BudgetLine]" = ()
    sketch_error: float | None = None
    energy_kept: float | None = None
    inherited: Inherited = field(default_factory=Inherited)
    dequantized_from: str | None = None

    @property
    def added(self) -> float:
        """augmented_bytes / source_bytes - 1"""
        return self.augmented_bytes / self.source_bytes - 1 if self.source_bytes else 0.0


def model_card(facts: CardFacts) -> str:
    """The text of README.md: front matter, body, and a last line by which `is_untouched` knows it again."""
    sections = [_opening(facts), _usage(facts), _sizes(facts), _budgets(facts), _sketch(facts), _origin(facts)]
    body = "\n\n".join(section for section in sections if section)
    return _signed(f"---\n{_metadata(facts).to_yaml(original_order=_ORDER)}\n---\n\n{body}\n")


def read_facts(out: Path) -> CardFacts:
    """The facts that config.json and the manifest of `out` hold: all but budgets and sketch statistics.

    Raises UsageError where `out` is no augmented checkpoint, SourceError where one of the two files is damaged.
    """
    config = read_config(out)
    options = parse_config_entry(config.get("quantization_config") or {}, str(out))
    manifest = read_manifest(out)
    try:
        source = manifest["source"]
        return CardFacts(
            repo=out.resolve().name,
            base_model=source["repo"],
            base_revision=source["revision"],
            model_type=config["model_type"],
            architecture=(config.get("architectures") or [config["model_type"]])[0],
            options=options,
            source_bytes=_weight_bytes(source["files"]),
            augmented_bytes=_weight_bytes(manifest["files"]),
            dequantized_from=source.get("dequantized_from"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{CONFIG} or {MANIFEST} of {out} lacks {error}", "convert the source again") from error


def for_repo(facts: CardFacts, repo: str, card: str | None) -> CardFacts:
    """`facts` for publication as `repo`, with the metadata of the source's `card`, if there is one."""
    return replace(facts, repo=repo, inherited=inherited(card) if card else facts.inherited)


def inherited(card: str) -> Inherited:
    """The metadata of a card that its derivatives keep; nothing where its front matter cannot be read."""
    try:
        data = ModelCard(card, ignore_metadata_errors=True).data
    except Exception:  # a broken card of someone else, whatever the YAML parser says, must not stop a publication
        return Inherited()
    return Inherited(
        license=_word(data.get("license")),
        license_name=_word(data.get("license_name")),
        license_link=_word(data.get("license_link")),
        language=_words(data.get("language")),
        tags=_words(data.get("tags")),
        pipeline_tag=_word(data.get("pipeline_tag")),
    )


def is_untouched(card: str) -> bool:
    """Whether mreader wrote `card` and nobody has edited it since (line ends aside)."""
    text = _unix(card)
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def _signed(text: str) -> str:
    text += "\n"
    return f"{text}<!-- written by mreader, {_digest(text)}: an edited card is never overwritten -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def _word(value: Any) -> str | None:
    if isinstance(value, list):
        value = value[0] if value else None
    # YAML 1.1 reads the language code of Norwegian as a boolean.
    return "no" if value is False else str(value) if value is not None else None


def _words(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(word for word in map(_word, values) if word is not None)


def _weight_bytes(files: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(int(entry["bytes"]) for name, entry in files.items() if name.endswith(".safetensors"))


def _metadata(facts: CardFacts) -> ModelCardData:
    kept = facts.inherited
    # The Hub shows its code snippet, and counts downloads, for libraries it knows; the checkpoint is one of
    # transformers' once mreader is installed, and is found as mreader's through its tag.
    data = ModelCardData(
        base_model=facts.base_model,
        library_name="transformers",
        pipeline_tag=kept.pipeline_tag or DEFAULT_PIPELINE,
        language=list(kept.language) or None,
        license=kept.license,
        license_name=kept.license_name,
        license_link=kept.license_link,
        tags=list(dict.fromkeys([*kept.tags, "mreader", "mixture-of-experts"])),
    )
    if facts.base_model:
        data["base_model_relation"] = "quantized"
    return data


def _name(facts: CardFacts) -> str:
    return facts.repo.rsplit("/", 1)[-1]


def _opening(facts: CardFacts) -> str:
    model = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else "A local model"
    return (
        f"# {_name(facts)}\n\n"
        f"{model} as an augmented checkpoint for **mreader**: {_weights(facts)}, "
        "and beside them a low-bit sketch of every routed expert. While decoding, the sketch tells which "
        "expert channels matter for the token, and only those are read."
    )


def _weights(facts: CardFacts) -> str:
    if facts.dequantized_from:
        return f"its weights in BF16, dequantized from {facts.dequantized_from}"
    return "the native weights, bit for bit"


def _restored(facts: CardFacts) -> str:
    if facts.dequantized_from:
        return "the dequantized model"
    return "the original checkpoint back, every tensor bit-identical"


def _usage(facts: CardFacts) -> str:
    name = _name(facts)
    return (
        "## How to run\n\n"
        "With mreader installed:\n\n"
        "```bash\n"
        f"hf download {facts.repo} --local-dir {name}\n"
        f'mreader generate {name} --prompt "The capital of France is" --stats\n'
        "```\n\n"
        "```python\n"
        "import mreader  # makes transformers read augmented checkpoints\n"
        "from transformers import AutoModelForCausalLM\n"
        f'model = AutoModelForCausalLM.from_pretrained("{facts.repo}")\n'
        "```\n\n"
        f"`mreader restore {name} original` gives {_restored(facts)}."
    )


def _sizes(facts: CardFacts) -> str:
    rows = [("source", _size(facts.source_bytes)), ("augmented", _size(facts.augmented_bytes))]
    return "## Size\n\n" + _table(("weights", "bytes"), [*rows, ("added", f"{facts.added:+.1%}")])


def _budgets(facts: CardFacts) -> str:
    if not facts.budgets:
        return ""
    rows = [
        (f"{line.channels:g}", str(line.coordinates), f"{line.k:,}", f"{line.candidates:,}", f"{line.reads:.1%}")
        for line in facts.budgets
    ]
    explained = (
        "One routed layer, one token: the sketch is read at so many coordinates of each block of 128, and k of the "
        "token's K*I routed channels are computed exactly; reads are all bytes read, sketch and recovery included, "
        "against a dense read. Choose a row with `--channels` and `--coordinates`, or a share of reads with `--reads`."
    )
    return f"## Budgets\n\n{explained}\n\n" + _table(("channels", "coordinates", "k", "K*I", "reads"), rows)


def _sketch(facts: CardFacts) -> str:
    options = facts.options
    rows = [("codes", options.codes), ("recovery rank", str(options.rank)), ("seed", str(options.seed))]
    if facts.sketch_error is not None:
        rows.append(("mean squared error of the sketch over mean squared weight", f"{facts.sketch_error:.1%}"))
    if facts.energy_kept is not None:
        rows.append(("energy of the down projections kept by U", f"{facts.energy_kept:.1%}"))
    return "## Sketch\n\n" + _table(("property", "value"), rows)


def _origin(facts: CardFacts) -> str:
    source = f"`{facts.base_model}`" if facts.base_model else "a local folder"
    commit = f" at `{facts.base_revision}`" if facts.base_revision else ""
    return (
        f"## Origin\n\nConverted from {source}{commit} (`{facts.architecture}`, `{facts.model_type}`). "
        "`mreader_manifest.json` lists the sha256 of every file of the source and of this checkpoint."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size(count: int) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    value = float(count)
    while value >= 1000 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{count} B" if power == 0 else f"{value:.2f} {units[power]}"
