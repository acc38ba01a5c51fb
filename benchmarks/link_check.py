"""Measures whether a link has the rate it was given: by a second of TCP in each direction, and a second of packets that
an XDP program sends back."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from hosts import counters
from star import Star, address_of_switch

SECONDS = 0.7
PORT = 5001
PAYLOAD, UDP_SEGMENT = 1376, 103
# Sends every UDP packet to PORT back to where it came from, past the queues of the interface.
BOUNCE = """
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/udp.h>
static long (*redirect)(unsigned interface, unsigned long long flags) = (void *)BPF_FUNC_redirect;
#define SWAP(type, a, b) do { type swapped = a; a = b; b = swapped; } while (0)
__attribute__((section("xdp"), used)) int bounce(struct xdp_md *context) {
    struct ethhdr *link = (void *)(long)context->data;
    struct iphdr *ip = (void *)(link + 1);
    struct udphdr *udp = (void *)(ip + 1);
    if ((void *)(udp + 1) > (void *)(long)context->data_end || link->h_proto != __builtin_bswap16(ETH_P_IP) ||
        ip->protocol != 17 || udp->dest != __builtin_bswap16(PORT))
        return XDP_PASS;
    for (int i = 0; i < ETH_ALEN; i++) SWAP(unsigned char, link->h_dest[i], link->h_source[i]);
    SWAP(unsigned, ip->saddr, ip->daddr);
    SWAP(unsigned short, udp->source, udp->dest);
    udp->check = 0;  // it was never filled in: between namespaces that is left to the hardware
    return redirect(context->ingress_ifindex, 0);
}
"""


def measure(star: Star, rate: str) -> dict[str, float]:
    """Mbit/s of worker 0 with all headers: up and down by TCP, and down by XDP, where clang is at hand."""
    star.shape(rate)
    found = {"up": _tcp(star, 0, 1), "down": _tcp(star, 1, 0)}
    if shutil.which("clang"):
        star.shape("none", ("upload",))  # or the bounced packets could not be more than the link takes
        found["down, by XDP"] = _bounced(star)
        star.shape(rate)
    return found


def line(checked: dict[str, float], rate: str) -> str:
    found = ", ".join(f"{speed:.0f} Mbit/s {way}" for way, speed in checked.items())
    return f"link check at {rate}: {found}"


def _tcp(star: Star, sender: int, receiver: int) -> float:
    with star.visit(receiver):
        server = socket.create_server((f"10.77.0.{receiver + 1}", PORT))
    with star.visit(sender), server:
        source = socket.create_connection((f"10.77.0.{receiver + 1}", PORT))
        sink = server.accept()[0]
    end = time.monotonic() + SECONDS

    def send() -> None:
        with source:
            while time.monotonic() < end:
                source.sendall(bytes(1 << 17))

    thread = threading.Thread(target=send)
    thread.start()
    count, room, start = 0, bytearray(1 << 18), time.monotonic()
    with sink:
        while received := sink.recv_into(room):
            count += received
    thread.join()
    return _megabits(count * 1514 / 1448, start)


def _bounced(star: Star) -> float:
    port = star.ports("eth2")[0]
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "bounce.c"), Path(folder, "bounce.o")
        source.write_text(BOUNCE)
        clang = ("clang", "-O2", "-target", "bpf", f"-DPORT={PORT}", "-I/usr/include/x86_64-linux-gnu")
        subprocess.run([*clang, "-c", str(source), "-o", str(program)], check=True)
        with star.visit("switch"):
            subprocess.run(["ip", "link", "set", port, "xdpdrv", "obj", str(program), "sec", "xdp"], check=True)
    try:
        with star.visit(0):
            return _blast()
    finally:
        with star.visit("switch"):
            subprocess.run(["ip", "link", "set", port, "xdpdrv", "off"], check=True)


def _blast() -> float:
    """What comes out of the worker's download while it sends as much as it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        source.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, PAYLOAD)
        before, start = counters("download"), time.monotonic()
        while time.monotonic() < start + SECONDS:
            source.sendto(bytes(40 * PAYLOAD), (address_of_switch("eth2"), PORT))
        return _megabits(counters("download").since(before).bytes_sent, start)


def _megabits(count: float, start: float) -> float:
    return count * 8 / (time.monotonic() - start) / 1e6
