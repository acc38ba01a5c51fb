"""Replica identity after 200 steps: every recipe that a hook takes × both aggregations × 2, 3 and 4 ranks.

python tests/nightly_replicas.py                       all of them, in about ten minutes on two cores
python tests/nightly_replicas.py co3 stc               these recipes only
python tests/nightly_replicas.py --from topk           from this one on, after an interruption
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from support.rank_pool import launch
from support.replicas import AGGREGATIONS, Training, progress_line, recipes_for_a_hook, verdict, work

WORLDS = (2, 3, 4)
Found = dict[tuple[Training, int], str]  # what came of it, with so many ranks


def show(before: int, total: int, done: int, world: int, text: str) -> None:
    progress_line(before + done, total, f"{world} ranks: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="recipe", help="the default is all that a hook takes")
    parser.add_argument("--from", dest="first", help="the recipe to begin with")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    recipes = options.recipes or recipes_for_a_hook()
    if options.first:
        if options.first not in recipes:
            parser.error(f"--from {options.first}: not one of {', '.join(recipes)}")
        recipes = recipes[recipes.index(options.first) :]
    trainings = [Training(recipe, how, options.steps) for recipe in recipes for how in AGGREGATIONS]
    found: Found = {}
    start = time.monotonic()
    try:
        for i, world in enumerate(WORLDS):
            shown = partial(show, i * len(trainings), len(WORLDS) * len(trainings))
            with tempfile.TemporaryDirectory() as folder:
                seconds = 120 + 2 * options.steps * len(trainings)
                results = launch(partial(work, trainings, world, shown), Path(folder), seconds, world)
            found |= {(training, world): verdict(training, results) for training in trainings}
        progress_line(len(found), len(found), "done\n")
    finally:  # after an interruption too
        wrong = report(recipes, found, options.steps)
        print(f"; {time.monotonic() - start:.0f} s")
    sys.exit("\n".join(wrong) or 0)


def report(recipes: list[str], found: Found, steps: int) -> list[str]:
    """The table; what is wrong."""
    columns = [(how, world) for how in AGGREGATIONS for world in WORLDS]
    print("| recipe | " + " | ".join(f"{how}, {world} ranks" for how, world in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for recipe in recipes:
        cells = [found.get((Training(recipe, how, steps), world), "–") for how, world in columns]
        print(f"| {recipe} | {' | '.join(cells)} |")
    wrong = [f"{training}, {world} ranks: {text}" for (training, world), text in found.items() if text != "equal"]
    print(f"\n{len(found) - len(wrong)} of {len(found)} equal bit for bit after each of {steps} steps", end="")
    return wrong


if __name__ == "__main__":
    main()
