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


class Attachments:
    """The interfaces that the XDP program is attached to.

    The kernel detaches the program when a descriptor is closed, and so also when this process ends or is killed.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def attach(self, program: int, interfaces: Sequence[str]) -> None:
        """Attach the program to all interfaces, in the same mode. GradwireError says what to do if that fails."""
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
        without_redirects = [name for name, index in indices.items() if not redirect_support.takes_redirected(index)]
        if without_redirects:
            raise GradwireError(
                f"{', '.join(without_redirects)}: packets that XDP sends there would be lost. If it is a veth, run "
                f"`ethtool -K NAME gro on` for its other end (in the worker's namespace), or {WITHOUT}"
            )

    def _attach(self, program: int, indices: dict[str, int], mode: int) -> None:
        for name, index in indices.items():
            self._descriptors.append(libbpf.attach(program, name, index, mode))

    def close(self) -> None:
        """Detach the program from all interfaces."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _index(interface: str) -> int:
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise GradwireError(f"there is no interface {interface!r} here (there are: {known})") from None
