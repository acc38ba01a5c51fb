"""Compiles the XDP program when it is first needed, and keeps the object file in a cache folder.

There is one object file for each version of the sources and of the compiler. The kernel runs what it is given, so the
folder is one that only this user can write to.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from gradwire.errors import GradwireError
from gradwire.program_cache import ProgramCache

HERE = Path(__file__).parent
SOURCE = HERE / "program.bpf.c"
PACKET_FORMAT = HERE.parent / "packet" / "packet_format.h"
FLAGS = ("-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Werror")


def compiled_program() -> bytes:
    """Return the compiled program, compiling it if need be. GradwireError says what is missing if that fails."""
    if sys.platform != "linux" or sys.byteorder != "little":
        raise GradwireError("the XDP engine needs Linux on a little-endian machine; use --engine userspace")
    clang = shutil.which("clang")
    if not clang:
        raise GradwireError(
            "the XDP engine is compiled by clang, which was not found: install it (apt-get install clang, "
            "dnf install clang), or use --engine userspace"
        )
    try:
        cache = ProgramCache("xdp")
    except OSError as error:
        raise GradwireError(f"{error.strerror}: set XDG_CACHE_HOME to a folder of yours") from None
    try:
        name = _name(clang)
        kept = cache.read(name)
        if kept is not None:
            return kept
        program = _compile(clang)
        cache.keep(name, program)
        return program
    except OSError as error:
        raise GradwireError(
            f"cannot keep the compiled XDP program in {cache.folder}: {error.strerror}; set XDG_CACHE_HOME to one of "
            f"yours"
        ) from None


def _name(clang: str) -> str:
    """Return the name of the object file of these sources, compiled by this compiler."""
    version = subprocess.run([clang, "--version"], check=False, capture_output=True).stdout
    sources = [*sorted(HERE.glob("*.bpf.*")), PACKET_FORMAT]
    parts = [*(source.read_bytes() for source in sources), version, " ".join(FLAGS).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24] + ".o"


def _compile(clang: str) -> bytes:
    command = [clang, *FLAGS, "-I", str(PACKET_FORMAT.parent), "-c", str(SOURCE), "-o", "-"]
    ended = subprocess.run(command, check=False, capture_output=True)
    if ended.returncode:
        said = ended.stderr.decode(errors="replace")
        raise GradwireError(f"{clang} cannot compile the XDP program; use --engine userspace:\n{said}")
    return ended.stdout
