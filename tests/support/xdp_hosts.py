"""A switch and its workers on one machine: network namespaces, each worker's wire a port of a bridge.

The test process stays one: `inside` puts it into a namespace for a moment, and a socket made there stays there."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCETHTOOL, ETHTOOL_SGRO = 0x8946, 0x2C
SWITCH = "switch"


def missing() -> str:
    """Why the XDP engine cannot be tried here, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    for program in ("clang", "ip", "bridge"):
        if not shutil.which(program):
            return f"needs the program {program}"
    try:
        ctypes.CDLL("libbpf.so.1")
    except OSError:
        return "needs libbpf.so.1"
    name = f"gradwire-xdp-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


class XdpHosts:
    """The switch has 10.88.0.254 and ports port0, port1, …; worker i has 10.88.0.(i + 1), by an eth0 of its own."""

    address = "10.88.0.254"

    def __init__(self, workers: int):
        self.workers = workers
        self.ports = tuple(f"port{worker}" for worker in range(workers))

    def name(self, what: object) -> str:
        return f"gradwire-xdp-{os.getpid()}-{what}"

    def __enter__(self) -> XdpHosts:
        remove_leftovers()
        switch = self.name(SWITCH)
        try:
            run("ip", "netns", "add", switch)
            run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", switch, "addr", "add", f"{self.address}/24", "dev", "br0")
            for device in ("lo", "br0"):
                run("ip", "-n", switch, "link", "set", device, "up")
            for worker, port in enumerate(self.ports):
                host = self.name(worker)
                run("ip", "netns", "add", host)
                run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
                run("ip", "-n", host, "addr", "add", f"10.88.0.{worker + 1}/24", "dev", "eth0")
                run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
                for device in ("lo", "eth0"):
                    run("ip", "-n", host, "link", "set", device, "up")
                with self.inside(worker):
                    receive_in_batches("eth0")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for what in (SWITCH, *range(self.workers)):
            subprocess.run(["ip", "netns", "del", self.name(what)], check=False, capture_output=True)

    @contextmanager
    def inside(self, what: object) -> Iterator[None]:
        """This thread, and what it starts, is in that namespace."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.name(what)}") as there:
            enter(there.fileno())
            try:
                yield
            finally:
                enter(before.fileno())


def remove_leftovers() -> None:
    """Namespaces of runs that were killed."""
    for line in run("ip", "netns", "list").splitlines():
        name = re.match(r"gradwire-xdp-(\d+)-\w+", line)
        if name and not Path(f"/proc/{name[1]}").exists():
            subprocess.run(["ip", "netns", "del", name[0]], check=False, capture_output=True)


def enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def receive_in_batches(interface: str, on: bool = True) -> None:
    """`ethtool -K INTERFACE gro on` (or off): a veth takes packets from its peer's XDP program only with that."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_SGRO, on))
    request = struct.pack("16sP8x", interface.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
