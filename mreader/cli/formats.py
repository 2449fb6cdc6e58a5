"""mreader formats."""

from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from mreader.cli.console import out, print_json
from mreader.cli.options import Json
from mreader.formats.architectures import SOURCE_DTYPES, Layout, ModelType, layouts, model_types


def formats_command(json: Json = False) -> None:
    """List the model types, how their experts lie on disk, and which types cannot be converted, with the reason."""
    types, known = model_types(), layouts()
    if json:
        print_json(
            {
                "model_types": [{**asdict(found), "supported": found.supported} for found in types],
                "layouts": [asdict(layout) for layout in known],
                "dtypes": list(SOURCE_DTYPES),
            }
        )
    else:
        _print_types([found for found in types if found.supported])
        _print_layouts(known)
        _print_refused([found for found in types if not found.supported])
        out.print(f"\nExperts are read as {', '.join(SOURCE_DTYPES)}; other tensors are copied, whatever they are.")


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
