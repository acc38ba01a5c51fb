"""Workers around a switch that can add: what benchmarks/aggregation.py and benchmarks/sparse_training.py run on.

Every worker is a network namespace with one cable of a chosen rate, up and down. Three of its interfaces share that
cable: eth0 for Gloo, eth1 for an aggregator in user space, eth2 for one in XDP. They are apart because an XDP program
on an interface switches segmentation offload off on it, for all.

A cable is a pair of ifb devices in the worker's namespace, each with a token bucket of 1 ms of the rate: all that
leaves goes through `upload`, all that comes through `download`. The token bucket of a switch's port would not do:
packets that an XDP program redirects pass it by. It counts the headers of packets of 1500 bytes, though they travel
between namespaces in batches of 64 kB.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence

from hosts import Hosts, bits_per_second, run, set_namespace

NETWORKS = {"eth1": "10.78.0", "eth2": "10.79.0"}  # beside eth0, which is 10.77.0; workers are 1, 2, …
SWITCH = 254  # in these networks
CABLES = ("upload", "download")
SIOCETHTOOL, ETHTOOL_SGRO = 0x8946, 0x2C
EVERYTHING = ("protocol", "all", "u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev")


class Star(Hosts):
    """`count` workers, and "switch", where aggregators run; unshaped at first."""

    def _build(self) -> None:
        super()._build()
        run("ip", "-n", self._name("switch"), "link", "set", "lo", "up")
        for device in NETWORKS:
            self._add_network(device)
        for rank in range(self.count):
            self._lay_cable(rank)

    def _add_network(self, device: str) -> None:
        """On all workers, behind a bridge of its own."""
        switch, bridge = self._name("switch"), f"br-{device}"
        run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        run("ip", "-n", switch, "addr", "add", f"{address_of_switch(device)}/24", "dev", bridge)
        run("ip", "-n", switch, "link", "set", bridge, "up")
        for rank, port in enumerate(self.ports(device)):
            host = self._name(rank)
            run("ip", "link", "add", device, "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", host, "addr", "add", f"{NETWORKS[device]}.{rank + 1}/24", "dev", device)
            run("ip", "-n", switch, "link", "set", port, "master", bridge)
            for namespace, end in ((host, device), (switch, port)):
                run("ip", "-n", namespace, "link", "set", end, "up")

    def ports(self, device: str) -> list[str]:
        """The other ends of the workers' interfaces, on the switch."""
        return [f"{device}-{rank}" for rank in range(self.count)]

    def _lay_cable(self, rank: int) -> None:
        host = self._name(rank)
        for cable in CABLES:
            run("ip", "-n", host, "link", "add", cable, "type", "ifb")
            run("ip", "-n", host, "link", "set", cable, "up")
        for device in ("eth0", *NETWORKS):
            run("tc", "-n", host, "qdisc", "add", "dev", device, "clsact")
            for side, cable in zip(("egress", "ingress"), CABLES, strict=True):
                run("tc", "-n", host, "filter", "add", "dev", device, side, *EVERYTHING, cable)
        with self.visit(rank):
            # An interface takes packets from an XDP program on its peer only if it has a receive loop of its own.
            _receive_in_batches("eth2")

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

    def carried(self) -> dict[str, list[int]]:
        """Bytes with all headers that passed every worker's cables since they were shaped, and packets they dropped."""
        found: dict[str, list[int]] = {"dropped": []}
        for cable in CABLES:
            figures = [self._figures(rank, cable) for rank in range(self.count)]
            found[cable] = [f["bytes"] for f in figures]
            found["dropped"] += [f["drops"] for f in figures]
        return found

    def _figures(self, rank: int, cable: str) -> dict[str, int]:
        shown = run("tc", "-n", self._name(rank), "-s", "-j", "qdisc", "show", "dev", cable)
        figures: dict[str, int] = json.loads(shown)[0]
        return figures

    @contextlib.contextmanager
    def visit(self, where: int | str) -> Iterator[None]:
        """Sockets that this thread opens meanwhile belong to a worker, or to the "switch"; so do programs it starts."""
        with open("/proc/thread-self/ns/net") as home:
            self.enter(where)
            try:
                yield
            finally:
                set_namespace(home)


def address_of_switch(device: str) -> str:
    return f"{NETWORKS[device]}.{SWITCH}"


def _receive_in_batches(device: str) -> None:
    """As `ethtool -K device gro on`."""
    switch_on = array.array("I", [ETHTOOL_SGRO, 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sP", device.encode(), switch_on.buffer_info()[0])
        fcntl.ioctl(any_socket, SIOCETHTOOL, request.ljust(40, b"\0"))
