"""CPU time of a server for a round, from the bytes of the replies to their mean: CO3 beside raw arrays, on one core.

python benchmarks/federated_server.py

An 11 M-parameter model (ResNet-18) and 100 clients. Both sides start from the bytes of Flower's objects as they
arrived, and end with the arrays that FedAvg has aggregated; both go through Flower's own inflation and its own
`aggregate_train`. Raw arrays are ready then; CO3's updates are decoded by gradwire's grid in between. Replies are
copies of a few distinct ones. Takes up to 5 GB, since FedAvg wants all replies at once. Times are CPU seconds, so that
other programs do not count.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and numpy are imported

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from accuracy import ResNet18
from gradwire.flower import Wire, compress
from gradwire.flower.one_process import OneProcess, from_objects, to_objects
from gradwire.flower.shared import update
from gradwire.flower.shared.message import open_update
from machine import processor

RESULTS = Path(__file__).parent / "results" / "federated_server.json"
DISTINCT = 4  # replies
RAW = "Flower, raw fp32"
SIDES = {RAW: None, "gradwire, co3": "co3"}  # and their recipes
PHASES = ("inflate", "decode", "aggregate")
Objects = dict[str, bytes]  # of a message, by Flower's object ids
State = dict[str, torch.Tensor]


class Recording(OneProcess):
    """Keeps the bytes of all replies."""

    def __init__(self, client: ClientApp):
        super().__init__(client, DISTINCT)
        self.recorded: list[Objects] = []

    def reply_of_client(self, message: Message, context: Context) -> Message:
        reply = super().reply_of_client(message, context)
        if reply.has_error():
            raise SystemExit(reply.error.reason)
        self.recorded.append(to_objects(reply))
        return reply


class Arrived(OneProcess):
    """A grid on which all replies have arrived already, as bytes: `pull_messages` only puts them together."""

    def __init__(self, replies: list[Objects], clients: int):
        super().__init__(ClientApp(), clients)
        self.replies = replies
        self.asked: dict[str, int] = {}  # node by message
        self.seconds = 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for i, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(i)
            self.asked[str(i)] = message.metadata.dst_node_id
        return list(self.asked)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        start = time.process_time()
        replies = [from_objects(self.replies[int(i) % len(self.replies)]) for i in message_ids]
        for i, reply in zip(message_ids, replies, strict=True):
            reply.metadata.__dict__.update(_reply_to_message_id=i, _src_node_id=self.asked[i])
        self.seconds = time.process_time() - start
        return replies


def trained(model: State, client: int) -> State:
    """The model after a client's training: floats moved by heavy-tailed steps, counters gone on."""
    random = torch.Generator().manual_seed(client)
    result = {}
    for name, tensor in model.items():
        step = torch.randn(tensor.shape, generator=random)
        step *= 0.002 * torch.empty(tensor.shape).exponential_(generator=random)
        step = step.abs() if name.endswith("running_var") else step
        result[name] = tensor + step if tensor.is_floating_point() else tensor + 100
    return result


def client_app(model: State, recipe: str | None) -> ClientApp:
    app = ClientApp(mods=[compress(recipe)] if recipe else [])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": 500 + client, "train_loss": 1.0})
        arrays = ArrayRecord(trained(model, client))
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def strategy_for(clients: int) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)


def record(model: State, recipe: str | None) -> list[Objects]:
    """The bytes of a few clients' replies to the first message of a server."""
    grid = Recording(client_app(model, recipe))
    over: Grid = Wire(grid) if recipe else grid
    over.push_messages(strategy_for(DISTINCT).configure_train(1, ArrayRecord(model), ConfigRecord(), over))
    return grid.recorded


