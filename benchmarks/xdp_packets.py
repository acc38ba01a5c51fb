"""Nanoseconds that the XDP program takes for a packet, by what becomes of it (Linux, root, clang, libbpf, iproute2).

The kernel runs the program on packets from here (BPF_PROG_RUN) and takes the time itself; nothing is sent. What stands
beside it: the same code of the same bytes by the native module. Everything happens in a network namespace of this
process, which ends with it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import statistics
import struct
import subprocess
import sys
import time

from gradwire.aggregator.engine import Peer, Session
from gradwire.aggregator.packet import packet_format, siphash
from gradwire.aggregator.packet.packet_format import Kind, Packet
from gradwire.aggregator.xdp import libbpf
from gradwire.aggregator.xdp.engine import XdpEngine

WORKERS, SLOTS, SESSION = 4, 256, 1
KEY = bytes(range(16))
OWN, PORT = "10.88.0.254", 9999
CLONE_NEWNET = 0x40000000


class TestRun(ctypes.Structure):
    """struct bpf_test_run_opts"""

    _fields_ = (
        *(("size", ctypes.c_size_t), ("data_in", ctypes.c_void_p), ("data_out", ctypes.c_void_p)),
        *(("bytes_in", ctypes.c_uint32), ("bytes_out", ctypes.c_uint32)),
        *(("context_in", ctypes.c_void_p), ("context_out", ctypes.c_void_p)),
        *(("context_bytes_in", ctypes.c_uint32), ("context_bytes_out", ctypes.c_uint32)),
        *(("verdict", ctypes.c_uint32), ("repeat", ctypes.c_int), ("nanoseconds", ctypes.c_uint32)),
        *(("flags", ctypes.c_uint32), ("cpu", ctypes.c_uint32), ("batch", ctypes.c_uint32)),
    )


def nanoseconds(program: int, packet: bytes, repeat: int = 1) -> int:
    """Of one run on average. One that makes a result out of the packet cannot be repeated."""
    before, after = ctypes.create_string_buffer(packet, len(packet)), ctypes.create_string_buffer(2048)
    run = TestRun(ctypes.sizeof(TestRun), ctypes.addressof(before), ctypes.addressof(after), len(packet), 2048)
    run.repeat = repeat
    if libbpf.library().bpf_prog_test_run_opts(program, ctypes.byref(run)):
        raise SystemExit("the kernel did not run the program")
    return run.nanoseconds


def frame(worker: int, message: bytes) -> bytes:
    """Ethernet, IP and UDP around a message."""
    ends = socket.inet_aton(f"10.88.0.{worker + 1}"), socket.inet_aton(OWN)
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 28 + len(message), 0, 0, 64, 17, 0, *ends)
    return bytes(12) + b"\x08\0" + ip + struct.pack(">HHHH", 7000, PORT, 8 + len(message), 0) + message


def data(slot: int, worker: int, adding: int, key: bytes = KEY) -> bytes:
    words = os.urandom(4 * packet_format.WORDS)
    return frame(worker, Packet(Kind.DATA, SESSION, 0, slot, worker, adding, words).pack(key))


def measure(program: int) -> dict[str, float]:
    elsewhere = frame(0, bytes(1376)).replace(PORT.to_bytes(2, "big"), bytes(2))
    found: dict[str, float] = {"of another port: passed on": nanoseconds(program, elsewhere, 10**6)}
    found["forged: its code is found wrong"] = nanoseconds(program, data(0, 0, 0, bytes(16)), 10**5)
    twice = data(0, 0, 0)
    nanoseconds(program, twice)
    found["sent twice: its bank has it already"] = nanoseconds(program, twice, 10**5)
    for adding, verb in ((0, "added"), (1, "ORed")):
        names = [f"first of {WORKERS} to be {verb}: copied", f"second, {verb}", f"third, {verb}"]
        names += [f"last, {verb}: the result is written and coded", f"sent again: the result of what was {verb}"]
        times: dict[str, list[int]] = {name: [] for name in names}
        for slot in range(1 + adding, SLOTS, 2):
            own = [data(slot, worker, adding) for worker in range(WORKERS)]
            for name, packet in zip(names, [*own, own[0]], strict=True):
                times[name].append(nanoseconds(program, packet))
        found |= {name: statistics.median(taken) for name, taken in times.items()}
    return found


def native_code() -> float:
    message = os.urandom(24 + 4 * packet_format.WORDS)
    taken = []
    for _ in range(2000):
        begin = time.perf_counter_ns()
        siphash.code(KEY, message)
        taken.append(time.perf_counter_ns() - begin)
    return statistics.median(taken)


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("loading an XDP program needs root: run it with sudo")
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        sys.exit("no network namespaces here")
    for command in (
        "link add name near type veth peer name far",
        f"addr add {OWN}/24 dev near",
        "link set near up",
        "link set far up",
        *(f"neigh add 10.88.0.{worker + 1} lladdr 02:00:00:00:00:0{worker + 1} dev near" for worker in range(WORKERS)),
    ):
        subprocess.run(["ip", *command.split()], check=True)
    engine = XdpEngine((OWN, PORT), ["near", "far"])
    engine.open(Session(SESSION, KEY, tuple(Peer(f"10.88.0.{worker + 1}", 7000) for worker in range(WORKERS)), SLOTS))
    for name, taken in measure(engine.program).items():
        print(f"{taken:7.0f} ns  {name}")
    print(f"{native_code():7.0f} ns  the code of such a packet by {siphash.code.__module__}, called from Python")
    engine.shut()


if __name__ == "__main__":
    main()
