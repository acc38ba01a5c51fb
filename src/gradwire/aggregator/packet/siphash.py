"""SipHash-2-4 (Aumasson and Bernstein 2012, section 2), the keyed code that every packet bears.

`code` is the native function where there is one, and the plain one otherwise; both give the same 64-bit number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress

_MASK = (1 << 64) - 1


def plain_siphash(key: bytes, message: bytes) -> int:
    """Return the 64-bit SipHash-2-4 of the message under a key of 16 bytes, in plain Python."""
    k0, k1 = struct.unpack("<QQ", key)
    v: list[int] = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        _sip_round(v)
        _sip_round(v)
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(4):
        _sip_round(v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def _sip_round(v: list[int]) -> None:
    v0, v1, v2, v3 = v
    v0 = (v0 + v1) & _MASK
    v1 = _rotate(v1, 13) ^ v0
    v0 = _rotate(v0, 32)
    v2 = (v2 + v3) & _MASK
    v3 = _rotate(v3, 16) ^ v2
    v0 = (v0 + v3) & _MASK
    v3 = _rotate(v3, 21) ^ v0
    v2 = (v2 + v1) & _MASK
    v1 = _rotate(v1, 17) ^ v2
    v[:] = v0, v1, _rotate(v2, 32), v3


def _rotate(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & _MASK


code: Callable[[bytes, bytes], int] = plain_siphash
"""The 64-bit SipHash-2-4 of a message (second) under a key of 16 bytes (first), by the fastest code there is."""
with suppress(ImportError):
    from gradwire._native import siphash as _native_siphash

    code = _native_siphash
