"""Compressed gradients for DistributedDataParallel, in one line:

    handle = gradwire.ddp.attach(ddp_model, "co3")

For every bucket that DDP hands us (`State.reduce`):
1. correct and encode: u = g + γe of each parameter becomes a frame; small parameters share one;
2. exchange: all frames of the bucket travel in one message, all-gathered while backward goes on;
3. decode: every rank decodes all ranks' frames, its own too, and averages them in rank order, so that the
   gradients are bit-identical everywhere;
4. after the last bucket the error memories are committed, or, if any rank sent a NaN or an infinity
   (GradScaler relies on them), rolled back on all ranks.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its hooks at run time.
import fnmatch
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from . import codecs, wire
from .aggregate.all_gather import PREFIX, AllGather, Ticket
from .catalogue import Recipe, recipe
from .correct.residual import Residual
from .errors import AggregateError, FrameError, GradwireError, SpecError

SMALL = 4096  # entries: parameters below this share a frame, each with its own step
Spec = str | Mapping[str, str]


@dataclass
class Piece:
    """What one frame carries: one large parameter, or all small ones of a bucket with the same recipe."""

    recipe: Recipe
    names: list[str]
    gradients: list[torch.Tensor]

    @property
    def count(self) -> int:
        return sum(g.numel() for g in self.gradients)


@dataclass
class Pending:
    """A bucket whose frames are under way."""

    buffer: torch.Tensor
    pieces: list[Piece]
    ticket: Ticket
    future: torch.futures.Future


class State:
    """All that the hook remembers. `State(spec, model)` and `hook` are the pair for `register_comm_hook`.

    Without the model, parameters are named by the order in which they first appear.
    """

    def __init__(
        self, spec: Spec, model: torch.nn.Module | None = None, process_group: dist.ProcessGroup | None = None
    ):
        self.recipes = _recipes(spec)
        self.group = process_group
        self.residual = Residual()
        self.steps = self.frame_bytes = self.dense_bytes = 0
        self._steps_before = 0  # of the run that was loaded: the other figures do not cover them
        self.encode_s = self.decode_s = self.wait_s = 0.0
        self._names: dict[int, str] = {}
        self._pending: list[Pending] = []
        self._messages: dict[tuple[int, int], torch.Tensor] = {}
        self._exchange: AllGather | None = None
        self._finite = True
        if model is not None:
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            for name, parameter in inner.named_parameters():
                self._names[id(parameter)] = name
                self._recipe_of(name)

    @property
    def exchange(self) -> AllGather:
        if self._exchange is None:
            self._exchange = AllGather(self.group)
        return self._exchange

    # ── the hook ──

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        try:
            pieces = self._pieces(bucket)
            key = (bucket.index(), bucket.buffer().numel())
            block, length = self._encode(key, pieces)
            ticket = self.exchange.start(key, block, length, lambda: _fingerprint(pieces))
            self._pending.append(Pending(bucket.buffer(), pieces, ticket, future))
            while self._pending and (bucket.is_last() or self.exchange.ready(self._pending[0].ticket)):
                self._finish(self._pending.pop(0))
            if bucket.is_last():
                self._end_step()
        except BaseException:
            self._abandon_step()
            raise
        return future

    def _pieces(self, bucket: dist.GradBucket) -> list[Piece]:
        if bucket.buffer().layout != torch.strided:
            raise GradwireError("sparse gradients are not supported: build the embedding with sparse=False")
        shared: dict[str, Piece] = {}
        single: list[Piece] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._name_of(parameter)
            chosen = self._recipe_of(name)
            if gradient.numel() >= SMALL or chosen.codec.stochastic:
                single.append(Piece(chosen, [name], [gradient]))
            else:
                piece = shared.setdefault(str(chosen), Piece(chosen, [], []))
                piece.names.append(name)
                piece.gradients.append(gradient)
        return [*shared.values(), *single]

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names.setdefault(id(parameter), f"parameter{len(self._names)}")

    def _recipe_of(self, name: str) -> Recipe:
        for pattern, chosen in self.recipes.items():
            if fnmatch.fnmatchcase(name, pattern):
                return chosen
        raise SpecError(f"no pattern matches parameter {name!r}: add a last entry '*' (its spec may be 'none')")

    def _encode(self, key: tuple[int, int], pieces: list[Piece]) -> tuple[torch.Tensor, int]:
        start = time.perf_counter()
        room = PREFIX + sum(p.recipe.codec.max_frame_bytes(g) for p in pieces for g in p.gradients)
        block = self._messages.get(key)
        if block is None or len(block) < room:
            block = self._messages[key] = torch.empty(room + room // 16 + 1024, dtype=torch.uint8)
        position = PREFIX
        for piece in pieces:
            position += self._encode_piece(piece, block[position:])
            self.dense_bytes += 4 * piece.count
        self.frame_bytes += position - PREFIX
        self.encode_s += time.perf_counter() - start
        return block, position - PREFIX

    def _encode_piece(self, piece: Piece, out: torch.Tensor) -> int:
        """Correct, convert, compress: one frame."""
        # Other random numbers for every step, rank and parameter, and the same ones in a repeated or resumed run.
        seed = (self.steps << 32) + zlib.crc32(f"{self.exchange.rank}:{piece.names[0]}".encode())
        codec, decay = piece.recipe.codec, piece.recipe.decay
        pairs = (
            [self.residual.buffers(n, g) for n, g in zip(piece.names, piece.gradients, strict=True)] if decay else []
        )
        if len(piece.gradients) == 1:
            before, after = pairs[0] if pairs else (None, None)
            return codec.encode_into(
                piece.gradients[0], out, residual=before, residual_out=after, decay=decay, seed=seed
            )
        flat = torch.cat([g.reshape(-1) for g in piece.gradients])
        before = torch.cat([b.reshape(-1) for b, _ in pairs]) if pairs else None
        sizes = [g.numel() for g in piece.gradients]
        length = codec.encode_into(flat, out, residual=before, decay=decay, seed=seed, segments=sizes)
        if before is not None:
            for (_, after), updated in zip(pairs, before.split(sizes), strict=True):
                after.view(-1).copy_(updated)
        return length

    def _finish(self, pending: Pending) -> None:
        start = time.perf_counter()
        messages = self.exchange.finish(pending.ticket)
        arrived = time.perf_counter()
        for rank, message in enumerate(messages):
            self._decode(rank, message, pending.pieces)
        self.wait_s += arrived - start
        self.decode_s += time.perf_counter() - arrived
        pending.future.set_result(pending.buffer)

    def _end_step(self) -> None:
        if self._finite:
            self.residual.commit()
        else:
            self.residual.rollback()
        self._finite = True
        self.steps += 1

    def _decode(self, rank: int, message: np.ndarray, pieces: list[Piece]) -> None:
        """Add this rank's frames, divided by the number of ranks, to the gradients."""
        weight, accumulate = 1 / self.exchange.world, rank > 0
        try:
            frames = wire.split(memoryview(message))
            if len(frames) != len(pieces):
                raise FrameError(f"{len(frames)} frames, expected {len(pieces)}")
            for frame, piece in zip(frames, pieces, strict=True):
                header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
                if header.elements != piece.count:
                    raise FrameError(f"{header.elements} elements for {', '.join(piece.names)}, expected {piece.count}")
                self._finite &= not header.nonfinite
                if len(piece.gradients) == 1:
                    codecs.decode_payload(header, payload, piece.gradients[0], weight, accumulate)
                else:
                    _decode_small(header, payload, piece.gradients, weight, accumulate)
        except FrameError as error:
            raise AggregateError(
                f"rank {rank} sent what this rank cannot use ({error}): all ranks must have the same model, "
                f"the same spec and the same version of gradwire"
            ) from error

    def _abandon_step(self) -> None:
        self._pending.clear()
        self.residual.rollback()
        self._finite = True

    # ── what users see ──

    def stats(self) -> dict[str, float]:
        """Totals of this rank since it was attached (or loaded); `ratio` is fp32 over frames."""
        sent = self._exchange.bytes_sent if self._exchange else 0
        return {
            "steps": self.steps - self._steps_before,
            "frame_bytes": self.frame_bytes,
            "wire_bytes_sent": sent,
            "wire_bytes_received": sent,  # an all-gather brings as much from the peers as it takes to them
            "dense_bytes": self.dense_bytes,
            "ratio": self.dense_bytes / self.frame_bytes if self.frame_bytes else 1.0,
            "encode_s": self.encode_s,
            "decode_s": self.decode_s,
            "wait_s": self.wait_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's error memory, by parameter name."""
        return {"steps": self.steps, **self.residual.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = set(self._names.values())
        unknown = sorted(set(state.get("memory", {})) - known) if known else []
        if unknown:
            raise GradwireError(f"error memory of parameters that the model does not have: {', '.join(unknown[:5])}")
        self.residual.load_state_dict(state)
        self.steps = self._steps_before = int(state.get("steps", 0))


def _decode_small(
    header: wire.Header, payload: np.ndarray, gradients: list[torch.Tensor], weight: float, accumulate: bool
) -> None:
    flat = torch.empty(header.elements, dtype=gradients[0].dtype)
    codecs.decode_payload(header, payload, flat, weight)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        shaped = part.view(gradient.shape).to(gradient.device)
        if accumulate:
            gradient.add_(shaped)
        else:
            gradient.copy_(shaped)


def _fingerprint(pieces: list[Piece]) -> int:
    """A number that differs where ranks would send different parameters, or code them differently."""
    text = ";".join(f"{p.recipe}:{p.names}:{[tuple(g.shape) for g in p.gradients]}" for p in pieces)
    return zlib.crc32(text.encode())


def _recipes(spec: Spec) -> dict[str, Recipe]:
    if isinstance(spec, str):
        return {"*": recipe(spec)}
    if not isinstance(spec, Mapping) or not spec:
        raise SpecError("a spec is a string, or a dict from patterns of parameter names to strings")
    if not all(isinstance(pattern, str) for pattern in spec):
        raise SpecError("the patterns of a dict spec are strings such as '*.bias'")
    return {pattern: recipe(s) for pattern, s in spec.items()}


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The DDP communication hook that goes with `State`."""
    return state.reduce(bucket)


class _Slot:
    """DDP takes one hook for life; what the hook does can change."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.state: State | None = None


def _slot_hook(slot: _Slot, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return allreduce_hook(slot.group, bucket) if slot.state is None else slot.state.reduce(bucket)


class Handle:
    """What `attach` returns."""

    def __init__(self, slot: _Slot, state: State):
        self._slot, self.state = slot, state

    def stats(self) -> dict[str, float]:
        return self.state.stats()

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)

    def detach(self) -> None:
        """Back to plain all-reduce; the model can be attached again."""
        if self._slot.state is self.state:
            self._slot.state = None


def attach(model: DistributedDataParallel, spec: Spec = "co3") -> Handle:
    """Compress the gradients of a DDP model. `spec` is a recipe, or a dict from name patterns to recipes."""
    if not isinstance(model, DistributedDataParallel):
        raise GradwireError(f"attach needs a DistributedDataParallel model, got {type(model).__name__}: wrap it first")
    state = State(spec, model, model.process_group)
    slot = getattr(model, "_gradwire_slot", None)
    if slot is None:
        slot = _Slot(model.process_group)
        model.register_comm_hook(slot, _slot_hook)
        object.__setattr__(model, "_gradwire_slot", slot)  # not a parameter, not a module
    slot.state = state
    return Handle(slot, state)
