"""Byte budgets of federated clients: the longest message of each over a whole training, against what it may send.

python benchmarks/federated_budget.py

Clients of `gradwire train --federated --task digits` with budgets from very little to more than they need, over 100
rounds. Lengths are those of Flower's messages as they travel. Fails if one of them is above its budget.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from gradwire.flower import message_bytes
from gradwire.flower.one_process import OneProcess, run_on
from gradwire.tasks.federated.apps import apps
from gradwire.tasks.federated.run import FederatedRun
from gradwire.tasks.federated.settings import FederatedSettings
from machine import processor

RESULTS = Path(__file__).parent / "results" / "federated_budget.json"
BUDGETS = (2_000, 4_000, 8_000, 16_000, 50_000)  # bytes a round, one client each


class Budgeted(OneProcess):
    """Each client has its own budget in its node config; the lengths of all replies to training are kept."""

    def __init__(self, client: ClientApp):
        super().__init__(client, len(BUDGETS))
        self.lengths: dict[int, list[int]] = {budget: [] for budget in BUDGETS}
        for context, budget in zip(self.contexts.values(), BUDGETS, strict=True):
            context.node_config["upload-budget"] = budget

    def reply_of_client(self, message: Message, context: Context) -> Message:
        reply = super().reply_of_client(message, context)
        if reply.has_error():
            raise SystemExit(reply.error.reason)
        if message.metadata.message_type.startswith("train"):
            self.lengths[int(str(context.node_config["upload-budget"]))].append(message_bytes(reply))
        return reply


def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = FederatedSettings(
        task="digits", clients=len(BUDGETS), per_round=len(BUDGETS), rounds=options.rounds, local_epochs=1,
        batch_size=32, lr=0.05, seed=0, evaluate_every=10, threads=1,
    )  # fmt: skip
    started = time.perf_counter()

    def progress(figures: dict[str, float]) -> None:
        line = f"round {figures['round']}/{options.rounds}, accuracy {figures['accuracy']:.4f}"
        print(f"{line}, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)

    run = FederatedRun(settings, options.recipe, progress)
    server, client = apps([run])
    grid = Budgeted(client)
    run_on(grid, server)
    figures = run.figures()
    rows = [
        {
            "budget": budget,
            "messages": len(lengths),
            "longest": max(lengths),
            "mean": sum(lengths) / len(lengths),
            "above": sum(length > budget for length in lengths),
        }
        for budget, lengths in grid.lengths.items()
    ]
    return {
        "machine": processor(), "torch": torch.__version__, "recipe": figures["spec"], "rounds": options.rounds,
        "accuracy": figures["history"][-1]["accuracy"], "raw_bytes": figures["raw_upload_per_client"], "rows": rows,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(f"{result['recipe']}, {result['rounds']} rounds; a raw reply has {result['raw_bytes']:,} bytes")
    print(f"{'budget':>10}{'messages':>10}{'longest':>10}{'of budget':>11}{'mean':>10}{'above':>7}")
    for row in result["rows"]:
        of_budget = f"{row['longest'] / row['budget']:.1%}"
        print(
            f"{row['budget']:10,}{row['messages']:10}{row['longest']:10,}{of_budget:>11}{row['mean']:10,.0f}{row['above']:7}"
        )
    print(f"accuracy {result['accuracy']:.2%}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--recipe", default="co3")
    parser.add_argument("--json", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    arguments = parse()
    outcome = measure(arguments)
    show(outcome)
    arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    sys.exit(any(row["above"] for row in outcome["rows"]))
