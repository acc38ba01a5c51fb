"""Index, sketch and peeling as docs/homomorphic.md has them, word for word and slowly; shares no code with gradwire."""

from __future__ import annotations

import struct

from support.plain_coders import Bytes

DENSE, BITMAP, BLOOM = range(3)


def plain_mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0x735A2D97 % 2**32
    return x ^ x >> 15


def plain_cells(block: int, segments: int, log: int, seed: int) -> list[int]:
    first = plain_mix(seed ^ 0x9E3779B9)
    x = (plain_mix(block ^ first) + plain_mix((first + 0x85EBCA6B) % 2**32)) % 2**32
    a, b, c = plain_mix(x), plain_mix(x ^ 0x9E3779B9), plain_mix((x + 0x85EBCA6B) % 2**32)
    start = a * (segments - 3) // 2**32
    return [(start + j << log) + place % 2**log for j, place in enumerate((b, b >> 16, c, c >> 16))]


def plain_filtered(block: int, index: list[int], probes: int, seed: int) -> bool:
    """Whether a Bloom filter says that the block may be in it."""
    hashed = plain_mix(block // 32 ^ plain_mix(seed ^ 0x85EBCA6B))
    for i in range(probes):
        h = plain_mix((hashed + i * 0x9E3779B9) % 2**32)
        if not index[h * len(index) // 2**32] >> (block + h) % 32 & 1:
            return False
    return True


def plain_words(at: Bytes, index_kind: int, lanes: int, count: int) -> list[int]:
    """The words of a sum, from the seed on; 0 … 2³² − 1."""
    if index_kind == DENSE:
        return list(struct.unpack(f"<{count}I", at.take(4 * count)))
    (seed,) = struct.unpack("<I", at.take(4))
    segments, log, blocks = at.varint(), at.byte(), -(-count // lanes)
    index_words, probes = (at.varint(), at.byte()) if index_kind == BLOOM else (-(-blocks // 32), 0)
    index = struct.unpack(f"<{index_words}I", at.take(4 * index_words))
    cells = segments << log
    raw = struct.unpack(f"<{cells * lanes}I", at.take(4 * cells * lanes))
    sketch = [list(raw[lanes * c : lanes * c + lanes]) for c in range(cells)]
    if index_kind == BLOOM:
        there = {b for b in range(blocks) if plain_filtered(b, list(index), probes, seed)}
    else:
        there = {b for b in range(blocks) if index[b // 32] >> b % 32 & 1}
    own = {b: plain_cells(b, segments, log, seed) for b in there}
    words = [0] * (blocks * lanes)
    while there:
        holds: dict[int, list[int]] = {}
        for b in there:
            for c in own[b]:
                holds.setdefault(c, []).append(b)
        c, (b,) = next(item for item in sorted(holds.items()) if len(item[1]) == 1)
        value = list(sketch[c])
        words[lanes * b : lanes * b + lanes] = value
        for c in own[b]:
            sketch[c] = [(x - v) % 2**32 for x, v in zip(sketch[c], value, strict=True)]
        there.remove(b)
    assert not any(map(any, sketch)) and not any(words[count:])
    return words[:count]


def unpacked(word: int, bits: int) -> list[int]:
    """The codes in a word, lowest first, with their signs."""
    codes = []
    for _ in range(32 // bits):
        low = word % 2**bits
        codes.append(low - 2**bits if low >= 2 ** (bits - 1) else low)
        word = (word - codes[-1]) % 2**32 >> bits
    return codes
