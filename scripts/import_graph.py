"""Draws which room of the package imports which, as a Mermaid diagram in docs/architecture.md.

    python scripts/import_graph.py            # writes the diagram between its two markers
    python scripts/import_graph.py --check    # exits with 1 where the diagram there is not that of the code

The imports are read from the source files (by grimp, which import-linter brings); nothing is executed. An arrow goes
from the room that imports to the one that is imported. It is left out where a longer way along other arrows leads to
the same room, so an arrow that is missing does not mean that there is no import.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- import graph: begin -->\n", "<!-- import graph: end -->\n"
EVERYWHERE = {"errors", "_version"}  # imported by nearly all rooms: their arrows would hide the others

Graph = dict[str, set[str]]


def rooms() -> Graph:
    """The names that lie directly in the package, each with those that any of its modules imports."""
    modules = grimp.build_graph("gradwire", cache_dir=None)
    graph: Graph = {}
    for module in modules.modules:
        _, _, below = module.partition(".")
        room = below.partition(".")[0]
        if not room or room in EVERYWHERE:  # the package itself imports everything that users call
            continue
        imported = (name.split(".")[1:2] for name in modules.find_modules_directly_imported_by(module))
        graph.setdefault(room, set()).update({name for names in imported for name in names} - {room} - EVERYWHERE)
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """All rooms that `start` imports, directly or not."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting += graph[room]
    return seen


def reduced(graph: Graph) -> Graph:
    """The fewest arrows with the same ways, which are unique since the import law allows no cycle."""
    beyond = {room: reachable(graph, room) for room in graph}
    return {
        room: {to for to in tos if not any(to in beyond[other] for other in tos - {to})} for room, tos in graph.items()
    }


def diagram() -> str:
    """The text between the markers."""
    arrows = [f"  {room} --> {to}" for room, tos in sorted(reduced(rooms()).items()) for to in sorted(tos)]
    return "\n".join([BEGIN + "```mermaid", "flowchart TD", *arrows, "```", END])


def main() -> None:
    """Writes the diagram, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the diagram is out of date")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{PAGE} lacks the markers {BEGIN.strip()} and {END.strip()}")
    drawn = before + diagram() + after
    if drawn == page:
        return
    if options.check:
        sys.exit("the import graph in docs/architecture.md is out of date: run `python scripts/import_graph.py`")
    PAGE.write_text(drawn)


if __name__ == "__main__":
    main()
