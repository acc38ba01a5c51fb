"""The mean of the frames of all ranks, made on the device: headers, tables and checksums are read there too.

Whatever is unusual (a stored frame, a Huffman code, a damaged byte) makes the whole message one for the host, whose
decoder knows every frame and says what is wrong with a bad one.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gradwire.convert.conversion import Converter
from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments
from gradwire.gpu.encoder import family_of
from gradwire.gpu.families import Family
from gradwire.gpu.layout import DTYPES, Blob, aligned, pairs
from gradwire.gpu.structures import (
    ARRIVAL,
    COMBINED,
    DECODE_JOB,
    FORMAT_TABLE,
    MESSAGE,
    SLOTS,
    SOURCE,
    STATUS,
    TARGET,
    UNUSUAL,
    WHERE,
)  # fmt: skip
from gradwire.gpu.workspace import Workspace, host_bytes, make_room, recorded
from gradwire.models import gennorm_tables
from gradwire.small_float_formats import PRESETS

BLOCK_ENTRIES = 1 << 17  # entries of a frame for each block that decodes it: some four chunks


@dataclass
class FrameTarget:
    """What one frame of every rank is about: the tensors, in the order of its segments, that get the mean."""

    converter: Converter
    tensors: Sequence[torch.Tensor]
    frame_dtype: torch.dtype | None = None  # of what was encoded, if the tensors have another

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that frames have."""
        return self.frame_dtype or self.tensors[0].dtype

    def __post_init__(self) -> None:
        """Find the number of entries of each tensor, and of all of them."""
        self.lengths = tuple([t.numel() for t in self.tensors])
        self.count = sum(self.lengths)


class Blocks(NamedTuple):
    """What there is to know about blocks of messages that nobody waits for (unattended.py)."""

    key: Hashable  # of layouts
    front: int  # bytes of a block before its frames
    report: int  # bytes that the host is told beside the status
    stamp: int  # what prefixes say


NO_BLOCKS = Blocks(None, 0, 0, 0)


@dataclass
class PendingMean:
    """A mean that is being made; `wait` returns when it is there."""

    status: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> bool:
        """Return whether the mean is there; if not, the host has to decode the messages."""
        if self.event is not None:
            self.event.synchronize()
        return not int(self.status.numpy().view(STATUS)[0]["bits"])


class MessageDecoder:
    """Averages messages of one device, one after the other, on the current stream of the calling thread.

    A result has to be waited for before the next one of the same layout is begun.
    """

    def __init__(self, device: torch.device):
        self.device, self.workspace = device, Workspace(device)
        self._layouts: dict[tuple[object, ...], DecodeLayout] = {}

    def average(
        self, frames: Sequence[FrameTarget], messages: Sequence[torch.Tensor], present: Sequence[Sequence[bool]],
        weight: float, adds: bool = False,
    ) -> PendingMean:  # fmt: skip
        """Write the sum of weight · message over all messages, in their order, to the tensors, or add it to them.

        `present` has a flag for each tensor of all frames, for each message: whether the message carries it.
        """
        layout = self.prepared(frames, messages, present, weight, adds)
        layout.launches.start()
        layout.fetch_status()
        return PendingMean(layout.status, recorded(self.device))

    def prepared(
        self, frames: Sequence[FrameTarget], messages: Sequence[torch.Tensor], present: Sequence[Sequence[bool]],
        weight: float, adds: bool = False, blocks: Blocks = NO_BLOCKS,
    ) -> DecodeLayout:  # fmt: skip
        """Return the layout of an exchange, which has been told where messages and tensors are.

        The messages may be blocks of messages that nobody waits for.
        """
        families = [family_of(frame.converter) for frame in frames]
        flags = tuple([bytes(row) for row in present])
        kind = (
            blocks.key,
            blocks.front,
            blocks.report,
            flags,
            *[
                (_alike(f, family), f.dtype, f.tensors[0].dtype, f.lengths)
                for f, family in zip(frames, families, strict=True)
            ],
        )
        layout = self._layouts.get(kind)
        if layout is None:
            make_room(self._layouts)
            layout = self._layouts[kind] = DecodeLayout(
                frames, families, flags, self.workspace, blocks  # type: ignore[arg-type]
            )  # fmt: skip
        layout.prepare(frames, messages, weight, adds, blocks.stamp)
        return layout


