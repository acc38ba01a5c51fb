"""Addresses: at which of them other machines reach this one, and how they are packed for the handshake."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

from torch.distributed import PrefixStore

from gradwire.torch_internals.process_groups import default_store

PACKED = 18  # bytes: an IPv6 address (or an IPv4 one mapped to it) and a port


def own_address() -> str:
    """Return the address of the interface that Gloo is told to use, or else that from which the store is reached."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _of_interface(interface)
    host = _store_host() or os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel picks the address that it would send from
        address: str = probe.getsockname()[0]
        return address.split("%", maxsplit=1)[0]


def _of_interface(name: str) -> str:
    import fcntl  # not on Windows, where Gloo knows no such setting either

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, siocgifaddr, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _store_host() -> str:
    """Return the host of the store where the process group met; empty if that is a file."""
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))  # a TCPStore has one


def pack_address(listener: socket.socket | None) -> bytes:
    """Return the address and port of a socket as 18 bytes; zeros if there is no socket."""
    if listener is None:
        return bytes(PACKED)
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    mapped = address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed
    return mapped + struct.pack("<H", port)


def unpack_address(packed: bytes) -> tuple[str, int] | None:
    """Return the address and port of 18 bytes; None if they are zeros."""
    address, port = ipaddress.IPv6Address(packed[:16]), struct.unpack("<H", packed[16:])[0]
    return (str(address.ipv4_mapped or address), port) if port else None
