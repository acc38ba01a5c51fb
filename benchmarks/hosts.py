"""Hosts on one machine: every rank in a network namespace of its own, behind a bridge, on links of a chosen rate.

Linux, root and iproute2. Namespaces carry the process id of the run that made them, so that several runs can go on at
once, and what a killed run has left behind can be told from what is in use: the next run removes it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, NamedTuple

NAME = re.compile(r"gradwire-(\d+)-\w+")
CLONE_NEWNET = 0x40000000
HEADERS = 14 + 20 + 32  # bytes of Ethernet, IP and TCP (with timestamps) that an interface counts for each packet


class Counters(NamedTuple):
    """What an interface has seen since it exists. With segmentation offload a packet has up to 64 kB."""

    bytes_received: int
    packets_received: int
    bytes_sent: int
    packets_sent: int

    def since(self, before: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


def counters(interface: str) -> Counters:
    """Of this process's namespace. /proc, not /sys: the latter shows the namespace that mounted it."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            numbers = [int(field) for field in fields.split()]
            return Counters(numbers[0], numbers[1], numbers[8], numbers[9])
    raise OSError(f"no interface {interface}")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Loopback:
    """All ranks on 127.0.0.1: needs no permission, but the interface counts all ranks, and other programs, together."""

    address, interface, shared = "127.0.0.1", "lo", True

    def enter(self, rank: int) -> None:
        pass


class Hosts:
    """Addresses 10.77.0.1, …, on one bridge; unshaped at first."""

    address, interface, shared = "10.77.0.1", "eth0", False

    def __init__(self, count: int):
        self.count, self.owner = count, os.getpid()

    def __enter__(self) -> Hosts:
        require_root()
        remove_leftovers()
        # All of them come by __exit__, and say no more than that.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: sys.exit("stopped"))
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        switch = self._name("switch")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for rank in range(self.count):
            host, port = self._name(rank), f"port{rank}"
            run("ip", "netns", "add", host)
            run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", host, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            run("ip", "-n", switch, "link", "set", port, "master", "br0")
            for namespace, device in ((host, "lo"), (host, "eth0"), (switch, port)):
                run("ip", "-n", namespace, "link", "set", device, "up")

    def __exit__(self, *_: object) -> None:
        remove([self._name(what) for what in (*range(self.count), "switch")])

    def _name(self, what: object) -> str:
        return f"gradwire-{self.owner}-{what}"

    def shape(self, rate: str) -> None:
        """All links, in both directions; the burst is 1 ms of the rate, since a larger one lets short messages pass
        unshaped. "none" takes the limit away."""
        ends = [(self._name(rank), "eth0") for rank in range(self.count)]
        ends += [(self._name("switch"), f"port{rank}") for rank in range(self.count)]
        for namespace, device in ends:
            tc = ("tc", "-n", namespace, "qdisc")
            if rate == "none":
                subprocess.run([*tc, "del", "dev", device, "root"], check=False, capture_output=True)
            else:
                burst = str(max(16_000, bits_per_second(rate) // 8 // 1000))
                run(*tc, "replace", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")

    def enter(self, rank: int | str) -> None:
        """This process becomes a program of that host; before it starts any thread."""
        with open(f"/run/netns/{self._name(rank)}") as namespace:
            set_namespace(namespace)


def set_namespace(namespace: IO[str]) -> None:
    """Of this thread."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def bits_per_second(rate: str) -> int:
    match = re.fullmatch(r"(\d+)(mbit|gbit)", rate)
    if not match:
        raise SystemExit(f"a rate is such as 100mbit or 10gbit, or none, not {rate!r}")
    return int(match[1]) * {"mbit": 10**6, "gbit": 10**9}[match[2]]


def require_root() -> None:
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run it with sudo")


def remove_leftovers() -> None:
    """Namespaces of runs that are no longer there."""
    found = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
    owners = {name: match[1] for name in found if (match := NAME.fullmatch(name))}
    remove([name for name, owner in owners.items() if not Path(f"/proc/{owner}").exists()])


def remove(namespaces: list[str]) -> None:
    """And whatever still runs in them."""
    for name in namespaces:
        inside = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
        for process in map(int, inside.stdout.split()):
            if process != os.getpid():
                os.kill(process, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
