"""The kernels of the homomorphic code (docs/homomorphic.md): words on a grid, index, sketch, peeling.

Words are int32 tensors whose bits count as unsigned; a block is `lanes` neighbouring words.
"""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.reference.generator import mix, uniform
from gradwire.kernels.reference.quantize import compensate

__all__ = [
    "align_words", "are_ascending", "bloom_build", "bloom_query", "count_bits", "count_blocks", "index_bitmap", "peel",
    "put_words", "quantize_all", "quantize_values", "sketch_words",
]  # fmt: skip

MASK = 0xFFFFFFFF
GOLDEN, OTHER = 0x9E3779B9, 0x85EBCA6B
SUMS = 16  # partial sums of squares
Quantized = tuple[torch.Tensor, torch.Tensor, int, float]  # see `quantize_all`
Peeled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]  # see `peel`

# ── entries and words ─────────────────────────────────────────────────────────────────────────────


def quantize_all(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    most: int, bits: int, seed: int | None = None,
) -> Quantized:  # fmt: skip
    """Return the words that are not zero: positions (int64, ascending), values (int32); then the biased exponent of the
    largest |u|, and Σu² in fp64.

    u = g + decay·e where g is not 0; an entry with g = 0 is not sent, and leaves decay·e in its memory. q = u/step,
    rounded to an integer and limited to ±most; e ← u − q·step. The exponent is 0 for zeros and denormals, and 255 if g
    or u is not a finite number: then there are no words, and memory_out is not to be trusted.
    """
    here = gradient != 0
    u = torch.where(here, compensate(gradient, memory, decay), 0)
    largest = int(u.abs().view(torch.int32).max()) >> 23 if u.numel() else 0
    if not bool(torch.isfinite(gradient).all()) or largest == 255:
        none = torch.empty(0, dtype=torch.int64, device=u.device)
        return none, none.int(), 255, 0.0
    q, sent = quantize_values(u, step, most, seed)
    if memory_out is not None:
        memory_out.copy_(u - sent if memory is None else torch.where(here, u - sent, memory * decay))
    fields = 32 // bits
    padded = torch.zeros(-(-q.numel() // fields) * fields, dtype=torch.int64, device=q.device)
    padded[: q.numel()] = q
    words = (padded.view(-1, fields) << torch.arange(0, 32, bits, device=q.device)).sum(1).to(torch.int32)
    positions = torch.nonzero(words).flatten()
    return positions, words[positions], largest, _squares(u)


def _squares(u: torch.Tensor) -> float:
    """Σu² by sixteen sums, of every sixteenth entry, and these one after the other: alike on all machines."""
    if not u.numel():
        return 0.0
    squares = np.zeros((-(-u.numel() // SUMS), SUMS))
    squares.reshape(-1)[: u.numel()] = np.square(u.double().cpu().numpy())
    return float(np.add.accumulate(np.add.accumulate(squares, axis=0)[-1])[-1])


def quantize_values(
    values: torch.Tensor, step: float, most: int, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, q·step): value/step, limited to the largest fp32 number up to most, rounded to the nearest integer.

    Ties go to even; with a seed it is rounded down, or up with the probability of the rest.
    """
    limit = fp32_up_to(most)
    y = (values / torch.tensor(step, dtype=torch.float32, device="cpu")).clamp(-limit, limit)
    if seed is None:
        y = torch.round(y)
    else:
        lower = torch.floor(y)
        y = lower + (uniform(y.numel(), seed, device=y.device) < y - lower)
    y = y + 0.0  # no −0
    return y.to(torch.int32), y * torch.tensor(step, dtype=torch.float32, device="cpu")


def fp32_up_to(most: int) -> float:
    """Return the largest fp32 number that is not above an integer."""
    near = np.float32(most)
    return float(near if int(near) <= most else np.nextafter(near, np.float32(0)))


def put_words(out: torch.Tensor, positions: torch.Tensor, words: torch.Tensor, bits: int, factor: float) -> None:
    """Write float32(float64(q)·factor) for every entry of these words; entries beyond the last are ignored."""
    fields, rest = 32 // bits, words.long()
    for field in range(fields):
        top = 1 << bits - 1
        q = (rest + top & 2 * top - 1) - top  # the low field, with its sign
        rest = (rest - q) >> bits
        entries = positions * fields + field
        inside = entries < out.numel()
        out[entries[inside]] = (q[inside].double() * factor).float()


# ── index ─────────────────────────────────────────────────────────────────────────────────────────


def are_ascending(positions: torch.Tensor, limit: int) -> bool:
    """Tell whether each position is above the one before it, and all are from 0 on and below the limit."""
    if not positions.numel():
        return True
    return int(positions[0]) >= 0 and int(positions[-1]) < limit and bool((positions[1:] > positions[:-1]).all())


def count_blocks(positions: torch.Tensor, lanes: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many blocks hold one of these ascending positions, for each number of lanes."""
    return tuple(len(torch.unique_consecutive(positions // n)) for n in lanes)


def count_bits(bitmap: torch.Tensor) -> int:
    """Count the bits of a bitmap that are set."""
    counts = [int(_unpacked(part).sum()) for part in bitmap.split(1 << 16)]  # part by part: a bit takes a byte here
    return sum(counts)


def index_bitmap(positions: torch.Tensor, lanes: int, blocks: int) -> torch.Tensor:
    """Return a bitmap of the blocks that hold one of these positions: block b is bit b mod 32 of word ⌊b/32⌋."""
    bits = np.zeros(-(-blocks // 32) * 32, dtype=np.uint8)
    bits[positions.cpu().numpy() // lanes] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4")).to(positions.device)


def _unpacked(bitmap: torch.Tensor) -> np.ndarray:
    return np.unpackbits(bitmap.cpu().numpy().view(np.uint8), bitorder="little")


def align_words(
    bitmap: torch.Tensor, words: int, lanes: int, positions: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the positions of all words in blocks that a bitmap marks, and a message's words there.

    Where the message has none, that is zero; the last number says how many of the message's words were met.
    """
    marked = torch.from_numpy(_unpacked(bitmap)).to(bitmap.device)
    blocks = torch.nonzero(marked[: -(-words // lanes)]).flatten()
    everywhere = (blocks[:, None] * lanes + torch.arange(lanes, device=blocks.device)).flatten()
    everywhere = everywhere[everywhere < words]
    message = torch.zeros(words, dtype=torch.int32, device=bitmap.device)
    message[positions] = values
    return everywhere, message[everywhere], int(torch.isin(positions, everywhere).sum())


def _probe(groups: torch.Tensor, i: int, index_words: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which word of the filter the i-th probe of a group of 32 blocks is, and how far it is rotated."""
    key = int(mix(torch.tensor((seed ^ OTHER) & MASK, dtype=torch.int64, device="cpu")))
    h = mix((mix(groups ^ key) + i * GOLDEN) & MASK)
    return (h * index_words) >> 32, h & 31


def bloom_build(bitmap: torch.Tensor, index_words: int, probes: int, seed: int) -> torch.Tensor:
    """Return a filter into `probes` words of which each word of the bitmap that is not zero is ORed, rotated left."""
    groups = torch.nonzero(bitmap).flatten()
    bits = bitmap[groups].long() & MASK
    out = np.zeros(index_words, dtype=np.uint32)
    for i in range(probes):
        word, turn = _probe(groups, i, index_words, seed)
        rotated = (bits << turn | bits >> (32 - turn)) & MASK
        np.bitwise_or.at(out, word.cpu().numpy(), rotated.cpu().numpy().astype(np.uint32))
    return torch.from_numpy(out.view(np.int32)).to(bitmap.device)


def bloom_query(index: torch.Tensor, blocks: int, probes: int, seed: int) -> torch.Tensor:
    """Return the bitmap of all blocks that may be in the filter."""
    groups, words = torch.arange(-(-blocks // 32), device=index.device), index.long() & MASK
    marked = torch.full_like(groups, MASK)
    for i in range(probes):
        word, turn = _probe(groups, i, index.numel(), seed)
        marked &= (words[word] >> turn | words[word] << (32 - turn)) & MASK
    return torch.from_numpy(marked.cpu().numpy().astype(np.uint32).view(np.int32)).to(index.device)


# ── sketch ────────────────────────────────────────────────────────────────────────────────────────


def cells_of(blocks: torch.Tensor, segments: int, segment_log: int, seed: int) -> torch.Tensor:
    """Return the four cells of each block (4 × n): one in each of four neighbouring segments."""
    key, low = int(mix(torch.tensor((seed ^ GOLDEN) & MASK, dtype=torch.int64, device="cpu"))), (1 << segment_log) - 1
    x = (mix(blocks ^ key) + int(mix(torch.tensor((key + OTHER) & MASK, dtype=torch.int64, device="cpu")))) & MASK
    # Not one from the other: blocks that share two cells would then share the other two far too often.
    a, b, c = mix(x), mix(x ^ GOLDEN), mix((x + OTHER) & MASK)
    start = (a * (segments - 3)) >> 32
    places = torch.stack([b & low, b >> 16 & low, c & low, c >> 16 & low])
    return (start + torch.arange(4, device=blocks.device)[:, None] << segment_log) + places


def sketch_words(
    positions: torch.Tensor, values: torch.Tensor, lanes: int, segments: int, segment_log: int, seed: int
) -> torch.Tensor:
    """Return a sketch to which every word is added: to its lane of the four cells of its block, modulo 2³²."""
    sketch = torch.zeros((segments << segment_log) * lanes, dtype=torch.int32, device=positions.device)
    cells = cells_of(positions // lanes, segments, segment_log, seed)
    sketch.index_add_(0, (cells * lanes + positions % lanes).flatten(), values.repeat(4))
    return sketch


def peel(
    bitmap: torch.Tensor, sketch: torch.Tensor, words: int, lanes: int, segments: int, segment_log: int, seed: int
) -> Peeled:
    """Words of a sum of sketches, given the bitmap of the blocks that may be in it (bits beyond the last are ignored).

    Returns positions and values of the words that were recovered and are not zero; the positions of all words of blocks
    that were not; and whether what was recovered explains the cells without any other block: if not, index and sketch
    do not belong together, and what was recovered means nothing.
    """
    count = -(-words // lanes)
    blocks = torch.from_numpy(np.flatnonzero(_unpacked(bitmap)[:count])).to(bitmap.device)
    cells, sums = cells_of(blocks, segments, segment_log, seed), sketch.view(-1, lanes).clone()
    values = torch.zeros((len(blocks), lanes), dtype=torch.int32, device=blocks.device)
    here = torch.arange(len(blocks), device=blocks.device)  # those that are not yet recovered
    while True:
        counts = torch.bincount(cells[:, here].flatten(), minlength=len(sums))
        alone = counts[cells[:, here]] == 1  # 4 × those
        ready = alone.any(0)
        if not bool(ready.any()):
            break
        now = here[ready]
        first = alone[:, ready].int().argmax(0)  # any of them does
        values[now] = sums[cells[first, now]]
        sums.index_add_(0, cells[:, now].flatten(), -values[now].repeat(4, 1))
        here = here[~ready]
    consistent = not bool(sums[counts == 0].any())
    positions = (blocks[:, None] * lanes + torch.arange(lanes, device=blocks.device)).flatten()
    flat, left = values.flatten(), positions.view(-1, lanes)[here].flatten()
    # Words beyond the last are nobody's.
    consistent &= not bool(flat[positions >= words].any())
    kept = (flat != 0) & (positions < words)
    return positions[kept], flat[kept], left[left < words], consistent
