"""Federated runs as a pair of plain Flower apps, for `flwr.simulation.run_simulation` or any other engine.

run = FederatedRun(settings, "co3")
gradwire.flower.one_process.run(*apps([run]), settings.clients)
run.figures()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from gradwire.errors import AggregateError
from gradwire.tasks.federated.client import action, client_app
from gradwire.tasks.federated.run import FederatedRun
from gradwire.tasks.federated.stoppable import Stoppable
from gradwire.tasks.federated.strategy import LONGEST_REASON

PATIENCE = 300.0  # seconds for clients to appear


def apps(runs: Sequence[FederatedRun], stop: threading.Event | None = None) -> tuple[ServerApp, ClientApp]:
    """Runs go one after the other, with the same number of clients. `stop`, once set, ends the server app, whatever it
    waits for."""
    stop = stop or threading.Event()
    clients = runs[0].settings.clients
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        grid = Stoppable(grid, stop)
        nodes = find_nodes(grid, clients)
        for i, run in enumerate(runs):
            run.serve(grid, nodes, f"{MessageType.TRAIN}.{action(i)}")

    return server, client_app([(run.settings, run.codec) for run in runs])


def find_nodes(grid: Grid, clients: int) -> list[int]:
    """The node of each client, by the client's number, which only the client itself knows."""
    deadline = time.monotonic() + PATIENCE
    while len(nodes := sorted(grid.get_node_ids())) < clients and time.monotonic() < deadline:
        time.sleep(0.05)
    questions = [Message(RecordDict(), node, MessageType.QUERY) for node in nodes]
    found: dict[int, int] = {}
    for reply in grid.send_and_receive(questions, timeout=PATIENCE):
        if reply.has_error():
            reason = " ".join(str(reply.error.reason).split())[:LONGEST_REASON]
            raise AggregateError(f"a client failed before the first round: {reason}")
        found[int(str(reply.content["metrics"]["partition-id"]))] = reply.metadata.src_node_id
    if sorted(found) != list(range(clients)):
        raise AggregateError(f"{len(found)} of {clients} clients answered within {PATIENCE:.0f} seconds")
    return [found[number] for number in range(clients)]
