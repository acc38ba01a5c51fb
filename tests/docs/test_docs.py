"""The documentation says what the code does, where that can be checked."""

from __future__ import annotations

from pathlib import Path

import gradwire
from support.cases import for_each

DOCS = Path(__file__).parents[2] / "docs"


@for_each("entry", gradwire.recipes(), ids=lambda entry: entry.name)
def test_the_page_of_recipes_has_every_name_and_its_advice(entry):
    page = (DOCS / "recipes.md").read_text()
    assert f"| `{entry.name}` | {entry.description} | {entry.paper} |\n" in page
    assert f"- `{gradwire.recipe(entry.name)}`\n" in page
    assert ":" in entry.description or ";" in entry.description, "say when to use it, and when not"
