"""Compiles the XDP program when it is first needed, and keeps the object file in a cache folder.

There is one object file for each version of the sources and of the compiler.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gradwire.errors import GradwireError

HERE = Path(__file__).parent
SOURCE = HERE / "program.bpf.c"
PACKET_FORMAT = HERE.parent / "packet" / "packet_format.h"
FLAGS = ("-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Werror")


def object_file() -> Path:
    """Return the compiled program, compiling it if need be. GradwireError says what is missing if that fails."""
    if sys.platform != "linux" or sys.byteorder != "little":
        raise GradwireError("the XDP engine needs Linux on a little-endian machine; use --engine userspace")
    clang = shutil.which("clang")
    if not clang:
        raise GradwireError(
            "the XDP engine is compiled by clang, which was not found: install it (apt-get install clang, "
            "dnf install clang), or use --engine userspace"
        )
    version = subprocess.run([clang, "--version"], check=False, capture_output=True).stdout
    sources = [*sorted(HERE.glob("*.bpf.*")), PACKET_FORMAT]
    parts = [*(source.read_bytes() for source in sources), version, " ".join(FLAGS).encode()]
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24] + ".o"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / "xdp"
    compiled = folder / name
    try:
        _compile(clang, compiled)
    except OSError as error:
        raise GradwireError(
            f"cannot keep the compiled XDP program in {folder}: {error.strerror}; set XDG_CACHE_HOME to one of yours"
        ) from None
    return compiled


def _compile(clang: str, compiled: Path) -> None:
    folder = compiled.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    owner = folder.stat()
    if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there, and the kernel would run what they wrote")
    if compiled.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unfinished = Path(scratch) / compiled.name
        command = [clang, *FLAGS, "-I", str(PACKET_FORMAT.parent), "-c", str(SOURCE), "-o", str(unfinished)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if ended.returncode:
            raise GradwireError(f"{clang} cannot compile the XDP program; use --engine userspace:\n{ended.stderr}")
        unfinished.rename(compiled)
