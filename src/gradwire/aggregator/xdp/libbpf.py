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
    try:
        loaded = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError:
        raise GradwireError(
            "the XDP engine needs libbpf 1.0 or later (libbpf.so.1): install it (Debian, Ubuntu: apt-get install "
            "libbpf1; Fedora: dnf install libbpf), or use --engine userspace"
        ) from None
    for name in ("bpf_object__open_file", "bpf_object__find_program_by_name"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.libbpf_set_print(_collect)
    return loaded


def require_permission() -> None:
    """Before anything is compiled: root or not, what counts is what the process may do."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    have = int(status["CapEff"], 16)
    net_admin, sys_admin, perfmon, bpf = (have >> bit & 1 for bit in (12, 21, 38, 39))  # linux/capability.h
    if not net_admin or not (sys_admin or (perfmon and bpf)):
        raise GradwireError(NO_PERMISSION)


_said: list[str] = []


@_Printer
def _collect(_level: int, form: bytes, arguments: int) -> int:
    """libbpf explains on stderr why the kernel refused a program; keep the end of it for the error message."""
    buffer = ctypes.create_string_buffer(2000)
    ctypes.CDLL(None).vsnprintf(buffer, ctypes.c_size_t(len(buffer)), form, ctypes.c_void_p(arguments))
    _said[:] = [*_said[-5:], buffer.value.decode(errors="replace").strip()]
    return 0


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = -result if result < -1 else ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")
    return result


class Map:
    """A map of the kernel, by its descriptor; keys are u32."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def set(self, key: int, value: bytes) -> None:
        _checked(library().bpf_map_update_elem(self.descriptor, _u32(key), value, ctypes.c_uint64(0)), "set an entry")

    def get(self, key: int, size: int) -> bytes:
        value = ctypes.create_string_buffer(size)
        _checked(library().bpf_map_lookup_elem(self.descriptor, _u32(key), value), "read an entry")
        return value.raw

    def remove(self, key: int) -> None:
        _checked(library().bpf_map_delete_elem(self.descriptor, _u32(key)), "remove an entry")

    def close(self) -> None:
        os.close(self.descriptor)


def _u32(key: int) -> bytes:
    return key.to_bytes(4, "little")


def device_map(entries: int) -> Map:
    """Where packets can be sent on to: interface, and program to run on the way."""
    size, word = ctypes.c_uint32(4), ctypes.c_uint32(8)
    made = library().bpf_map_create(DEVMAP, b"workers", size, word, ctypes.c_uint32(entries), None)
    return Map(_checked(made, "create a map of devices"))


def cpus() -> int:
    return _checked(library().libbpf_num_possible_cpus(), "count processors")


class Object:
    """A loaded object file: its programs and maps live until `close`, or until this process ends."""

    def __init__(self, path: Path):
        self._object = ctypes.c_void_p(library().bpf_object__open_file(os.fsencode(path), None))
        if not self._object:
            raise GradwireError(f"libbpf cannot read {path}; delete it, so that it is compiled again")
        _said.clear()
        try:
            _checked(library().bpf_object__load(self._object), "load the XDP program")
        except OSError as error:
            self.close()
            if error.errno == errno.EPERM:
                raise GradwireError(f"the kernel does not let us load an XDP program: {NO_PERMISSION}") from None
            raise GradwireError(
                f"this kernel refused the XDP program ({error}); use --engine userspace. libbpf said: "
                + " | ".join(_said)[-1500:]
            ) from None

    def map(self, name: str) -> Map:
        return Map(_checked(library().bpf_object__find_map_fd_by_name(self._object, name.encode()), f"find {name}"))

    def program(self, name: str) -> int:
        found = ctypes.c_void_p(library().bpf_object__find_program_by_name(self._object, name.encode()))
        return _checked(library().bpf_program__fd(found), f"find {name}")

    def close(self) -> None:
        library().bpf_object__close(self._object)  # of nothing, does nothing
        self._object = ctypes.c_void_p()


def attach(program: int, interface: str, index: int, mode: int) -> int:
    """A link: the program stays at the interface until the descriptor is closed, or the process ends or is killed.
    OSError if the interface does not know this mode."""
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
