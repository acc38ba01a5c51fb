"""`gradwire recipes`: every name, when to use it, and its parameters with their defaults."""

from __future__ import annotations

from typing import Annotated

from rich import box
from rich.console import Console
from rich.table import Table
from typer import Argument

from gradwire.catalogue import all_recipes, parse_recipe
from gradwire.catalogue.meanings import meaning

AFTERWARDS = "Beside them there is auto, which tries some of them on your link and keeps the fastest."


def recipes(
    name: Annotated[str | None, Argument(help="One of them, with its parameters and defaults. Default: all.")] = None,
) -> None:
    """What can be given as --codec, or to gradwire.ddp.attach and gradwire.LocalSGD.

    **Examples**

    All names: `gradwire recipes`

    The parameters of one: `gradwire recipes sbc2`
    """
    console = Console()
    if name is None:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("recipe", "when to use it, and when not", "paper"):
            table.add_column(heading, no_wrap=heading == "recipe")
        for entry in all_recipes.recipes():
            table.add_row(entry.name, entry.description, entry.paper)
    else:
        chosen = parse_recipe.recipe(name)
        console.print(f"{chosen.entry.name}: {chosen.entry.description}")
        if chosen.entry.paper:
            console.print(chosen.entry.paper)
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("parameter", "value", "what it means"):
            table.add_column(heading, no_wrap=heading == "parameter")
        for key, value in chosen.values.items():
            table.add_row(key, str(value), meaning(chosen.entry.name, key))
    if table.row_count:
        console.print(table)
    if name is None:
        console.print(AFTERWARDS)
