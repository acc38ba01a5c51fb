"""One replica of a training with torchft, which keeps a journal, so that what it sent can be counted afterwards.

Beside a small network, the replicas add up a tensor of integers, of which every start of a replica has a part of its
own: whatever arrives there is from it. Sums of integers are exact, and so is the recipe, which sends single entries and
forgets nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp, TCPStore

import gradwire.torchft
from torchft import DistributedDataParallel, Manager

SPEC = "topk:p=0.01,values=fp32,mask=off,decay=1"
PARTS, PART = 64, 4096  # starts of replicas that can be told apart, and the integers of each


@dataclass
class Vote:
    """A line of the journal: a round in which this start of a replica took part, and what it decided."""

    attempt: int
    quorum: int
    step: int
    takes_part: bool
    committed: bool | None = None  # None: before the exchange
    digest: str = ""  # of what all replicas must have alike, after the round
    loss: float = 0.0


class Net(nn.Sequential):
    """A classifier of made-up points, with a layer that is compressed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 5))


def integers_of(start: int, attempt: int) -> torch.Tensor:
    """What this start of a replica adds to its own part, in its attempt of this number."""
    generator = torch.Generator().manual_seed(start << 32 | attempt)
    return torch.randint(-9, 10, (PART,), generator=generator).float()


def in_its_part(start: int, integers: torch.Tensor) -> torch.Tensor:
    """These integers where that start of a replica has its part, and zeros elsewhere."""
    result = torch.zeros(PARTS, PART)
    result[start] = integers
    return result


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def train(
    lighthouse: str, replica: int, start: int, folder: Path, asynchronous: bool = True, discards: float = 0.0
) -> None:
    """Train until the file `stop` names a step that has been committed; then save what arrived and what is left.

    In this share of its rounds the replica behaves as if not everything had arrived here, as when another is killed
    while it sends.
    """
    torch.set_num_threads(1 + start % 2)  # exchanges in the training's own thread, or in another one
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = gradwire.torchft.ProcessGroup(SPEC, timeout=timedelta(seconds=20))
    net, arrived = Net(), torch.zeros(PARTS, PART)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)

    def state_dict() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "arrived": arrived}

    def load_state_dict(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        arrived.copy_(state["arrived"])

    manager = Manager(
        pg=group, load_state_dict=load_state_dict, state_dict=state_dict, min_replica_size=2,
        use_async_quorum=asynchronous, timeout=timedelta(seconds=20), rank=0, world_size=1, store_addr="localhost",
        store_port=store.port, replica_id=f"replica_{replica}", lighthouse_addr=lighthouse, hostname="localhost",
    )  # fmt: skip
    model = DistributedDataParallel(manager, net, bucket_cap_mb=0.05)
    generator = torch.Generator().manual_seed(start)
    journal = os.open(folder / f"journal.{start}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    exchanging = threading.Event()
    threading.Thread(target=_die_in_an_exchange, args=(folder / f"kill.{start}", exchanging), daemon=True).start()
    attempt = 0
    while manager.current_step() < _stop(folder):
        x = torch.randn(32, 20, generator=generator)
        manager.start_quorum()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
        manager.wait_quorum()
        exchanging.set()
        loss.backward()
        vote = Vote(attempt, manager._quorum_id, manager.current_step(), manager.is_participating())
        _write(journal, vote)
        integers = in_its_part(start, integers_of(start, attempt))
        manager.allreduce(integers, reduce_op=ReduceOp.SUM).wait()
        exchanging.clear()
        if random.random() < discards:
            manager.report_error(RuntimeError("as if not everything had arrived"))
        if manager.should_commit():
            optimizer.step()
            arrived += integers
            alike = [*net.state_dict().values(), arrived]
            _write(journal, Vote(*_key(vote), True, digest(alike), loss.item()))
        else:
            _write(journal, Vote(*_key(vote), False))
        attempt += 1
    left = [m for m in group.state_dict()["memory"].values() if m.numel() == arrived.numel()]
    torch.save({"arrived": arrived, "left": left[0], "stats": group.stats()}, folder / f"end.{start}.part")
    (folder / f"end.{start}.part").rename(folder / f"end.{start}")
    manager.shutdown(wait=False)
    group.shutdown()


def _die_in_an_exchange(sign: Path, exchanging: threading.Event) -> None:
    """Kill this process while it exchanges something, once there is a sign."""
    while not sign.exists():
        time.sleep(0.005)
    exchanging.clear()
    exchanging.wait()
    time.sleep(random.uniform(0, 0.01))
    os.kill(os.getpid(), signal.SIGKILL)


def read_journal(folder: Path, start: int) -> list[Vote]:
    """The lines that this start of a replica has written; the last one may be cut short."""
    path = folder / f"journal.{start}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Vote(**json.loads(line)) for line in lines]


def _key(vote: Vote) -> tuple[int, int, int, bool]:
    return vote.attempt, vote.quorum, vote.step, vote.takes_part


def _write(journal: int, vote: Vote) -> None:
    os.write(journal, (json.dumps(asdict(vote)) + "\n").encode())


def _stop(folder: Path) -> int:
    path = folder / "stop"
    return int(path.read_text() or 2**40) if path.exists() else 2**40
