"""Files, functions, pages and headings that the documentation names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gradwire"
FOLDERS = (".", "benchmarks", "docs", "examples", "native", "scripts", "src", "tests")
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT.glob("*") if folder == "." else (ROOT / folder).rglob("*"))
    if path.is_file()
)
PAGES = [name for name in FILES if name.endswith(".md")]
SOURCE = re.compile(r"`([\w./{},-]*\w\.(?:py|cpp|h|c|sh|npz))(?::([\w.]+))?`")  # `file.py` or `file.py:function`
ANYWHERE = re.compile(
    r"(?<![\w/.<>-])((?:benchmarks|tests|scripts|examples|native|docs)/[\w./-]*\w\.\w+)"
)  # in commands, too
TARGET = re.compile(r"`(?:sudo )?make ([\w-]+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def where(name: str) -> Path | None:
    """The file of this name in the repository: from its root, from the package, or anywhere if it is a bare name."""
    for folder in (ROOT, PACKAGE, ROOT / "native"):
        if (folder / name).exists():
            return folder / name
    return next((ROOT / file for file in FILES if "/" not in name and Path(file).name == name), None)


@cache
def defined(path: Path) -> set[str]:
    """Names that a module defines, of methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            inside = node.body if isinstance(node, ast.ClassDef) else []
            names |= {f"{node.name}.{inner.name}" for inner in inside if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES)
def test_files_and_functions_that_are_named_exist(page):
    wrong = []
    for name, function in SOURCE.findall((ROOT / page).read_text()):
        path = where(name) or where(str(Path(page).parent / name))
        if path is None or (function and function not in defined(path)):
            wrong.append(f"{name}:{function}" if function else name)
    assert wrong == [], f"{page} names what does not exist"


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_targets_in_commands_exist(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    folders = (ROOT, (ROOT / page).parent)
    wrong = [name for name in ANYWHERE.findall(text) if not any((folder / name).exists() for folder in folders)]
    assert wrong + [target for target in TARGET.findall(text) if target not in targets] == []


def test_functions_of_papers_exist():
    """A cell may name several functions behind one file: `file.py:one`, `two`."""
    wrong = []
    for line in (ROOT / "docs" / "papers.md").read_text().splitlines():
        cell = line.split(" | ")[-1] if line.startswith("|") else ""
        modules = [path for name, _ in SOURCE.findall(cell) if (path := where(name)) and path.suffix == ".py"]
        known = set().union(*map(defined, modules)) if modules else set()
        wrong += [name for name in re.findall(r"`(\w+)`", cell) if modules and name not in known]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    wrong = []
    for link in LINK.findall((ROOT / page).read_text()):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == [], f"{page} has links that lead nowhere"


def test_the_map_has_every_file_of_the_package():
    """docs/architecture.md, "Rooms and their files": the row of a room names all of its modules."""
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms and their files")[2]
    named: dict[str, set[str]] = {}
    for line in page.partition("\n**To add")[0].splitlines():
        if line.startswith("| `"):
            first, _, _ = line[2:].partition(" | ")
            for room in re.findall(r"`([\w/]+)`", first):
                named[room.rstrip("/")] = set(re.findall(r"`(\w+)`", line))
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = str(path.parent.relative_to(PACKAGE))
        if not path.stem.startswith("_") and path.stem not in named.get(room if room != "." else path.stem, ()):
            missing.append(str(path.relative_to(PACKAGE)))
    assert missing == []
