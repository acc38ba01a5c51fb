"""As much of libbpf as the XDP engine needs, by ctypes: load an object file, use its maps, attach to interfaces."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from pathlib import Path

from gradwire.errors import GradwireError

BPF_XDP = 37  # attach type
GENERIC, NATIVE = 1 << 1, 1 << 2  # XDP_FLAGS_SKB_MODE, XDP_FLAGS_DRV_MODE
DEVMAP = 14
NO_PERMISSION = (
    "the XDP engine needs root, or the capabilities CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON: run it with sudo, "
    "or use --engine userspace, which needs none"
)
_Printer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class _LinkOptions(ctypes.Structure):
    """struct bpf_link_create_opts, up to what is used of it."""

    _fields_ = (("size", ctypes.c_size_t), ("flags", ctypes.c_uint32), ("unused", ctypes.c_uint32))


@functools.cache
def library() -> ctypes.CDLL:
    """Return libbpf, loaded once. GradwireError says how to install it if it is missing."""
    try:
        loaded = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError:
        raise GradwireError(
            "the XDP engine needs libbpf 1.0 or later (libbpf.so.1): install it (Debian, Ubuntu: apt-get install "
            "libbpf1; Fedora: dnf install libbpf), or use --engine userspace"
        ) from None
    for name in ("bpf_object__open_mem", "bpf_object__find_program_by_name"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.libbpf_set_print(_collector)
    return loaded


def require_permission() -> None:
    """Raise GradwireError unless this process may load XDP programs; root or not, its capabilities count."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    have = int(status["CapEff"], 16)
    net_admin, sys_admin, perfmon, bpf = (have >> bit & 1 for bit in (12, 21, 38, 39))  # linux/capability.h
    if not net_admin or not (sys_admin or (perfmon and bpf)):
        raise GradwireError(NO_PERMISSION)


_messages: list[str] = []


def _collect(_level: int, form: bytes, arguments: int) -> int:
    """libbpf explains on stderr why the kernel refused a program; keep the end of it for the error message."""
    buffer = ctypes.create_string_buffer(2000)
    ctypes.CDLL(None).vsnprintf(buffer, ctypes.c_size_t(len(buffer)), form, ctypes.c_void_p(arguments))
    _messages[:] = [*_messages[-5:], buffer.value.decode(errors="replace").strip()]
    return 0


_collector = _Printer(_collect)  # kept for as long as libbpf may call it


def _checked(result: int, what: str) -> int:
    """Return the result of a call of libbpf; OSError if it is an error."""
    if result < 0:
        number = -result if result < -1 else ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")
    return result


class BpfMap:
    """A map that the kernel and this process share, by its descriptor; keys are numbers of 32 bits."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def set(self, key: int, value: bytes) -> None:
        """Set an entry, as the bytes of its C struct."""
        _checked(library().bpf_map_update_elem(self.descriptor, _u32(key), value, ctypes.c_uint64(0)), "set an entry")

    def get(self, key: int, size: int) -> bytes:
        """Return the `size` bytes of an entry."""
        value = ctypes.create_string_buffer(size)
        _checked(library().bpf_map_lookup_elem(self.descriptor, _u32(key), value), "read an entry")
        return value.raw

    def remove(self, key: int) -> None:
        """Remove an entry."""
        _checked(library().bpf_map_delete_elem(self.descriptor, _u32(key)), "remove an entry")

    def close(self) -> None:
        """Give the map back to the kernel, which keeps it as long as a program uses it."""
        os.close(self.descriptor)


def _u32(key: int) -> bytes:
    return key.to_bytes(4, "little")


def device_map(entries: int) -> BpfMap:
    """Make a map of interfaces that packets can be redirected to, each with a program to run on the way out."""
    size, word = ctypes.c_uint32(4), ctypes.c_uint32(8)
    descriptor = library().bpf_map_create(DEVMAP, b"workers", size, word, ctypes.c_uint32(entries), None)
    return BpfMap(_checked(descriptor, "create a map of devices"))


def cpus() -> int:
    """Return how many processors this machine may have, the length of a per-processor entry."""
    return _checked(library().libbpf_num_possible_cpus(), "count processors")


class BpfObject:
    """A loaded object file, from its bytes. Its programs and maps live until `close`, or until this process ends."""

    def __init__(self, program: bytes):
        opened = library().bpf_object__open_mem(program, ctypes.c_size_t(len(program)), None)
        self._object = ctypes.c_void_p(opened)
        if not self._object:
            raise GradwireError(
                "libbpf cannot read the compiled XDP program; delete ~/.cache/gradwire/xdp: it is compiled again"
            )
        _messages.clear()
        try:
            _checked(library().bpf_object__load(self._object), "load the XDP program")
        except OSError as error:
            self.close()
            if error.errno == errno.EPERM:
                raise GradwireError(f"the kernel does not let us load an XDP program: {NO_PERMISSION}") from None
            raise GradwireError(
                f"this kernel refused the XDP program ({error}); use --engine userspace. libbpf said: "
                + " | ".join(_messages)[-1500:]
            ) from None

    def map(self, name: str) -> BpfMap:
        """Return the map of this name in maps.bpf.h."""
        return BpfMap(_checked(library().bpf_object__find_map_fd_by_name(self._object, name.encode()), f"find {name}"))

    def program(self, name: str) -> int:
        """Return the descriptor of the program of this name."""
        program = ctypes.c_void_p(library().bpf_object__find_program_by_name(self._object, name.encode()))
        return _checked(library().bpf_program__fd(program), f"find {name}")

    def close(self) -> None:
        """Unload programs and maps; a second call does nothing."""
        library().bpf_object__close(self._object)
        self._object = ctypes.c_void_p()


def attach(program: int, interface: str, index: int, mode: int) -> int:
    """Attach a program to an interface (by its name and index), and return the descriptor of the attachment.

    The program stays there until the descriptor is closed, or the process ends or is killed. OSError if the interface
    does not know this mode.
    """
    options = _LinkOptions(ctypes.sizeof(_LinkOptions), mode, 0)
    link: int = library().bpf_link_create(program, index, BPF_XDP, ctypes.byref(options))
    try:
        return _checked(link, f"attach an XDP program to {interface}")
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EEXIST):
            raise GradwireError(
                f"{interface} has an XDP program already (another aggregator?); see `ip link show {interface}`, and "
                f"detach it with `ip link set {interface} xdp off` if nobody needs it"
            ) from None
        if error.errno == errno.EPERM:
            raise GradwireError(f"cannot attach to {interface}: {NO_PERMISSION}") from None
        raise
