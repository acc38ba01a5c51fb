"""The XDP engine: packets of data are added up in the kernel, before its network stack (program.bpf.c).

What is not DATA of an open session arrives at an ordinary UDP socket, for the control plane. The program is attached by
attachments that the kernel takes away with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence

from gradwire.aggregator.addresses import Address
from gradwire.aggregator.engine import Peer, Session
from gradwire.aggregator.packet.packet_format import MOST_WORKERS
from gradwire.aggregator.xdp import build, libbpf
from gradwire.aggregator.xdp.interfaces import Attachments
from gradwire.aggregator.xdp.worker_routes import route_to
from gradwire.errors import GradwireError

# The following are as in maps.bpf.h.
WORKERS, SESSIONS, SLOTS = MOST_WORKERS, 64, 16384
COUNTERS = (
    *("packets", "results", "resent", "duplicates", "old", "forged", "malformed", "unknown", "control"),
    *("bytes_in", "bytes_out"),
)

LISTENER = struct.Struct("<4s2s2xQ")
ROUTE = struct.Struct("<6s6s4s2s2x")
SESSION = struct.Struct(f"<16sQIIII{WORKERS * ROUTE.size}s{WORKERS}Q")

DEVICE = struct.Struct("<Ii")  # as the kernel has it: interface, and program to run on the way out
MOST_SLOTS = 2048  # of a session


class XdpEngine:
    """Serves packets of data in the kernel, at one address of this host, for workers behind the given interfaces.

    `aggregator.engine.Engine` has the contract. The constructor compiles and attaches the program, and raises
    GradwireError, with what to do about it, where the machine cannot run it.
    """

    def __init__(self, bind: Address, interfaces: Sequence[str]):
        if not interfaces:
            raise GradwireError("the XDP engine needs the interfaces that lead to the workers: --interface NAME, …")
        libbpf.require_permission()
        self.interfaces = tuple(dict.fromkeys(interfaces))
        self._socket = _listen(bind)
        self.address: Address = self._socket.getsockname()
        self._sessions: dict[int, tuple[int, range, libbpf.BpfMap]] = {}  # by number: index in the map, slots, devices
        self.most_slots = MOST_SLOTS
        self._attachments = Attachments()
        try:
            self._object = libbpf.BpfObject(build.compiled_program())
        except BaseException:
            self._socket.close()
            raise
        try:
            names = ("numbers", "sessions", "broadcasts", "counts")
            self._numbers, self._session_map, self._broadcasts, self._counts = map(self._object.map, names)
            self._object.map("listeners").set(0, LISTENER.pack(*_packed(self.address), 0))
            self.program = self._object.program("aggregate")
            self._attachments.attach(self.program, self.interfaces)
        except BaseException:
            self.shut()
            raise

    def open(self, session: Session) -> None:
        """Serve a session from now on, with empty slots. GradwireError if a worker cannot be reached by XDP."""
        try:
            self._open(session)
        except (OSError, MemoryError) as error:  # no descriptors left, no memory in the kernel, …
            raise GradwireError(f"the XDP engine cannot open a session: {str(error) or 'no memory'}") from None

    def _open(self, session: Session) -> None:
        if len(session.addresses) > WORKERS:
            raise GradwireError(f"{len(session.addresses)} workers; an aggregator takes up to {WORKERS} a job")
        index, slots = self._room(session)
        routes = [route_to(peer.ip, self.interfaces) for peer in session.addresses]
        packed_routes = b"".join(
            ROUTE.pack(route.mac, route.own_mac, *_packed((peer.ip, peer.port)))
            for route, peer in zip(routes, session.addresses, strict=True)
        )
        devices = libbpf.device_map(WORKERS)
        try:
            for worker, route in enumerate(routes):
                devices.set(worker, DEVICE.pack(route.interface, self._object.program(f"worker_{worker:03o}")))
            workers = len(routes)
            head = ((1 << workers) - 1, session.number, workers, slots.start, session.slots)
            self._session_map.set(
                index, SESSION.pack(session.key, *head, packed_routes, *[time.monotonic_ns()] * WORKERS)
            )
            self._broadcasts.set(index, devices.descriptor.to_bytes(4, "little"))
            self._numbers.set(session.number, index.to_bytes(4, "little"))  # last: now it is served
        except BaseException:
            devices.close()
            raise
        self._sessions[session.number] = index, slots, devices
        self._update_most_slots()

    def _free(self) -> list[range]:
        """Return the ranges of slots that no session has."""
        taken = sorted((slots for _, slots, _ in self._sessions.values()), key=lambda slots: slots.start)
        begins, ends = [0, *(slots.stop for slots in taken)], [*(slots.start for slots in taken), SLOTS]
        return [range(begin, end) for begin, end in zip(begins, ends, strict=True)]

    def _room(self, session: Session) -> tuple[int, range]:
        """Return a free index in the map of sessions, and free slots for the session."""
        indices = set(range(SESSIONS)) - {index for index, _, _ in self._sessions.values()}
        free = [slots for slots in self._free() if len(slots) >= session.slots]
        if not indices or not free or session.slots > MOST_SLOTS:
            raise GradwireError(
                f"the XDP engine has no room for {session.slots} slots: it takes {SESSIONS} jobs with {SLOTS} slots "
                f"altogether, {MOST_SLOTS} a job"
            )
        return min(indices), free[0][: session.slots]

    def _update_most_slots(self) -> None:
        self.most_slots = min(MOST_SLOTS, max(map(len, self._free())))

    def close(self, number: int) -> None:
        """Forget a session; when this returns, no packet of it is being served any more."""
        index, _, devices = self._sessions[number]
        self._numbers.remove(number)
        self._broadcasts.remove(index)  # returns when no packet is being served that has seen the session
        devices.close()
        del self._sessions[number]
        self._update_most_slots()

    def poll(self, seconds: float) -> list[tuple[bytes, Peer]]:
        """Wait for at most this long for packets that the control plane has to answer, and return them."""
        packets: list[tuple[bytes, Peer]] = []
        if select.select([self._socket], [], [], max(0.0, seconds))[0]:
            for _ in range(256):
                try:
                    datagram, sender = self._socket.recvfrom(65535)
                except BlockingIOError:
                    break
                except OSError:  # a worker's host says that nobody listens there, an interface is down, …
                    continue
                packets.append((datagram, Peer(*sender)))
        return packets

    def send(self, datagram: bytes, to: Peer) -> None:
        """Send a packet of the control plane."""
        with contextlib.suppress(OSError):  # no route, a full buffer, …: lost, like any packet
            self._socket.sendto(datagram, (to.ip, to.port))

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start, on all processors together."""
        size = 8 * libbpf.cpus()
        return {
            name: sum(struct.unpack(f"<{size // 8}Q", self._counts.get(number, size)))
            for number, name in enumerate(COUNTERS)
        }

    def silences(self, number: int) -> list[float]:
        """Return the seconds since each worker's last packet of data."""
        index = self._sessions[number][0]
        _, _, _, workers, _, _, _, *last_packets = SESSION.unpack(self._session_map.get(index, SESSION.size))
        now = time.monotonic_ns()
        return [max(0, now - then) / 1e9 for then in last_packets[:workers]]

    def shut(self) -> None:
        """Detach from all interfaces, and give back maps, programs and the socket."""
        self._attachments.close()
        for _, _, devices in self._sessions.values():
            devices.close()
        self._sessions.clear()
        self._object.close()
        self._socket.close()


def _packed(address: Address) -> tuple[bytes, bytes]:
    return socket.inet_aton(address[0]), struct.pack(">H", address[1])


def _listen(bind: Address) -> socket.socket:
    if ":" in bind[0]:
        raise GradwireError(
            f"the XDP engine speaks IPv4 alone, not {bind[0]}: --bind an IPv4 address, or use --engine userspace"
        )
    try:
        address = socket.inet_aton(socket.gethostbyname(bind[0]))
    except OSError:
        raise GradwireError(f"{bind[0]!r} is no IPv4 address") from None
    if not any(address):
        raise GradwireError("the XDP engine needs the address that workers connect to, not 0.0.0.0: --bind IP:PORT")
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        listener.bind((socket.inet_ntoa(address), bind[1]))
    except OSError as error:
        listener.close()
        raise GradwireError(f"cannot listen at {bind[0]}:{bind[1]}: {error.strerror}") from None
    listener.setblocking(False)
    return listener
