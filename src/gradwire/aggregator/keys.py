"""The key that workers and aggregator share: 32 hexadecimal digits, in a file or in the environment."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from gradwire.aggregator.packet.packet_format import KEY_BYTES
from gradwire.errors import SpecError

VARIABLE = "GRADWIRE_KEY"
LONGEST_FILE = 4096
"""Bytes of a key file that are read, at most."""


def make_key() -> str:
    """Return a new random key, as 32 hexadecimal digits."""
    return secrets.token_hex(KEY_BYTES)


def read_key(text: str, where: str) -> bytes:
    """Return the 16 bytes of a key. SpecError if the text is none; `where` tells the user where it comes from."""
    text = text.strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or len(text) != 2 * KEY_BYTES:
        raise SpecError(
            f"{where} is not a key: a key is {2 * KEY_BYTES} hexadecimal digits (openssl rand -hex {KEY_BYTES})"
        )
    return key


def key_from_file(path: Path) -> bytes:
    """Return the key that a file holds. SpecError if it cannot be read, holds none, or if others can read it.

    As ssh does with private keys, this refuses the file and does not just warn: nobody reads the warnings of a service,
    and whoever has the key can add to the sums of every job. A pipe has no mode that counts.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(LONGEST_FILE).decode("ascii", errors="replace")
    except OSError as error:
        raise SpecError(f"cannot read the key in {path}: {error.strerror}") from None
    # A file of another owner, such as root, may be there for a group: that of a service.
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o027
    if stat.S_ISREG(status.st_mode) and status.st_mode & forbidden:
        raise SpecError(
            f"others can read or change the key in {path} (its mode is {stat.S_IMODE(status.st_mode):04o}):"
            f" chmod 600 {path}, and make a new key if somebody may have read it"
        )
    return read_key(text, str(path))


def is_set() -> bool:
    """Tell whether the environment has a key."""
    return bool(os.environ.get(VARIABLE))


def key_from_environment() -> bytes:
    """Return the key in GRADWIRE_KEY. SpecError if there is none, or if it is not a key."""
    text = os.environ.get(VARIABLE)
    if not text:
        raise SpecError(f"workers need the aggregator's key: export {VARIABLE} with what `gradwire aggregator` printed")
    return read_key(text, VARIABLE)
