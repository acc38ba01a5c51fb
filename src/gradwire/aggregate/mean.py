"""The mean over all ranks of named tensors, through frames: what DDP and LocalSGD share.

1. `start`: correct and encode (u = g + γe becomes a frame; small tensors share one), and send the frames;
2. `finish`: every rank decodes all ranks' frames, its own too, and averages them in rank order, so that the
   result, which replaces the tensors, is bit-identical everywhere;
3. `end_step`: error memories are committed, or, if any rank sent a NaN or an infinity, rolled back on all.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import codecs, wire
from ..correct.momentum import Factor, Velocity
from ..correct.residual import Residual
from ..errors import AggregateError, FrameError, GradwireError
from ..recipe import Recipe, budget_parts
from .all_gather import PREFIX, AllGather, Ticket
from .pieces import Named, Piece, Recipes, Spec, divide, fingerprint, own_recipe, parse_spec, recipe_of


@dataclass
class Pending:
    """Tensors whose frames are under way."""

    pieces: list[Piece]
    ticket: Ticket


class Mean:
    def __init__(self, spec: Spec, group: dist.ProcessGroup | None = None):
        self.recipes = parse_spec(spec)
        self.group = group
        self.residual, self.velocity = Residual(), Velocity()
        self.factors: dict[str, Factor] = {}  # of the parameters whose momentum is ours
        self.steps = self.frame_bytes = 0
        self.clock: int | None = None  # what schedules go by, where it is not the number of exchanges
        self.encode_s = self.decode_s = self.wait_s = 0.0
        self.total = 1  # entries of the whole model, for clipping
        self.parts: dict[str, float] = {}  # of the model's budget, for each tensor that has not its share by size
        self.finite = True  # what all ranks sent in this step
        self._exchange: AllGather | None = None
        self._messages: dict[Hashable, torch.Tensor] = {}
        self._sent: dict[str, torch.Tensor] = {}

    @property
    def exchange(self) -> AllGather:
        if self._exchange is None:
            self._exchange = AllGather(self.group)
        return self._exchange

    def recipe_of(self, name: str) -> Recipe:
        return recipe_of(name, self.recipes)

    @property
    def flushing(self) -> Recipes:
        """The recipes of a last exchange, if any asks for one; error memories go on under their names."""
        if not any(chosen.flush for chosen in self.recipes.values()):
            return {}
        return {pattern: chosen.last or chosen for pattern, chosen in self.recipes.items()}

    def know_model(self, tensors: Named) -> None:
        """What has to be known of the whole model: its size, and every tensor's part of the budget."""
        sizes = {name: t.numel() for name, t in tensors}
        self.total = sum(sizes.values())
        self.parts = budget_parts(sizes, {name: own_recipe(name, d, self.recipes) for name, d in sizes.items()})

    # ── one step ──

    def start(
        self, key: Hashable, tensors: Named, note: bytes = b"", send: bool = True, flush: bool = False
    ) -> Pending:
        """Encode and send the tensors (or only receive), and before them a note of this rank."""
        recipes = self.flushing if flush else self.recipes
        pieces = divide(tensors, recipes, self.steps if self.clock is None else self.clock, self.parts)
        block, length = self._encode(key, pieces if send else [], note)
        return Pending(pieces, self.exchange.start(key, block, length, lambda: fingerprint(pieces)))

    def ready(self, pending: Pending) -> bool:
        return self.exchange.ready(pending.ticket)

    def finish(self, pending: Pending) -> None:
        """Replace the tensors by their means."""
        messages = self.wait(pending)
        self.average(pending, messages)

    def wait(self, pending: Pending) -> list[np.ndarray]:
        start = time.perf_counter()
        messages = self.exchange.finish(pending.ticket)
        self.wait_s += time.perf_counter() - start
        return messages

    def average(self, pending: Pending, messages: Sequence[np.ndarray | None]) -> None:
        """Replace the tensors by the mean of what stands in the messages; None for a rank that sent nothing."""
        start = time.perf_counter()
        given = [(rank, message) for rank, message in enumerate(messages) if message is not None]
        targets = [piece.target() for piece in pending.pieces]
        for i, (rank, message) in enumerate(given):
            self._decode(rank, message, pending.pieces, targets, 1 / len(given), accumulate=i > 0)
        for piece, target in zip(pending.pieces, targets, strict=True):
            if given:
                piece.put(target)
        for piece in pending.pieces if self.factors else ():
            if not piece.recipe.mask:  # momentum after the exchange, as the optimizer itself would have it
                for name, tensor in zip(piece.names, piece.tensors, strict=True):
                    tensor.copy_(self._accelerated(name, tensor))
        self.decode_s += time.perf_counter() - start

    def end_step(self) -> None:
        for memory in (self.residual, self.velocity):
            memory.commit() if self.finite else memory.rollback()
        self._sent.clear()
        self.finite = True
        self.steps += 1
        self.exchange.step = self.steps
        self.exchange.roll_call.at(self.steps, "computes")

    def abandon_step(self) -> None:
        self.residual.rollback()
        self.velocity.rollback()
        self._sent.clear()
        self.finite = True

    # ── encoding ──

    def _encode(self, key: Hashable, pieces: list[Piece], note: bytes) -> tuple[torch.Tensor, int]:
        start = time.perf_counter()
        room = PREFIX + len(note) + sum(p.codec.max_frame_bytes(t) for p in pieces for t in p.tensors)
        block = self._messages.get(key)
        if block is None or len(block) < room:
            block = self._messages[key] = torch.empty(room + room // 16 + 1024, dtype=torch.uint8)
        position = PREFIX + len(note)
        block[PREFIX:position] = torch.frombuffer(bytearray(note), dtype=torch.uint8) if note else 0
        for piece in pieces:
            position += self._encode_piece(piece, block[position:])
        self.frame_bytes += position - PREFIX - len(note)
        self.encode_s += time.perf_counter() - start
        return block, position - PREFIX

    def _encode_piece(self, piece: Piece, out: torch.Tensor) -> int:
        """Correct, convert, compress: one frame."""
        # Other random numbers for every step, rank and parameter, and the same ones in a repeated or resumed run.
        seed = (self.steps << 32) + zlib.crc32(f"{self.exchange.rank}:{piece.names[0]}".encode())
        codec, decay = piece.codec, piece.recipe.decay
        sources = [self._source(piece, name, tensor) for name, tensor in zip(piece.names, piece.tensors, strict=True)]
        pairs = [self.residual.buffers(n, s) for n, s in zip(piece.names, sources, strict=True)] if decay else []
        if len(sources) == 1:
            before, after = pairs[0] if pairs else (None, None)
            length = codec.encode_into(sources[0], out, residual=before, residual_out=after, decay=decay, seed=seed)
        else:
            flat = torch.cat([s.reshape(-1) for s in sources])
            before = torch.cat([b.reshape(-1) for b, _ in pairs]) if pairs else None
            length = codec.encode_into(flat, out, residual=before, decay=decay, seed=seed, segments=piece.sizes)
            if before is not None:
                for (_, after), updated in zip(pairs, before.split(piece.sizes), strict=True):
                    after.view(-1).copy_(updated)
        if piece.recipe.mask:
            self._note_sent(piece, out[:length])
        return length

    def _source(self, piece: Piece, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, clipped, or the velocity that it adds to; on the CPU."""
        # Native kernels after a copy are faster than plain torch on a GPU, and error memory stays where they are.
        tensor = tensor.cpu()
        clip = self.recipe_of(name).clip
        if clip:
            # By its size a tensor has a share of the allowed norm, and each rank has one of the mean's.
            limit = clip * (tensor.numel() / self.total / self.exchange.world) ** 0.5
            norm = float(tensor.float().norm())
            tensor = tensor * (limit / norm) if norm > limit else tensor
        return self._accelerated(name, tensor) if piece.recipe.mask else tensor

    def _accelerated(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        factor = self.factors.get(name)
        return gradient if factor is None else self.velocity.push(name, gradient, factor)

    def _note_sent(self, piece: Piece, frame: torch.Tensor) -> None:
        """Which entries of each tensor this frame carries."""
        flat = codecs.decode(frame).reshape(-1) != 0
        for name, sent in zip(piece.names, flat.split(piece.sizes), strict=True):
            if name in self.factors:
                self.velocity.mask(name, sent)
            else:
                self._sent[name] = sent

    def take_sent(self) -> dict[str, torch.Tensor]:
        """Which entries this rank sent, of tensors whose recipe masks momentum."""
        sent, self._sent = self._sent, {}
        return sent

    # ── decoding ──

    def _decode(
        self, rank: int, message: np.ndarray, pieces: list[Piece], targets: list[torch.Tensor], weight: float,
        accumulate: bool,
    ) -> None:  # fmt: skip
        """Add this rank's frames, weighted, to the targets."""
        try:
            frames = wire.split(memoryview(message))
            if len(frames) != len(pieces):
                raise FrameError(f"{len(frames)} frames, expected {len(pieces)}")
            for frame, piece, target in zip(frames, pieces, targets, strict=True):
                header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
                if header.elements != sum(piece.sizes):
                    raise FrameError(
                        f"{header.elements} elements for {', '.join(piece.names)}, expected {sum(piece.sizes)}"
                    )
                self.finite &= not header.nonfinite
                codecs.decode_payload(header, payload, target, weight, accumulate)
        except FrameError as error:
            raise AggregateError(
                f"rank {rank} sent what this rank cannot use ({error}): all ranks must have the same model, "
                f"the same spec and the same version of gradwire"
            ) from error

    # ── what is kept ──

    def stats(self) -> dict[str, float]:
        return {
            "frame_bytes": self.frame_bytes,
            "wire_bytes_sent": self._exchange.bytes_sent if self._exchange else 0,
            "wire_bytes_received": self._exchange.bytes_received if self._exchange else 0,
            "encode_s": self.encode_s,
            "decode_s": self.decode_s,
            "wait_s": self.wait_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's memories, by parameter name."""
        velocity = {name: v.detach().cpu().clone() for name, v in self.velocity.memory.items()}
        return {"steps": self.steps, **self.residual.state_dict(), **({"velocity": velocity} if velocity else {})}

    def load_state_dict(self, state: dict[str, Any], names: set[str]) -> None:
        unknown = sorted(set(state.get("memory", {})) - names) if names else []
        if unknown:
            raise GradwireError(f"error memory of parameters that the model does not have: {', '.join(unknown[:5])}")
        self.residual.load_state_dict(state)
        self.velocity.memory = {name: v.float().clone() for name, v in state.get("velocity", {}).items()}
        self.steps = int(state.get("steps", 0))
