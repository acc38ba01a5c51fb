"""Frames of parts of parameters, with error memory: what the two places have in common where FSDP2 reduces gradients.

A message is one byte, whether all that its rank sends in this exchange is finite, and the frames of the parts that it
goes to the receiver for: one for each large part, one for all small ones.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from .. import codecs, wire
from ..correct.flat_memory import FlatMemory
from ..errors import AggregateError, FrameError
from ..recipe import budget_parts
from .layout import Place
from .message import PREFIX
from .pieces import Piece, Recipes, divide, own_recipe, whole

FLAG = 1  # byte before the frames
HEAD = PREFIX + FLAG


class ShardFrames:
    def __init__(self, recipes: Recipes, entries: dict[str, int], memory: FlatMemory | None):
        self.recipes, self.memory = recipes, memory
        self.shares = budget_parts(entries, {name: own_recipe(name, d, recipes) for name, d in entries.items()})
        self.finite = True  # what all ranks sent in this step, as far as this rank knows
        self.steps = self.frame_bytes = self.dense_bytes = 0
        self.encode_s = self.decode_s = self.wait_s = 0.0
        self._block = torch.empty(0, dtype=torch.uint8)

    def divide(self, row: torch.Tensor, places: Sequence[Place]) -> list[Piece]:
        """The pieces of a row, one frame each."""
        return divide(whole([(p.name, row[p.row]) for p in places]), self.recipes, self.steps, self.shares)

    # ── encoding ──

    def room(self, rows: Sequence[list[Piece]]) -> torch.Tensor:
        """A buffer for the messages of these rows, one after the other; the last exchange is through with it."""
        needed = sum(p.codec.max_frame_bytes(q.tensor) for pieces in rows for p in pieces for q in p.parts)
        needed += HEAD * len(rows)
        if len(self._block) < needed:
            self._block = torch.empty(needed, dtype=torch.uint8)
        return self._block

    def encode(self, pieces: list[Piece], places: Sequence[Place], seed: str, out: torch.Tensor) -> int:
        """Write the frames to the front of `out`; returns their length. Notes whether they are finite."""
        start, position = time.perf_counter(), 0
        where = {place.name: place for place in places}
        for piece in pieces:
            # Other random numbers for every step, rank and part, and the same ones in a repeated or resumed run.
            number = (self.steps << 32) + zlib.crc32(f"{seed}:{piece.names[0]}".encode())
            length = self._encode_piece(piece, where, number, out[position:])
            self.finite &= not wire.read_header(memoryview(out[position : position + length].numpy())).nonfinite
            position += length
        self.frame_bytes += position
        self.dense_bytes += sum(4 * n for piece in pieces for n in piece.sizes)
        self.encode_s += time.perf_counter() - start
        return position

    def _encode_piece(self, piece: Piece, where: dict[str, Place], seed: int, out: torch.Tensor) -> int:
        """Correct, convert, compress: one frame."""
        source = _joined([part.tensor for part in piece.parts])
        segments = piece.sizes if len(piece.parts) > 1 else ()
        opened = self._memory_of(piece, where)
        if not opened:
            return piece.codec.encode_into(source, out, seed=seed, segments=segments)
        before, after, factor = opened[0]
        decay = piece.recipe.decay
        if len(opened) == 1 and before.dtype == torch.float32:
            decay *= factor
            return piece.codec.encode_into(source, out, residual=before, residual_out=after, decay=decay, seed=seed)
        memory = _joined([before.float() * factor for before, _, factor in opened])
        length = piece.codec.encode_into(source, out, residual=memory, decay=decay, seed=seed, segments=segments)
        for (_, after, _), left in zip(opened, memory.split(piece.sizes), strict=True):
            after.copy_(left)
        return length

    def keep(self, piece: Piece, places: Sequence[Place]) -> torch.Tensor:
        """A piece that stays on this rank needs no frame. Memory of it, from a run on another number of ranks, goes
        with it at once."""
        where = {place.name: place for place in places}
        kept = _joined([part.tensor for part in piece.parts])
        kept = kept.to(summed_in(kept.dtype), copy=True)
        self.finite &= bool(torch.isfinite(kept).all())
        for own, (before, after, factor) in zip(kept.split(piece.sizes), self._memory_of(piece, where), strict=False):
            own.add_(before.float(), alpha=piece.recipe.decay * factor)
            after.zero_()
        return kept

    def _memory_of(self, piece: Piece, where: dict[str, Place]) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        if self.memory is None or not piece.recipe.decay:
            return []
        places = [where[name] for name in piece.names]
        return [self.memory.at(place.name, place.memory, place.entries) for place in places]

    # ── decoding ──

    def decode(
        self, rank: int, message: np.ndarray, pieces: list[Piece], targets: list[torch.Tensor], weight: float,
        accumulate: bool,
    ) -> None:  # fmt: skip
        """Add a rank's frames, weighted, to the targets."""
        start = time.perf_counter()
        try:
            if len(message) < FLAG:
                raise FrameError("an empty message")
            frames = wire.split(memoryview(message[FLAG:]))
            if len(frames) != len(pieces):
                raise FrameError(f"{len(frames)} frames, expected {len(pieces)}")
            for frame, piece, target in zip(frames, pieces, targets, strict=True):
                header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
                if header.elements != sum(piece.sizes):
                    raise FrameError(
                        f"{header.elements} elements for {', '.join(piece.names)}, expected {sum(piece.sizes)}"
                    )
                codecs.decode_payload(header, payload, target, weight, accumulate)
        except FrameError as error:
            raise AggregateError(
                f"rank {rank} sent what this rank cannot use ({error}): all ranks must have the same model, "
                f"the same spec and the same version of gradwire"
            ) from error
        self.finite &= bool(message[0])
        self.decode_s += time.perf_counter() - start


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Sums are fp32 at least, whatever the gradients are."""
    return torch.promote_types(dtype, torch.float32)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])
