"""Federated runs as a pair of Flower apps, for `flwr.simulation.run_simulation` or any other engine.

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
from gradwire.tasks.federated.stoppable import StoppableGrid
from gradwire.tasks.federated.strategy import LONGEST_REASON

PATIENCE = 300.0  # seconds for clients to appear


def apps(runs: Sequence[FederatedRun], stop: threading.Event | None = None) -> tuple[ServerApp, ClientApp]:
    """Return a server app that does the runs one after the other, and the client app that they need.

    All runs have the same number of clients. Once `stop` is set, the server app ends, whatever it waits for.
    """
    stop = stop or threading.Event()
    clients = runs[0].settings.clients
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        grid = StoppableGrid(grid, stop)
        nodes = find_nodes(grid, clients)
        for i, run in enumerate(runs):
            run.serve(grid, nodes, f"{MessageType.TRAIN}.{action(i)}")

    return server, client_app([(run.settings, run.codec) for run in runs])


def find_nodes(grid: Grid, clients: int) -> list[int]:
    """Return the node id of each client, in the order of the clients' numbers, which they are asked for.

    Waits up to `PATIENCE` seconds until this number of clients is connected. Raises an AggregateError if some are not.
    """
    deadline = time.monotonic() + PATIENCE
    while len(nodes := sorted(grid.get_node_ids())) < clients and time.monotonic() < deadline:
        time.sleep(0.05)
    questions = [Message(RecordDict(), node, MessageType.QUERY) for node in nodes]
    node_of: dict[int, int] = {}
    for reply in grid.send_and_receive(questions, timeout=PATIENCE):
        if reply.has_error():
            reason = " ".join(str(reply.error.reason).split())[:LONGEST_REASON]
            raise AggregateError(f"a client failed before the first round: {reason}")
        node_of[int(str(reply.content["metrics"]["partition-id"]))] = reply.metadata.src_node_id
    if sorted(node_of) != list(range(clients)):
        raise AggregateError(f"{len(node_of)} of {clients} clients answered within {PATIENCE:.0f} seconds")
    return [node_of[number] for number in range(clients)]
