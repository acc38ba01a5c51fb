"""Frames of parts of parameters, with error memory: what the two places have in common where FSDP2 reduces gradients.

A message is one byte, whether all that its rank sends in this exchange is finite, and the frames of the parts that it
goes to the receiver for: one for each large part, one for all small ones.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gradwire.aggregate.messages.mean import Mean, unusable
from gradwire.aggregate.messages.tensor_parts import Piece, whole
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.catalogue.spec_by_name import Spec
from gradwire.correct.flat_error_memory import FlatMemory
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.fsdp.shard_layout import Place

FLAG = 1  # byte before the frames
HEAD = PREFIX + FLAG


class ShardFrames:
    """Recipes, decoding and the count of steps are those of `mean`; memory is kept here."""

    def __init__(self, spec: Spec, sizes: Mapping[str, torch.Size], memory: FlatMemory | None):
        self.mean, self.memory = Mean(spec), memory
        self.mean.know_model([(name, torch.empty(size, device="meta")) for name, size in sizes.items()])
        self.dense_bytes = 0  # of what was sent, in fp32
        self.wait_s = 0.0
        self._block = torch.empty(0, dtype=torch.uint8)

    def divide(self, row: torch.Tensor, places: Sequence[Place]) -> list[Piece]:
        """The pieces of a row, one frame each."""
        return self.mean.divide(whole([(place.name, row[place.row]) for place in places]))

    def end_step(self, finite: bool) -> None:
        if self.memory is not None:
            self.memory.commit() if finite else self.memory.rollback()
        self.mean.end_step()

    def abandon_step(self) -> None:
        if self.memory is not None:
            self.memory.rollback()
        self.mean.abandon_step()

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
            number = (self.mean.steps << 32) + zlib.crc32(f"{seed}:{piece.names[0]}".encode())
            length = self._encode_piece(piece, where, number, out[position:])
            self.mean.finite &= not headers.read_header(memoryview(out[position : position + length].numpy())).nonfinite
            position += length
        self.mean.frame_bytes += position
        self.dense_bytes += sum(4 * n for piece in pieces for n in piece.sizes)
        self.mean.encode_s += time.perf_counter() - start
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
        self.mean.finite &= bool(torch.isfinite(kept).all())
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
        """Add a rank's frames, weighted, to the targets, or put them there."""
        if not len(message):
            raise unusable(rank, FrameError("an empty message"))
        self.mean.decode(rank, message[FLAG:], pieces, targets, weight, accumulate)
        self.mean.finite &= bool(message[0])


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Sums are fp32 at least, whatever the gradients are."""
    return torch.promote_types(dtype, torch.float32)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])
