"""Which store a client uses for what has to outlive a message: Flower's context in a simulation, files otherwise."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from flwr.app import Context

from gradwire.flower.client.context_store import ContextStore
from gradwire.flower.client.folder_store import FolderStore, default_folder
from gradwire.flower.client.store import Store

_in_simulation = ContextVar("in_simulation", default=False)


def store_of(context: Context, training: bytes, folder: str | Path | None) -> Store:
    """Return the store of this client in this training: files, or Flower's context in a simulation without `folder`."""
    if folder is None and (_in_simulation.get() or _under_ray()):
        return ContextStore(context, training)
    return FolderStore(Path(folder).expanduser() if folder else default_folder(), training, client_name(context))


@contextlib.contextmanager
def simulation() -> Iterator[None]:
    """Run the clients of this block as a simulation, which keeps their state in Flower's context.

    Engines that run clients in one process use it. It holds for the thread that enters the block.
    """
    token = _in_simulation.set(True)
    try:
        yield
    finally:
        _in_simulation.reset(token)


def client_name(context: Context) -> str:
    """Return a name that one client has in all messages, and after a restart if it has a partition or a fixed id."""
    partition = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if partition is None else f"partition-{partition}"


def _under_ray() -> bool:
    """Whether this is an actor of Ray, in which Flower's simulation runs clients: they never outlive the server."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