class DecodeLayout:
    """One kind of exchange on one device, for any number of steps."""

    def __init__(
        self, frames: Sequence[FrameTarget], families: Sequence[Family], present: Sequence[bytes],
        workspace: Workspace, blocks: Blocks,
    ):  # fmt: skip
        self.workspace, self.device, self.ranks = workspace, workspace.device, len(present)
        self._front, self._report_size = blocks.front, blocks.report
        self._version = -1
        self._kept = [frame.converter for frame in frames]  # so that no other converter gets its id
        sizes = [n for frame in frames for n in frame.lengths]
        self.targets = np.zeros(len(sizes), TARGET)
        self.targets["count"] = sizes
        sources = np.zeros((len(sizes), self.ranks), SOURCE)
        sources["arrival"] = -1
        arrivals: list[dict[str, int]] = []
        self._own: list[int] = []  # bytes of scratch for each arrival
        self._known: list[np.ndarray | None] = []  # what families say about each arrival
        self._lengths: list[int] = []  # of the segments of all arrivals
        self._of_family: dict[Family, list[int]] = {}
        for rank in range(self.ranks):
            index = target = 0
            for frame, family in zip(frames, families, strict=True):
                first = segment = 0
                lengths = []
                for tensor in frame.tensors:
                    if present[rank][target]:
                        sources[target][rank] = (len(arrivals), segment, first)
                        first, segment = first + tensor.numel(), segment + 1
                        lengths.append(tensor.numel())
                    target += 1
                if segment:
                    most, own = family.room_to_decode(frame.converter, first)
                    self._own.append(own)
                    arrivals.append({
                        "count": first, "most": most, "message": rank, "index": index, "segments": segment,
                        "codec": frame.converter.wire_id, "dtype": DTYPES[frame.dtype],
                    })  # fmt: skip
                    index += 1
                    self._known.append(family.arrival(frame.converter, lengths))
                    self._lengths += lengths
        target = 0
        for frame, family in zip(frames, families, strict=True):
            for tensor in frame.tensors:
                self.targets[target]["dtype"] = DTYPES[tensor.dtype]
                self._of_family.setdefault(family, []).append(target)
                target += 1
        self.sources = sources
        self.arrivals = np.zeros(len(arrivals), ARRIVAL)
        for row, values in zip(self.arrivals, arrivals, strict=True):
            for name, value in values.items():
                row[name] = value
        self._silent = sorted({*range(self.ranks)} - {a["message"] for a in arrivals})  # ranks without a frame
        most = max((a["count"] for a in arrivals), default=1)
        self.blocks = max(1, min(-(-most // BLOCK_ENTRIES), 1024))

    def _place(self) -> None:
        counts = [int(n) for n in self.arrivals["count"]]
        space = self.workspace
        room = {
            "arrived": sum(aligned(n, 256) for n in counts),
            "offsets": sum(8 * (n // 64 + 2) for n in counts),
            "tables": 4 * SLOTS * len(counts),
            "steps": sum(4 * int(n) for n in self.arrivals["segments"]),
            "own": sum(aligned(size, 256) for size in self._own),
        }
        at = {name: space.room(name, size).data_ptr() for name, size in room.items()}
        self._version = space.version
        for row, count, own in zip(self.arrivals, counts, self._own, strict=True):
            row["symbols"], row["offsets"], row["table"], row["steps"], row["own"] = (
                at["arrived"], at["offsets"], at["tables"], at["steps"], at["own"],
            )  # fmt: skip
            at["own"] += aligned(own, 256)
            at["arrived"] += aligned(count, 256)
            at["offsets"] += 8 * (count // 64 + 2)
            at["tables"] += 4 * SLOTS
            at["steps"] += 4 * int(row["segments"])
        tiles = -(-self.targets["count"] // COMBINED)
        lists = {family: pairs(tiles, rows) for family, rows in self._of_family.items()}
        static = Blob()
        arrivals_at, sources_at = static.add(self.arrivals), static.add(self.sources)
        lengths_at = static.add(np.array(self._lengths, np.uint64))
        known = {id(what): what for what in self._known if what is not None}  # ranks share what is the same
        known_at = {key: static.add(what) for key, what in known.items()}
        lists_at = {family: static.add(where) for family, where in lists.items()}
        self._static = torch.empty(static.size, dtype=torch.uint8, device=self.device)
        base = self._static.data_ptr()
        before = 0
        for row, what in zip(self.arrivals, self._known, strict=True):
            row["lengths"] = base + lengths_at + 8 * before
            before += int(row["segments"])
            if what is not None:
                row["own"] = base + known_at[id(what)]
        host = host_bytes(static.size, torch.device("cpu"))
        static.write_to(host)
        self._static.copy_(host)
        self.targets["sources"] = base + sources_at + np.arange(len(self.targets)) * self.ranks * SOURCE.itemsize
        dynamic = Blob()
        status_at, report_at = dynamic.add(np.zeros(1, STATUS)), dynamic.add(np.zeros(self._report_size, np.uint8))
        told = dynamic.size
        changing = (np.zeros(self.ranks, MESSAGE), self.targets, np.zeros(1, DECODE_JOB))
        messages_at, targets_at, job_at = (dynamic.add(array) for array in changing)
        self._dynamic = torch.zeros(dynamic.size, dtype=torch.uint8, device=self.device)
        self._host, self._told = host_bytes(dynamic.size, self.device), host_bytes(told, self.device)
        dynamic.write_to(self._host)
        view, start = self._host.numpy(), self._dynamic.data_ptr()
        # They are written to that memory from now on, from which the device copies them.
        self.messages, self.targets, self.job = (
            view[at : at + array.nbytes].view(array.dtype)
            for at, array in zip((messages_at, targets_at, job_at), changing, strict=True)
        )
        self._places_of_messages = self.messages.view(np.uint64).reshape(-1, 2)
        self._status_of_host = view[status_at : status_at + STATUS.itemsize].view(STATUS)
        self._told_here, self.report_on_device = self._dynamic[:told], self._dynamic[report_at:]
        self.status = self._told[status_at : status_at + STATUS.itemsize]
        self.report = self._told[report_at : report_at + self._report_size]
        self._formats = _format_tables(self.device)
        values = {
            "messages": start + messages_at, "arrivals": base + arrivals_at, "targets": start + targets_at,
            "status": start + status_at, "formats": self._formats.data_ptr(), "message_count": self.ranks,
            "arrival_count": len(self.arrivals), "target_count": len(self.targets),
        }  # fmt: skip
        for name, value in values.items():
            self.job[0][name] = value
        self.on_device = job = self._dynamic[job_at:]
        self._plan_launches(
            job, {family: self._static[lists_at[family] :][: where.nbytes] for family, where in lists.items()}
        )

    def _plan_launches(self, job: torch.Tensor, lists: dict[Family, torch.Tensor]) -> None:
        """Parse, check, decode and average; `lists` are the tiles of each family."""
        self.launches = launches = programs.Launches(self.device)
        frames, blocks = len(self.arrivals), len(self.arrivals) * self.blocks
        on_job, on_blocks = Arguments(job), Arguments(job, self.blocks)
        launches.add("decoding", "parse", frames, 256, on_job)
        launches.add("decoding", "check", blocks, 128, on_blocks)
        launches.add("decoding", "decode_chunks", blocks, 128, on_blocks)
        for family in lists:  # all of them before the first mean is written: they may find damage
            for program, kernel, threads, several in family.unpacks:
                launches.add(program, kernel, *((blocks, threads, on_blocks) if several else (frames, threads, on_job)))
        for family, tiles in lists.items():
            launches.add(*family.combines, len(tiles) // WHERE.itemsize, 256, Arguments(job, tiles))

    def prepare(
        self, frames: Sequence[FrameTarget], messages: Sequence[torch.Tensor], weight: float, adds: bool, stamp: int
    ) -> None:  # fmt: skip
        """Tell the device where the messages and the tensors of this step are."""
        if self._version != self.workspace.version:
            self._place()
        front = self._front
        self._places_of_messages[:] = [(m.data_ptr() + front, m.numel() - front) for m in messages]
        self.targets["out"] = [t.data_ptr() for frame in frames for t in frame.tensors]
        self.job["weight"], self.job["adds"], self.job["stamp"] = weight, adds, stamp
        self.job["room"] = messages[0].numel() if front else 0
        unseen = any(messages[rank].numel() - front for rank in self._silent)
        self._status_of_host["bits"] = UNUSUAL if unseen else 0  # nobody looks at these messages
        self._dynamic.copy_(self._host, non_blocking=True)

    def fetch_status(self) -> None:
        """Copy status and report to the host's memory; they are there when the stream has come so far."""
        self._told.copy_(self._told_here, non_blocking=True)


def _alike(frame: FrameTarget, family: Family | None) -> Hashable:
    assert family is not None, "the caller has asked can_encode"
    return family.alike(frame.converter, frame.count)


@functools.cache
def _format_tables(device: torch.device) -> torch.Tensor:
    """Return levels and masses of the float formats, by their number on the wire."""
    tables = np.zeros(len(PRESETS), FORMAT_TABLE)
    for row, fmt in zip(tables, PRESETS.values(), strict=True):
        row["alphabet"], row["zero"], row["magnitudes"] = fmt.symbols, fmt.zero_symbol, len(fmt.magnitudes)
        row["levels"][: fmt.symbols] = fmt.levels
        masses = gennorm_tables.masses(fmt)
        row["masses"][:, : masses.shape[1]] = masses
    return torch.from_numpy(tables.view(np.uint8).copy()).to(device)
