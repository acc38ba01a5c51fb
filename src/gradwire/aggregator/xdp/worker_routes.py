"""Where a worker is: the interface that leads to it, and the Ethernet addresses of both ends.

A packet that XDP sends passes no routing table, no neighbour table and no bridge, so their answers are looked up here,
once for each worker of a session, by iproute2."""

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
class Place:
    interface: int
    mac: bytes
    own_mac: bytes


def place(ip: str, interfaces: Collection[str]) -> Place:
    """Of a worker that has been talked to a moment ago."""
    route = (_ask("ip", "route", "get", ip) or [{}])[0]
    device, hop = route.get("dev", ""), route.get("gateway", ip)
    neighbours = [found["lladdr"] for found in _ask("ip", "neigh", "show", hop, "dev", device) if "lladdr" in found]
    if not device or not neighbours:
        raise GradwireError(f"no Ethernet address is known for worker {ip} (route: {device or 'none'}); {ELSEWHERE}")
    own = _ask("ip", "link", "show", "dev", device)[0]["address"]
    port = device
    if device not in interfaces:  # a bridge whose ports are ours
        ports = _ask("bridge", "fdb", "get", neighbours[0], "br", device)
        port = ports[0]["ifname"] if ports else device
    if port not in interfaces:
        raise GradwireError(
            f"worker {ip} is reached by {port}, which is none of this aggregator's interfaces "
            f"({', '.join(interfaces)}): start it with --interface {port}, or {ELSEWHERE}"
        )
    return Place(socket.if_nametoindex(port), _mac(neighbours[0]), _mac(own))


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _ask(program: str, *arguments: str) -> list[dict[str, Any]]:
    path = shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if not path:
        raise GradwireError(f"the XDP engine needs the program {program!r}: install iproute2, or {ELSEWHERE}")
    answer = subprocess.run([path, "-json", *arguments], check=False, capture_output=True, text=True)
    return [found for found in json.loads(answer.stdout or "[]") if found] if answer.returncode == 0 else []
