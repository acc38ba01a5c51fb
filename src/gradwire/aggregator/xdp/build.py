"""Compiles the XDP program when it is first needed: one object file for each version of source and compiler."""

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
FLAGS = ("-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Werror")


def object_file() -> Path:
    if sys.platform != "linux" or sys.byteorder != "little":
        raise GradwireError("the XDP engine needs Linux on a little-endian machine; use --engine userspace")
    clang = shutil.which("clang")
    if not clang:
        raise GradwireError(
            "the XDP engine is compiled by clang, which was not found: install it (apt-get install clang, "
            "dnf install clang), or use --engine userspace"
        )
    version = subprocess.run([clang, "--version"], check=False, capture_output=True).stdout
    parts = [*(source.read_bytes() for source in sorted(HERE.glob("*.bpf.*"))), version, " ".join(FLAGS).encode()]
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24] + ".o"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / "xdp"
    made = folder / name
    try:
        _compile(clang, made)
    except OSError as error:
        raise GradwireError(
            f"cannot keep the compiled XDP program in {folder}: {error.strerror}; set XDG_CACHE_HOME to one of yours"
        ) from None
    return made


def _compile(clang: str, made: Path) -> None:
    folder = made.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there, and the kernel would run what they wrote")
    if made.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unfinished = Path(scratch) / made.name
        command = [clang, *FLAGS, "-c", str(SOURCE), "-o", str(unfinished)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if ended.returncode:
            raise GradwireError(f"{clang} cannot compile the XDP program; use --engine userspace:\n{ended.stderr}")
        unfinished.rename(made)
