"""Attaches the XDP program to interfaces: natively, in their drivers, if all of them can."""

from __future__ import annotations

import errno
import os
import socket
import warnings
from collections.abc import Sequence

from gradwire.aggregator.xdp import libbpf, redirect_support
from gradwire.errors import GradwireError

WITHOUT = "use --engine userspace"


class Links:
    """The kernel takes a link away when its descriptor is closed, so also when this process is killed."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def attach(self, program: int, interfaces: Sequence[str]) -> None:
        indices = {name: _index(name) for name in interfaces}
        try:
            self._attach(program, indices, libbpf.NATIVE)
        except OSError as error:
            self.close()
            if error.errno == errno.ERANGE:
                raise GradwireError(
                    f"{error.strerror} (the MTU of its other end is too large for XDP): set both to 3000 or less, with "
                    f"`ip link set NAME mtu 1500`, or {WITHOUT}"
                ) from None
            if error.errno != errno.EOPNOTSUPP:
                raise GradwireError(f"{error.strerror}; {WITHOUT}") from None
            # A packet goes on natively only if it came so: all, or none.
            warnings.warn(
                f"{error.strerror} natively: using generic XDP, which is slower. Workers on virtual wires must send "
                "packets one by one then: `ethtool -K NAME tx-udp-segmentation off` there",
                stacklevel=3,
            )
            try:
                self._attach(program, indices, libbpf.GENERIC)
            except OSError as again:
                raise GradwireError(f"{again.strerror}; {WITHOUT}") from None
            return
        deaf = [name for name, index in indices.items() if not redirect_support.takes_redirected(index)]
        if deaf:
            raise GradwireError(
                f"{', '.join(deaf)}: packets that XDP sends there would be lost. If it is a veth, run `ethtool -K NAME "
                f"gro on` for its other end (in the worker's namespace), or {WITHOUT}"
            )

    def _attach(self, program: int, indices: dict[str, int], mode: int) -> None:
        for name, index in indices.items():
            self._descriptors.append(libbpf.attach(program, name, index, mode))

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _index(interface: str) -> int:
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise GradwireError(f"there is no interface {interface!r} here (there are: {known})") from None
