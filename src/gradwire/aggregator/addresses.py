"""Addresses as users write them: HOST:PORT, with an IPv6 address in brackets, as in [::1]:9999."""

from __future__ import annotations

import socket

from gradwire.errors import SpecError

Address = tuple[str, int]
"""A host, as an IP address or a name, and a port."""
EXAMPLES = "such as 10.0.0.1:9999 or [fd00::1]:9999"


def split(text: str, what: str) -> Address:
    """Return the host and the port of a text. SpecError if it has none; `what` tells the user which text it is."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise SpecError(f"{what} {text!r}: an IPv6 address stands in brackets, {EXAMPLES}")
    host = host[1:-1] if bracketed else host
    if not host or not (port.isascii() and port.isdecimal()) or len(port) > 5 or int(port) > 65535:
        raise SpecError(f"{what} {text!r}: it is HOST:PORT, {EXAMPLES}")
    return host, int(port)


def resolve(address: Address, what: str) -> Address:
    """Return the IP address of a host. SpecError if it has none.

    Of a name with addresses of both kinds the IPv4 address is taken: an aggregator listens at 0.0.0.0 unless it is
    told otherwise.
    """
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name with an empty or a very long part
        reason = error.strerror if isinstance(error, OSError) else None
        raise SpecError(f"{what} {in_text(address)}: no address of {host!r} was found ({reason or error})") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    numeric = socket.getnameinfo(found[0][4], socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return numeric[0], port


def in_text(address: Address) -> str:
    """Return an address as users write it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
