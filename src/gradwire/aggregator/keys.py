"""The key that workers and aggregator share: 32 hexadecimal digits, in a file or in the environment."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gradwire.aggregator.packet.packet_format import KEY_BYTES
from gradwire.errors import SpecError

VARIABLE = "GRADWIRE_KEY"


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
    """Return the key that a file holds. SpecError if it cannot be read, or holds none."""
    try:
        return read_key(path.read_text(encoding="ascii", errors="replace"), str(path))
    except OSError as error:
        raise SpecError(f"cannot read the key in {path}: {error.strerror}") from None


def is_set() -> bool:
    """Tell whether the environment has a key."""
    return bool(os.environ.get(VARIABLE))


def key_from_environment() -> bytes:
    """Return the key in GRADWIRE_KEY. SpecError if there is none, or if it is not a key."""
    text = os.environ.get(VARIABLE)
    if not text:
        raise SpecError(f"workers need the aggregator's key: export {VARIABLE} with what `gradwire aggregator` printed")
    return read_key(text, VARIABLE)
