"""mreader formats."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from mreader.cli.console import out, print_json
from mreader.cli.options import Json
from mreader.formats.architectures import SOURCE_DTYPES, Layout, ModelType, layouts, model_types
from mreader.formats.quantized import METHODS


def formats_command(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As tables for a README.")] = False,
) -> None:
    """List the model types, how their experts lie on disk, and which types cannot be converted, with the reason."""
    types, known = model_types(), layouts()
    if markdown:
        typer.echo(_markdown(types))
    elif json:
        print_json(
            {
                "model_types": [{**asdict(found), "supported": found.supported} for found in types],
                "layouts": [asdict(layout) for layout in known],
                "dtypes": list(SOURCE_DTYPES),
                "dequantized": list(METHODS),
            }
        )
    else:
        _print_types([found for found in types if found.supported])
        _print_layouts(known)
        _print_refused([found for found in types if not found.supported])
        out.print(f"\nExperts are read as {', '.join(SOURCE_DTYPES)}; other tensors are copied, whatever they are.")
        out.print(f"convert --dtype bfloat16 dequantizes {', '.join(METHODS)}.")


def _markdown(types: list[ModelType]) -> str:
    """Two tables: the supported types by how their experts lie on disk, and why others are refused."""
    supported, reasons = _grouped(types, lambda t: _lie(t)), _grouped(types, lambda t: t.reason)
    tables = (("model types", "experts on disk", supported), ("not supported", "because", reasons))
    return "\n\n".join(
        "\n".join([f"| {what} | {why} |", "|---|---|", *(f"| {', '.join(names)} | {text} |" for text, names in rows)])
        for what, why, rows in tables
    )


def _lie(found: ModelType) -> str | None:
    """Where a supported type's experts are, and in which layouts."""
    return f"`{found.experts[0]}`: {' or '.join(found.layouts)}" if found.supported else None


def _grouped(types: list[ModelType], of: Callable[[ModelType], str | None]) -> list[tuple[str, list[str]]]:
    """(what `of` gives, the types for which it does), the largest groups first; None leaves a type out."""
    groups: dict[str, list[str]] = {}
    for found in types:
        if (text := of(found)) is not None:
            groups.setdefault(text, []).append(found.model_type)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _print_types(types: list[ModelType]) -> None:
    table = Table("model type", "experts of a layer", "layouts", box=None)
    for found in types:
        table.add_row(found.model_type, escape(found.experts[0]), ", ".join(found.layouts))
    out.print(table)


def _print_layouts(known: list[Layout]) -> None:
    table = Table("\nlayout", "\ntensors below the experts' prefix", box=None)
    for layout in known:
        names = ", ".join(f"{part} {name}" for part, name in layout.tensors.items())
        order = {"last two axes swapped": layout.transposed, "gate and up take turns": layout.interleaved}
        said = ", ".join(what for what, holds in order.items() if holds)
        table.add_row(layout.name, escape(f"{names} ({said})" if said else names))
    out.print(table)


def _print_refused(types: list[ModelType]) -> None:
    table = Table("\nnot supported", "\nbecause", box=None)
    for found in types:
        table.add_row(found.model_type, escape(found.reason or ""))
    out.print(table)
