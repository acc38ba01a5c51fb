"""The mean over all ranks of named tensors, through frames: what DDP, DataParallel and LocalSGD share.

1. encode: correct, convert, compress (u = g + γe becomes a frame; small tensors share one);
2. decode: every rank adds up all ranks' frames, its own too, in rank order, so that the result, which replaces the
   tensors, is bit-identical everywhere;
3. `end_step`: error memories are committed, or, if any rank sent a NaN or an infinity, rolled back on all.

How frames travel in between is told by `reducer.py` (every step, beside the backward pass) and, for LocalSGD, by
`sync_round.py`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from gradwire import codecs
from gradwire.aggregate.messages.tensor_parts import Named, Part, Piece, divide
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.catalogue.recipe import Recipe, budget_parts
from gradwire.catalogue.spec_by_name import Recipes, Spec, parse_spec, recipe_of_name, recipe_of_tensor
from gradwire.correct.error_memory import Residual, memory_in
from gradwire.correct.momentum import Factor, Velocity
from gradwire.engine.log import Error
from gradwire.errors import AggregateError, FrameError
from gradwire.frame import headers

Source = Callable[[Part], torch.Tensor]


class Mean:
    def __init__(self, spec: Spec):
        self.recipes = parse_spec(spec)
        self.rank, self.world = 0, 1
        self.residual, self.velocity = Residual(), Velocity()
        self.factors: dict[str, Factor] = {}  # of the parameters whose momentum is ours
        self.scale = 1.0  # of the loss, and with it of gradients and memories
        self.steps = self.frame_bytes = 0
        self.clock: int | None = None  # what schedules go by, where it is not the number of exchanges
        self.encode_s = self.decode_s = 0.0
        self.shapes: dict[str, torch.Size] = {}  # of all tensors of the model, where it is known
        self.shares: dict[str, float] = {}  # of the model's budget, for each tensor that has not its share by size
        self.finite = True  # what all ranks sent in this step
        self._blocks: dict[Hashable, torch.Tensor] = {}
        self._sent: dict[str, torch.Tensor] = {}
        self.measured: dict[str, Error] | None = None  # of this step, by tensor, if it is wanted
        self.rivals: dict[str, tuple[Recipes, Error]] = {}  # recipes whose errors are wanted beside, by spec

    def use(self, spec: Spec) -> None:
        """Another recipe from the next step on; memories stay, and are sent with it."""
        self.recipes = parse_spec(spec)
        self._share_budget()

    def recipe_of(self, name: str) -> Recipe:
        return recipe_of_name(name, self.recipes)

    def own_recipe(self, part: Part) -> Recipe:
        return recipe_of_tensor(part.name, part.tensor.numel(), self.recipes)

    @property
    def flushing(self) -> Recipes:
        """The recipes of a last exchange, if any asks for one; error memories go on under their names."""
        if not any(chosen.flush for chosen in self.recipes.values()):
            return {}
        return {pattern: chosen.last or chosen for pattern, chosen in self.recipes.items()}

    def know_model(self, tensors: Named) -> None:
        """What has to be known of the whole model: its size, and every tensor's part of the budget."""
        self.shapes = {name: t.shape for name, t in tensors}
        self._share_budget()

    @property
    def sizes(self) -> dict[str, int]:
        return {name: shape.numel() for name, shape in self.shapes.items()}

    def _share_budget(self) -> None:
        sizes = self.sizes
        self.shares = budget_parts(sizes, {name: recipe_of_tensor(name, d, self.recipes) for name, d in sizes.items()})

    @property
    def total(self) -> int:
        """Entries of the whole model."""
        return sum(self.sizes.values())

    def divide(self, parts: Sequence[Part], flush: bool = False) -> list[Piece]:
        recipes = self.flushing if flush else self.recipes
        return divide(parts, recipes, self.steps if self.clock is None else self.clock, self.shares)

    # ── encoding ──

    def encode(
        self, key: Hashable, pieces: Sequence[Piece], note: bytes = b"", source: Source | None = None,
        memory: Residual | None = None, salt: str = "",
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        """A block with room for a prefix, then the note and the frames of the pieces; and the length of both.

        `source` gives what is sent in place of a part; by default the part itself, clipped or accelerated.
        """
        start = time.perf_counter()
        source = source or self.source
        sources = [[source(part) for part in piece.parts] for piece in pieces]
        room = PREFIX + len(note)
        room += sum(p.codec.max_frame_bytes(t) for p, ts in zip(pieces, sources, strict=True) for t in ts)
        block = self._blocks.get(key)
        if block is None or len(block) < room:
            block = self._blocks[key] = torch.empty(room + room // 16 + 1024, dtype=torch.uint8)
        position = PREFIX + len(note)
        if note:
            block[PREFIX:position] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
        for piece, tensors in zip(pieces, sources, strict=True):
            position += self._encode_piece(piece, tensors, block[position:], memory or self.residual, salt)
        self.frame_bytes += position - PREFIX - len(note)
        self.encode_s += time.perf_counter() - start
        return block, position - PREFIX

    def most_bytes(self, pieces: Sequence[Piece]) -> int:
        """That the frames of the pieces can have, on any rank."""
        return sum(piece.codec.max_frame_bytes(part.entries) for piece in pieces for part in piece.parts)

    def _encode_piece(
        self, piece: Piece, sources: list[torch.Tensor], out: torch.Tensor, memory: Residual, salt: str
    ) -> int:
        """Correct, convert, compress: one frame."""
        # Other random numbers for every step, rank and parameter, and the same ones in a repeated or resumed run.
        seed = (self.steps << 32) + zlib.crc32(f"{salt}{self.rank}:{piece.parts[0].key}".encode())
        codec, decay = piece.codec, piece.recipe.decay
        pairs = [memory.buffers(part.name, part.tensor) for part in piece.parts] if decay else []
        pairs = [(p.of(before), p.of(after)) for p, (before, after) in zip(piece.parts, pairs, strict=False)]
        if len(sources) == 1:
            old, new = pairs[0] if pairs else (None, None)
            length = codec.encode_into(sources[0], out, residual=old, residual_out=new, decay=decay, seed=seed)
        else:
            flat = torch.cat([s.reshape(-1) for s in sources])
            laid = torch.cat([before.reshape(-1) for before, _ in pairs]) if pairs else None
            length = codec.encode_into(flat, out, residual=laid, decay=decay, seed=seed, segments=piece.sizes)
            for (_, after), updated in zip(pairs, laid.split(piece.sizes) if laid is not None else (), strict=True):
                after.view(-1).copy_(updated)
        if self.measured is not None and memory is self.residual:
            self._measure(piece, sources, [before for before, _ in pairs], out[:length])
        if piece.recipe.mask and memory is self.residual:
            self._note_sent(piece, out[:length])
        return length

    def _measure(
        self, piece: Piece, sources: list[torch.Tensor], memories: list[torch.Tensor], frame: torch.Tensor
    ) -> None:
        """The error of a frame, against what was to be sent."""
        assert self.measured is not None
        decoded = codecs.decode(frame).reshape(-1).float().split(piece.sizes)
        for i, (part, sent) in enumerate(zip(piece.parts, decoded, strict=True)):
            wanted = sources[i].reshape(-1).float()
            if memories:
                wanted = wanted + piece.recipe.decay * memories[i].reshape(-1)
            share = len(frame) * part.size / max(1, sum(piece.sizes))
            squared, norm = float((wanted - sent).double().square().sum()), float(wanted.double().square().sum())
            self.measured.setdefault(part.name, Error()).add(squared, norm, share)
            for recipes, error in self.rivals.values():
                codec = recipe_of_tensor(part.name, part.tensor.numel(), recipes).codec
                frame_of_rival = codec.encode(wanted)
                other = codecs.decode(frame_of_rival)
                error.add(float((wanted - other).double().square().sum()), norm, len(frame_of_rival))

    def source(self, part: Part) -> torch.Tensor:
        """The part's entries, clipped, or the velocity that they add to."""
        chosen, tensor = self.recipe_of(part.name), part.tensor
        if chosen.clip:
            # By its size a tensor has a share of the allowed norm, and each rank has one of the mean's.
            limit = chosen.clip * self.scale * (tensor.numel() / self.total / self.world) ** 0.5
            norm = float(tensor.float().norm())
            tensor = tensor * (limit / norm) if norm > limit else tensor
        masks = recipe_of_tensor(part.name, tensor.numel(), self.recipes).mask
        return part.of(self.accelerated(part.name, tensor) if masks else tensor)

    def accelerated(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        factor = self.factors.get(name)
        return gradient if factor is None else self.velocity.push(name, gradient, factor)

    def _note_sent(self, piece: Piece, frame: torch.Tensor) -> None:
        """Which entries of each tensor this frame carries."""
        flat = codecs.decode(frame).reshape(-1) != 0
        for part, sent in zip(piece.parts, flat.split(piece.sizes), strict=True):
            if part.name in self.factors:
                self.velocity.mask(part.name, sent, part.lo)
            else:
                self._sent[part.name] = sent

    def take_sent(self) -> dict[str, torch.Tensor]:
        """Which entries this rank sent, of tensors whose recipe masks momentum."""
        sent, self._sent = self._sent, {}
        return sent

    # ── decoding ──

    def decode(
        self, rank: int, frames: np.ndarray, pieces: Sequence[Piece], targets: Sequence[torch.Tensor], weight: float,
        accumulate: bool,
    ) -> None:  # fmt: skip
        """Add this rank's frames, weighted, to the targets, or put them there."""
        start = time.perf_counter()
        try:
            split = headers.split(memoryview(frames))
            if len(split) != len(pieces):
                raise FrameError(f"{len(split)} frames, expected {len(pieces)}")
            for frame, piece, target in zip(split, pieces, targets, strict=True):
                header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
                if header.elements != sum(piece.sizes):
                    raise FrameError(
                        f"{header.elements} elements for {', '.join(piece.names)}, expected {sum(piece.sizes)}"
                    )
                self.finite &= not header.nonfinite
                codecs.decode_payload(header, payload, target, weight, accumulate)
        except FrameError as error:
            raise unusable(rank, error) from error
        self.decode_s += time.perf_counter() - start

    def average(self, pieces: Sequence[Piece], arrived: Sequence[tuple[int, np.ndarray]]) -> None:
        """Replace the tensors by the mean of the frames that these ranks sent."""
        targets = [piece.target() for piece in pieces]
        for i, (rank, frames) in enumerate(arrived):
            self.decode(rank, frames, pieces, targets, 1 / len(arrived), accumulate=i > 0)
        for piece, target in zip(pieces, targets, strict=True):
            if arrived:
                piece.put(target)

    # ── the end of a step ──

    def end_step(self) -> None:
        for memory in (self.residual, self.velocity):
            memory.commit() if self.finite else memory.rollback()
        self._sent.clear()
        self.finite = True
        self.steps += 1

    def abandon_step(self) -> None:
        self.residual.rollback()
        self.velocity.rollback()
        self._sent.clear()
        self.finite = True

    def rescale(self, scale: float) -> None:
        """Gradients come multiplied by `scale` from now on, as those of a scaled loss do."""
        if scale != self.scale:
            self.residual.rescale(scale / self.scale)
            self.velocity.rescale(scale / self.scale)
            self.scale = scale

    # ── what is kept ──

    def stats(self) -> dict[str, float]:
        return {"frame_bytes": self.frame_bytes, "encode_s": self.encode_s, "decode_s": self.decode_s}

    def state_dict(self) -> dict[str, Any]:
        """This rank's memories, by parameter name, of gradients that are not scaled."""
        memory = {name: e / self.scale for name, e in self.residual.memory.items()}
        velocity = {name: v.cpu() / self.scale for name, v in self.velocity.memory.items()}
        return {"steps": self.steps, "memory": memory, **({"velocity": velocity} if velocity else {})}

    def load_state_dict(self, state: dict[str, Any], names: set[str]) -> None:
        memory_in(state, names)
        self.residual.load_state_dict(state)
        self.velocity.memory = {name: v.float().clone() for name, v in state.get("velocity", {}).items()}
        self.steps = int(state.get("steps", 0))
        self.scale = 1.0


def unusable(rank: int, error: Exception) -> AggregateError:
    return AggregateError(
        f"rank {rank} sent what this rank cannot use ({error}): all ranks must have the same model, "
        f"the same spec and the same version of gradwire"
    )
