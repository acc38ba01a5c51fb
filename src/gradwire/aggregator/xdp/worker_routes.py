"""How a worker is reached: the interface that leads to it, and the Ethernet addresses of both ends.

A packet that XDP sends passes no routing table, no neighbour table and no bridge, so their answers are looked up here,
once for each worker of a session, by iproute2.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from gradwire.errors import GradwireError

ELSEWHERE = "use --engine userspace, which reaches whatever this host reaches"


@dataclass(frozen=True)
class Route:
    """The way from this host to a worker, for packets that pass no routing table."""

    interface: int
    """The kernel's index of the interface."""
    mac: bytes
    """Ethernet address of the worker, or of the gateway that leads to it."""
    own_mac: bytes
    """Ethernet address of this host on that way."""


def route_to(ip: str, interfaces: Collection[str]) -> Route:
    """Look up the route to a worker, which has sent a packet a moment ago, so that the kernel knows its neighbour.

    GradwireError if there is none, or if it does not leave by one of the interfaces.
    """
    route = (_ask("ip", "route", "get", ip) or [{}])[0]
    device, hop = route.get("dev", ""), route.get("gateway", ip)
    entries = _ask("ip", "neigh", "show", hop, "dev", device)
    neighbours = [entry["lladdr"] for entry in entries if "lladdr" in entry]
    if not device or not neighbours:
        raise GradwireError(f"no Ethernet address is known for worker {ip} (route: {device or 'none'}); {ELSEWHERE}")
    links = _ask("ip", "link", "show", "dev", device)
    if not links or "address" not in links[0]:  # it went away a moment ago
        raise GradwireError(f"the interface {device} to worker {ip} has no Ethernet address; {ELSEWHERE}")
    port = device
    if device not in interfaces:  # a bridge whose ports are ours
        ports = _ask("bridge", "fdb", "get", neighbours[0], "br", device)
        port = ports[0]["ifname"] if ports else device
    if port not in interfaces:
        raise GradwireError(
            f"worker {ip} is reached by {port}, which is none of this aggregator's interfaces "
            f"({', '.join(interfaces)}): start it with --interface {port}, or {ELSEWHERE}"
        )
    return Route(socket.if_nametoindex(port), _mac(neighbours[0]), _mac(links[0]["address"]))


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _ask(program: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the entries that a program of iproute2 prints as JSON; none if it fails."""
    path = shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if not path:
        raise GradwireError(f"the XDP engine needs the program {program!r}: install iproute2, or {ELSEWHERE}")
    answer = subprocess.run([path, "-json", *arguments], check=False, capture_output=True, text=True)
    try:
        return [entry for entry in json.loads(answer.stdout or "[]") if entry] if answer.returncode == 0 else []
    except ValueError:  # a version of it that does not know -json here
        return []
