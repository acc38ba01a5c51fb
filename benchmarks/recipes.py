"""Training step with every recipe that a DDP hook takes, as its users call it, beside one with co3.

    sudo python benchmarks/recipes.py [--rate 1gbit] [--recipes sbc dgc] [--network mlp] [--seconds 6] [--save]

Two ranks, each a host of its own on a link of that rate (benchmarks/hosts.py: Linux, root, iproute2), train with
`gradwire.ddp.attach(model, "<recipe>", optimizer=optimizer)` and nothing else: the MLP of benchmarks/link.py, SGD with
momentum 0.9, one thread a rank. Each recipe takes turns with co3, so that both meet the same noise of a shared machine;
its time is that of its median step over that of co3's in these turns. A recipe that sends more bytes than co3 may take
longer for that reason alone: "without its bytes" is the same ratio without the time that the link needs for the bytes
beyond co3's. Recipes with a warm-up are measured after it. The processor's time is that of one rank and step, and so
are the parts of it that encoding and decoding take. Plain DDP and PyTorch's own fp16 hook stand in the first rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import gradwire
from contestants import COMPUTE, FP16_HOOK, PLAIN_DDP
from hosts import Hosts, bits_per_second
from link import FIRST_PORT, Entry
from link_report import RESULTS, progress
from machine import processor
from networks import NETWORKS

REFERENCE = "attach co3"
WARM_UP = 3  # steps
TURN = 5  # steps, unless they take long
LONG = 0.4  # seconds of a turn
MOST = 1.3  # times co3's step
COLUMNS = (
    "", "ms", "co3 beside it", "× co3", "processor", "× co3's", "encoding", "decoding", "MB sent",
    "link for more bytes than co3", "× co3 without its bytes",
)  # fmt: skip

Row = dict[str, Any]


def recipes() -> list[str]:
    """Those that a hook takes; one that sends in some steps only needs LocalSGD."""
    parsed = (gradwire.recipe(entry.name) for entry in gradwire.recipes())
    return [recipe.name for recipe in parsed if not (recipe.delayed or recipe.in_adam_units)]  # SGD is no Adam


def begin(name: str, hosts: Hosts, port: int, options: argparse.Namespace) -> Entry:
    entry = Entry(name, hosts, port, options.network)
    entry.prepare()
    entry.ask("attach")
    if name.startswith("attach"):
        entry.steps(1)  # connects, and DDP forms its buckets
        entry.ask("skip_warm_up")
    entry.steps(WARM_UP)
    return entry


def turn(entry: Entry) -> None:
    """The first step finds its data out of the caches, and does not count."""
    entry.seconds += entry.steps(1 + max(1, min(TURN, int(LONG / entry.pace))))[1:]


def race(entry: Entry, reference: Entry, seconds: float) -> Row:
    """Let both take turns; the row of the one, and the median step of the other."""
    entry.forget()
    reference.forget()
    deadline = time.monotonic() + seconds
    while entry.crew is not None and (time.monotonic() < deadline or len(entry.seconds) < TURN):
        turn(entry)
        turn(reference)
    return {"row": entry.row(), "beside": reference.row()}


def ratios(found: Row, rate: str) -> tuple[float, float, float]:
    """Times co3's step; the milliseconds of the link for the bytes beyond co3's; times co3's step without these."""
    row, beside = found["row"], found["beside"]
    more = max(0.0, row["interface_bytes_per_step"] - beside["interface_bytes_per_step"])
    link = 0.0 if rate == "none" else more * 8e3 / bits_per_second(rate)
    return row["ms"] / beside["ms"], link, (row["ms"] - link) / beside["ms"]


def line(name: str, found: Row, rate: str) -> str:
    row, beside = found["row"], found["beside"]
    spec = f'`attach(model, "{name.split()[1]}")`' if name.startswith("attach") else name
    if "ms" not in row:
        return f"| {spec} | {row['failed'][:100]} | | | | | | | | | |"
    times, link, without = ratios(found, rate)
    total, encode, decode = row["busy_ms"]
    cells = [spec, f"{row['ms']:.1f}", f"{beside['ms']:.1f}", f"**{times:.2f}**", f"{total:.1f}"]
    cells += [f"{total / beside['busy_ms'][0]:.2f}", f"{encode:.1f}", f"{decode:.1f}"]
    cells += [f"{row['interface_bytes_per_step'] / 1e6:.3f}"]
    cells += [f"{link:.1f}", f"{without:.2f}"] if link >= 1 else ["", ""]
    return f"| {' | '.join(cells)} |"


def verdict(found: dict[str, Row], rate: str) -> str:
    measured = {name: ratios(row, rate) for name, row in found.items() if "ms" in row["row"]}
    slow = {name: of for name, of in measured.items() if of[0] > MOST}
    by_bytes = [name.split()[1] for name, of in slow.items() if of[2] <= MOST]
    missed = [name.split()[1] for name, of in slow.items() if of[2] > MOST]
    text = f"\n{len(measured) - len(slow)} of {len(measured)} take at most {MOST} times co3's step"
    text += f"; for their bytes alone more: {', '.join(by_bytes)}" if by_bytes else ""
    return text + (f"; **slower: {', '.join(missed)}**" if missed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="or none, for no limit")
    parser.add_argument("--recipes", nargs="+", default=recipes(), help="names or specs")
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--seconds", type=float, default=6, help="of the turns of each recipe and co3")
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    options = parser.parse_args()
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    print("\n".join(lines), flush=True)
    start, found = time.monotonic(), {}
    with Hosts(2) as hosts:
        hosts.shape(options.rate)
        reference = begin(REFERENCE, hosts, FIRST_PORT, options)
        for i, name in enumerate([COMPUTE, PLAIN_DDP, FP16_HOOK, *(f"attach {recipe}" for recipe in options.recipes)]):
            progress(name)
            entry = begin(name, hosts, FIRST_PORT + 50 + i, options)
            found[name] = race(entry, reference, options.seconds)
            entry.close()
            progress("")
            lines.append(line(name, found[name], options.rate))
            print(lines[-1], flush=True)
        reference.close()
    lines.append(verdict({name: row for name, row in found.items() if name.startswith("attach")}, options.rate))
    print(f"{lines[-1]}\n\n{time.monotonic() - start:.0f} s in all")
    if options.save:
        save(lines, options.network)


def save(lines: list[str], network: str) -> None:
    """Keep the table beside those of other networks."""
    command = f"sudo python benchmarks/recipes.py {' '.join(sys.argv[1:])}"
    name = "recipes" if network == "mlp" else f"recipes_{network}"
    head = f"# Training step with every recipe: {network}\n\n`{command}` on {processor()}. What the columns are is in "
    head += "the file's first lines.\n\n"
    (RESULTS / f"{name}.md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
