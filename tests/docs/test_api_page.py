"""docs/api.md has every public name, with the parameters that it has."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import gradwire

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
PUBLIC = {  # of modules that have no __all__
    "ddp": ["attach", "State", "hook"],
    "dcp": ["shard", "load"],
}
MODULES = ["ddp", "fsdp", "flower", "dcp", "backward", "torchft"]
# But for integrations, whose frameworks take half a minute to import.
SIGNATURE = re.compile(r"`gradwire\.(?!integrations)([\w.]+)\(([\w, ]*)\)`")


def resolved(name: str) -> object:
    """The object that the page calls gradwire.NAME."""
    holder: object = gradwire
    for part in name.split("."):
        holder = getattr(holder, part)
    return holder


def test_every_public_name_is_on_the_page():
    missing = [name for name in gradwire.__all__ if f"`gradwire.{name}" not in PAGE]
    assert missing == []


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_of_a_module_is_on_the_page(name):
    module = importlib.import_module(f"gradwire.{name}")
    names = getattr(module, "__all__", None) or PUBLIC[name]
    assert [n for n in names if f"`gradwire.{name}.{n}" not in PAGE] == []


@pytest.mark.parametrize(("name", "parameters"), SIGNATURE.findall(PAGE), ids=lambda text: text.replace(", ", "-"))
def test_the_page_has_the_parameters_of(name, parameters):
    real = list(inspect.signature(resolved(name)).parameters)
    assert [p for p in real if p != "self"] == [p for p in parameters.split(", ") if p]


def test_every_name_on_the_page_exists():
    for name in set(re.findall(r"`gradwire\.([\w.]+)`", PAGE)):
        resolved(name)


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_the_page_has_the_callback_of(name):
    path = Path(gradwire.__file__).parent / "integrations" / f"{name}.py"
    (callback,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "Compress")
    (init,) = (node for node in callback.body if getattr(node, "name", "") == "__init__")
    parameters = ", ".join(argument.arg for argument in init.args.args[1:])
    assert f"`gradwire.integrations.{name}.Compress({parameters})`" in PAGE
