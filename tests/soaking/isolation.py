"""A network, shared memory and disks of an episode's own, as far as this machine and user allow.

They belong to the processes of the episode, and are gone when these are, however they end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
PACKET_DROPPER = """
static unsigned int (*random_u32)(void) = (void*)7;
__attribute__((section("xdp"), used)) int drop(void* packet) { return random_u32() % 100 < LOSS ? 1 : 2; }
"""


def isolate() -> bool:
    """Give this process and its children namespaces of their own; tells whether that was possible."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWNET):
        return False
    commands = (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=256m", "shm", "/dev/shm"],
        ["ip", "link", "set", "lo", "up"],
    )
    return all(_succeeds(*command) for command in commands)


def mount_small_disk(folder: Path) -> bool:
    """A disk of eight megabytes: twice what the checkpoints of all ranks take."""
    return _succeeds("mount", "-t", "tmpfs", "-o", "size=8m", "disk", str(folder))


def lose_packets(percent: int, folder: Path) -> str:
    """Lose packets of the loopback interface, and more where the kernel has netem; returns by what, or nothing."""
    netem = f"tc qdisc add dev lo root netem loss {percent}% delay 1ms 1ms reorder 10% duplicate 1%"
    if shutil.which("tc") and _succeeds(*netem.split()):
        return "netem"
    source, program = folder / "dropper.c", folder / "dropper.o"
    source.write_text(PACKET_DROPPER)
    if not shutil.which("clang"):
        return ""
    compiled = _succeeds("clang", "-O2", "-target", "bpf", f"-DLOSS={percent}", "-c", str(source), "-o", str(program))
    attached = compiled and _succeeds("ip", "link", "set", "dev", "lo", "xdpgeneric", "obj", str(program), "sec", "xdp")
    source.unlink()
    program.unlink(missing_ok=True)
    return "xdp" if attached else ""


def restore_packets() -> None:
    _succeeds("ip", "link", "set", "dev", "lo", "xdpgeneric", "off")
    _succeeds("tc", "qdisc", "del", "dev", "lo", "root")


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
