"""Asks the kernel (netlink family "netdev", Linux 6.3) whether an interface sends packets that XDP redirects to it.

A veth does only if its peer receives in batches (`ethtool -K eth0 gro on`) or has an XDP program itself; otherwise such
packets are lost without a word.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

NETLINK_GENERIC, CONTROL = 16, 16
GET_FAMILY, FAMILY_ID, FAMILY_NAME = 3, 1, 2
DEV_GET, IFINDEX, XDP_FEATURES = 1, 1, 3
NDO_XMIT = 1 << 2
ERROR = 2
HEADER = struct.Struct("=IHHIIBBH")  # length, type, flags, sequence, port; command, version, reserved


def takes_redirected(interface: int) -> bool:
    """Tell whether the interface (by its index) sends such packets; True, too, if the kernel is too old to say."""
    family = _ask(CONTROL, GET_FAMILY, FAMILY_NAME, b"netdev\0").get(FAMILY_ID)
    if family is None:
        return True
    answer = _ask(int.from_bytes(family, "little"), DEV_GET, IFINDEX, struct.pack("=I", interface))
    features = answer.get(XDP_FEATURES)
    return features is None or bool(int.from_bytes(features, "little") & NDO_XMIT)


def _ask(family: int, command: int, attribute: int, value: bytes) -> dict[int, bytes]:
    """Return the attributes of the kernel's answer by their numbers; none if it is an error."""
    body = struct.pack("=HH", 4 + len(value), attribute) + value + bytes(-len(value) % 4)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_GENERIC) as kernel:
        kernel.send(HEADER.pack(HEADER.size + len(body), family, 1, 1, 0, command, 1, 0) + body)
        answer = kernel.recv(65536)
    return {} if HEADER.unpack_from(answer)[1] == ERROR else dict(_attributes(answer[HEADER.size :]))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind, data[4:length]
        data = data[max(4, length + 3 & ~3) :]