def round_of(model: State, replies: list[Objects], clients: int, compressed: bool) -> tuple[dict[str, float], State]:
    """Seconds of each phase, and the mean. What is sent is not measured: it is the same model on both sides."""
    grid, strategy = Arrived(replies, clients), strategy_for(clients)
    over: Grid = Wire(grid) if compressed else grid
    ids = over.push_messages(strategy.configure_train(1, ArrayRecord(model), ConfigRecord(), over))
    start = time.process_time()
    messages = list(over.pull_messages(ids))
    middle = time.process_time()
    arrays, _ = strategy.aggregate_train(1, messages)
    end = time.process_time()
    if arrays is None:
        raise SystemExit("no reply could be used")
    seconds = {"inflate": grid.seconds, "decode": middle - start - grid.seconds, "aggregate": end - middle}
    return {**seconds, "total": end - start}, arrays.to_torch_state_dict()


def expected(model: State, replies: list[Objects], clients: int) -> State:
    """The mean that FedAvg should come to, one client after the other in fp64."""
    messages = [from_objects(objects) for objects in replies]
    weights = [
        message.content["metrics"]["num-examples"] * len(range(i, clients, len(messages)))
        for i, message in enumerate(messages)
    ]
    result = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in model.items()}
    for message, weight in zip(messages, weights, strict=True):
        arrived = message.content["arrays"]
        if "gradwire" in arrived:
            state = update.decode(open_update(arrived, 1, ArrayRecord(model))[1], model)
        else:
            state = arrived.to_torch_state_dict()
        for name, tensor in state.items():
            result[name] += weight / sum(weights) * tensor.double()
    return result


def check(got: State, wanted: State) -> None:
    for name, tensor in wanted.items():
        if not torch.allclose(got[name].double(), tensor, rtol=1e-4, atol=1e-5):
            raise SystemExit(f"the mean of {name!r} is wrong")


def measure_side(options: argparse.Namespace) -> dict[str, Any]:
    """One side, in a process of its own: memory that the other has given back would be cheaper than new one."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    torch.manual_seed(0)
    model = ResNet18(10, 64).state_dict()
    recipe = SIDES[options.side]
    replies = record(model, recipe)
    times = []
    for i in range(options.repeat + 1):  # the first is a warm-up, and is checked
        print(f"{options.side}: round {i} of {options.repeat}", file=sys.stderr, flush=True)
        seconds, mean = round_of(model, replies, options.clients, recipe is not None)
        if i:
            times.append(seconds)
        else:
            check(mean, expected(model, replies, options.clients))
    return {
        "parameters": sum(t.numel() for t in model.values()),
        "message_bytes": sum(map(len, replies[0].values())),
        **{f"{phase}_s": statistics.median(t[phase] for t in times) for phase in (*PHASES, "total")},
        "memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    for side in SIDES:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        rows[side] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    raw, own = (row["total_s"] for row in rows.values())
    common = {"machine": processor(), "torch": torch.__version__, "clients": options.clients}
    return {**common, "parameters": rows[RAW].pop("parameters"), "rows": rows, "ratio": raw / own}


def show(result: dict[str, Any]) -> None:
    print(f"{result['clients']} clients, {result['parameters'] / 1e6:.1f} M parameters, CPU seconds of one core")
    print(f"{'':24}{'MB a message':>14}" + "".join(f"{phase:>11}" for phase in (*PHASES, "total", "peak GB")))
    for name, row in result["rows"].items():
        times = "".join(f"{row[f'{phase}_s']:11.2f}" for phase in (*PHASES, "total"))
        print(f"{name:24}{row['message_bytes'] / 1e6:14.2f}{times}{row['memory_bytes'] / 1e9:11.1f}")
    verdict = "not slower: reached" if result["ratio"] >= 1 else "SLOWER"
    print(f"gradwire takes 1/{result['ratio']:.2f} of the time ({verdict})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5, help="rounds of each side; the median counts")
    parser.add_argument("--side", choices=list(SIDES), help="this one alone, as JSON")
    parser.add_argument("--json", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    arguments = parse()
    if arguments.side:
        print(json.dumps(measure_side(arguments)))
        sys.exit()
    outcome = measure(arguments)
    show(outcome)
    arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    sys.exit(outcome["ratio"] < 1)
