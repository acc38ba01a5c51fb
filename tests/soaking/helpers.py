"""Processes beside the ranks: an aggregator, a bad network to it, and strangers who send garbage."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from aggregator_trials import flood
from gradwire.cli import main
from soaking.processes import Child, start, wait_for
from support.helpers import free_ports
from support.lossy import Faults, LossyProxy


class Aggregator:
    """`gradwire aggregator` on a port that stays the same when it is started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._starts = folder, 0
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        os.environ["GRADWIRE_KEY"] = os.urandom(16).hex()
        self.start()

    def start(self) -> None:
        self._starts += 1
        output = self._folder / f"aggregator.{self._starts}.txt"
        self.child = start(lambda: _exit_code("aggregator", "--bind", self.address), output)
        wait_for(lambda: "aggregator (" in self.child.said() or self.child.poll() is not None, 60)

    def kill(self) -> None:
        self.child.signal(signal.SIGKILL)
        wait_for(lambda: self.child.poll() is not None, 30)


def _exit_code(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def relay_to(address: str, folder: Path, seed: int) -> tuple[Child, str]:
    """A relay that loses, repeats and swaps packets; and where it listens."""
    place = folder / "relay.txt"
    place.unlink(missing_ok=True)  # of the relay of an attempt before

    def work() -> int:
        ip, port = address.rsplit(":", 1)
        ended: list[bool] = []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
        with LossyProxy((ip, int(port)), Faults(0.03, 0.03, 0.05), seed) as proxy:
            place.with_suffix(".part").write_text(proxy.address)
            place.with_suffix(".part").rename(place)
            while not ended:
                time.sleep(0.02)
        return 0

    child = start(work, folder / "relay.output")
    wait_for(place.exists, 60)
    return child, place.read_text()


def flood_of(address: str, folder: Path, seconds: float) -> Child:
    class Nowhere:
        def put(self, _: Any) -> None: ...

    def work() -> int:
        flood(address, seconds, Nowhere())  # type: ignore[arg-type]
        return 0

    return start(work, folder / "flood.output")


def stranger_at(ports: Path, folder: Path, seed: int) -> Child:
    """Sends garbage to the ports that ranks have written there, and keeps connections open without a word."""

    def work() -> int:
        chance, idle = random.Random(seed), []
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for file in ports.glob("*.port"):
                with suppress(OSError, ValueError):
                    connection = socket.create_connection(("127.0.0.1", int(json.loads(file.read_text()))), timeout=1)
                    connection.settimeout(1)
                    connection.sendall(_garbage(chance))
                    if chance.random() < 0.2 and len(idle) < 40:
                        idle.append(connection)
                    else:
                        connection.close()
            time.sleep(0.005)
        return 0

    return start(work, folder / "stranger.output")


def _garbage(chance: random.Random) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return b""
    if kind == 1:
        return b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n"
    if kind == 2:
        return b"GW" + chance.randbytes(chance.randrange(200))
    return chance.randbytes(chance.choice((1, 16, 100, 5000)))
