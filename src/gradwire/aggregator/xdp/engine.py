"""The XDP engine: packets of data are added up in the kernel, before its network stack (program.bpf.c).

What is not DATA of an open session arrives at an ordinary UDP socket, for the control plane. The program is attached by
links, which the kernel takes away with this process, however it ends."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence

from gradwire.aggregator.engine import Address, Session
from gradwire.aggregator.xdp import build, libbpf
from gradwire.aggregator.xdp.interfaces import Links
from gradwire.aggregator.xdp.worker_routes import place
from gradwire.errors import GradwireError

WORKERS, SESSIONS, SLOTS = 64, 64, 16384  # as in maps.bpf.h
MOST_SLOTS = 2048  # of a session
COUNTERS = (
    *("packets", "results", "resent", "duplicates", "old", "forged", "malformed", "unknown", "control"),
    *("bytes_in", "bytes_out"),
)

LISTENER = struct.Struct("<4s2s2xQ")
PLACE = struct.Struct("<6s6s4s2s2x")
SESSION = struct.Struct(f"<16sQIIII{WORKERS * PLACE.size}s{WORKERS}Q")
DEVICE = struct.Struct("<Ii")


class XdpEngine:
    """An engine (see `Engine`) at one address of this host, for workers behind the given interfaces."""

    def __init__(self, bind: Address, interfaces: Sequence[str]):
        if not interfaces:
            raise GradwireError("the XDP engine needs the interfaces that lead to the workers: --interface NAME, …")
        libbpf.require_permission()
        self.interfaces = tuple(dict.fromkeys(interfaces))
        self._socket = _listen(bind)
        self.address: Address = self._socket.getsockname()
        self._sessions: dict[int, tuple[int, range, libbpf.Map]] = {}  # number: place, slots, devices
        self.most_slots = MOST_SLOTS
        self._links = Links()
        try:
            self._object = libbpf.Object(build.object_file())
        except BaseException:
            self._socket.close()
            raise
        try:
            names = ("numbers", "sessions", "broadcasts", "counts")
            self._numbers, self._places, self._broadcasts, self._counts = map(self._object.map, names)
            self._object.map("listeners").set(0, LISTENER.pack(*_packed(self.address), 0))
            self.program = self._object.program("aggregate")
            self._links.attach(self.program, self.interfaces)
        except BaseException:
            self.shut()
            raise

    def open(self, session: Session) -> None:
        if len(session.addresses) > WORKERS:
            raise GradwireError(f"{len(session.addresses)} workers; an aggregator takes up to {WORKERS} a job")
        index, slots = self._room(session)
        places = [place(ip, self.interfaces) for ip, _ in session.addresses]
        ends = b"".join(
            PLACE.pack(found.mac, found.own_mac, *_packed(address))
            for found, address in zip(places, session.addresses, strict=True)
        )
        devices = libbpf.device_map(WORKERS)
        try:
            for worker, found in enumerate(places):
                devices.set(worker, DEVICE.pack(found.interface, self._object.program(f"worker_{worker:03o}")))
            workers = len(places)
            head = ((1 << workers) - 1, session.number, workers, slots.start, session.slots)
            self._places.set(index, SESSION.pack(session.key, *head, ends, *[time.monotonic_ns()] * WORKERS))
            self._broadcasts.set(index, devices.descriptor.to_bytes(4, "little"))
            self._numbers.set(session.number, index.to_bytes(4, "little"))  # last: now it is served
        except BaseException:
            devices.close()
            raise
        self._sessions[session.number] = index, slots, devices
        self._take_stock()

    def _free(self) -> list[range]:
        """Slots that no session has."""
        taken = sorted((slots for _, slots, _ in self._sessions.values()), key=lambda slots: slots.start)
        begins, ends = [0, *(slots.stop for slots in taken)], [*(slots.start for slots in taken), SLOTS]
        return [range(begin, end) for begin, end in zip(begins, ends, strict=True)]

    def _room(self, session: Session) -> tuple[int, range]:
        """A place among the sessions, and slots."""
        places = set(range(SESSIONS)) - {index for index, _, _ in self._sessions.values()}
        free = [slots for slots in self._free() if len(slots) >= session.slots]
        if not places or not free or session.slots > MOST_SLOTS:
            raise GradwireError(
                f"the XDP engine has no room for {session.slots} slots: it takes {SESSIONS} jobs with {SLOTS} slots "
                f"altogether, {MOST_SLOTS} a job"
            )
        return min(places), free[0][: session.slots]

    def _take_stock(self) -> None:
        self.most_slots = min(MOST_SLOTS, max(map(len, self._free())))

    def close(self, number: int) -> None:
        index, _, devices = self._sessions[number]
        self._numbers.remove(number)
        self._broadcasts.remove(index)  # returns when no packet is being served that has seen the session
        devices.close()
        del self._sessions[number]
        self._take_stock()

    def poll(self, seconds: float) -> list[tuple[bytes, Address]]:
        found: list[tuple[bytes, Address]] = []
        if select.select([self._socket], [], [], max(0.0, seconds))[0]:
            while len(found) < 256:
                try:
                    found.append(self._socket.recvfrom(65535))
                except BlockingIOError:
                    break
                except ConnectionError:  # a worker's host says that nobody listens there
                    continue
        return found

    def send(self, datagram: bytes, to: Address) -> None:
        with contextlib.suppress(OSError):  # no route, a full buffer, …: lost, like any packet
            self._socket.sendto(datagram, to)

    def counters(self) -> dict[str, int]:
        size = 8 * libbpf.cpus()
        return {
            name: sum(struct.unpack(f"<{size // 8}Q", self._counts.get(number, size)))
            for number, name in enumerate(COUNTERS)
        }

    def heard(self, number: int) -> list[float]:
        index = self._sessions[number][0]
        _, _, _, workers, _, _, _, *heard = SESSION.unpack(self._places.get(index, SESSION.size))
        now = time.monotonic_ns()
        return [max(0, now - then) / 1e9 for then in heard[:workers]]

    def shut(self) -> None:
        """Detach from all interfaces, and give everything back."""
        self._links.close()
        for _, _, devices in self._sessions.values():
            devices.close()
        self._sessions.clear()
        self._object.close()
        self._socket.close()


def _packed(address: Address) -> tuple[bytes, bytes]:
    return socket.inet_aton(address[0]), struct.pack(">H", address[1])


def _listen(bind: Address) -> socket.socket:
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
