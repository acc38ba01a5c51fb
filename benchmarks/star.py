"""Workers around a switch that can add: what benchmarks/aggregation.py and benchmarks/sparse_training.py run on.

Every worker is a network namespace with one cable of a chosen rate, up and down. Two of its interfaces share that cable:
eth0, behind a bridge, for Gloo, and eth1, to the aggregator. They are apart because an XDP program on an interface
switches segmentation offload off on it, for all programs.

A cable is a pair of ifb devices in the worker's namespace, each with a token bucket of 1 ms of the rate: all that leaves
goes through `upload`, all that comes through `download`. The token bucket of a switch's port would not do: packets
that an XDP program redirects pass it by. It counts the headers of the packets on the wire, 1500 bytes each, though they
travel in batches of 64 kB.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence

from hosts import Hosts, bits_per_second, run, set_namespace

AGGREGATOR = "10.78.0.254"  # workers are 10.78.0.1, … on eth1, and 10.77.0.1, … on eth0
CABLES = ("upload", "download")
SIOCETHTOOL, ETHTOOL_SGRO = 0x8946, 0x2C
EVERYTHING = ("protocol", "all", "u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev")


class Star(Hosts):
    """`count` workers, and "switch", where the aggregator runs; unshaped at first."""

    def _build(self) -> None:
        super()._build()
        switch = self._name("switch")
        run("ip", "-n", switch, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "br1", "type", "bridge")
        run("ip", "-n", switch, "addr", "add", f"{AGGREGATOR}/24", "dev", "br1")
        run("ip", "-n", switch, "link", "set", "br1", "up")
        for rank in range(self.count):
            host, port = self._name(rank), self.aggregator_ports[rank]
            run("ip", "link", "add", "eth1", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", host, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", "eth1")
            run("ip", "-n", switch, "link", "set", port, "master", "br1")
            for namespace, device in ((host, "eth1"), (switch, port)):
                run("ip", "-n", namespace, "link", "set", device, "up")
            self._lay_cable(host)
            # veth takes packets from an XDP program on its peer only where it has a receive loop of its own.
            with self.visit(rank):
                _receive_in_batches("eth1")

    @property
    def aggregator_ports(self) -> list[str]:
        return [f"worker{rank}" for rank in range(self.count)]

    def _lay_cable(self, host: str) -> None:
        for cable in CABLES:
            run("ip", "-n", host, "link", "add", cable, "type", "ifb")
            run("ip", "-n", host, "link", "set", cable, "up")
        for device in ("eth0", "eth1"):
            run("tc", "-n", host, "qdisc", "add", "dev", device, "clsact")
            for side, cable in zip(("egress", "ingress"), CABLES, strict=True):
                run("tc", "-n", host, "filter", "add", "dev", device, side, *EVERYTHING, cable)

    def shape(self, rate: str, cables: Sequence[str] = CABLES) -> None:
        """All workers' cables; "none" takes the limit away."""
        for rank in range(self.count):
            for cable in cables:
                tc = ("tc", "-n", self._name(rank), "qdisc")
                if rate == "none":
                    subprocess.run([*tc, "del", "dev", cable, "root"], check=False, capture_output=True)
                else:
                    burst = str(max(16_000, bits_per_second(rate) // 8 // 1000))
                    run(*tc, "replace", "dev", cable, "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")

    @contextlib.contextmanager
    def visit(self, where: int | str) -> Iterator[None]:
        """Sockets that this thread opens meanwhile belong to a worker, or to the "switch"; so do programs it starts."""
        with open("/proc/thread-self/ns/net") as home:
            self.enter(where)
            try:
                yield
            finally:
                set_namespace(home)


def _receive_in_batches(device: str) -> None:
    """As `ethtool -K device gro on`."""
    switch_on = array.array("I", [ETHTOOL_SGRO, 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sP", device.encode(), switch_on.buffer_info()[0])
        fcntl.ioctl(any_socket, SIOCETHTOOL, request.ljust(40, b"\0"))
