"""The description of a message that its kernels read: tensors, streams, frames and who works on what, on the device.

It depends on converters, shapes and dtypes, which stay the same from step to step. What changes in each step are the
addresses of gradients and memories, decays and seeds: these are the first part, which is copied anew each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments
from gradwire.frame import headers
from gradwire.frame.byte_fields import varint
from gradwire.gpu.families import Batch, Bytes, Family, FramePieces, FrameTask
from gradwire.gpu.structures import (
    BYTES,
    FIT,
    FRAME,
    GROUP,
    JOB,
    LENGTH,
    SAMPLE,
    SLAB,
    STATUS,
    STREAM,
    STREAM_,
    SYMBOLS,
    TENSOR,
    TILE,
    TOLD_ANEW,
    WHERE,
)  # fmt: skip
from gradwire.gpu.workspace import Workspace, host_bytes

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FEW = 32  # symbols: streams with no more of them are chosen for by a kernel of their own
BITS_PER_CHUNK, BITS_PER_MEDIUM_CHUNK, MEDIUM = 2048 * 64, 1280 * 64, 1 << 22  # as in sources/coding.cu


def aligned(size: int, to: int = 16) -> int:
    """Return the size, rounded up to a multiple of `to`."""
    return -(-size // to) * to


class Blob:
    """Bytes that are laid out on the host and copied to the device as one."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[tuple[int, np.ndarray]] = []

    def add(self, array: np.ndarray) -> int:
        """Make room for an array, which may be filled until `write_to`, and return its offset."""
        offset = self.size
        self._parts.append((offset, array))
        self.size = aligned(offset + array.nbytes, 64)
        return offset

    def write_to(self, buffer: torch.Tensor) -> None:
        """Write all arrays as they are now."""
        view = buffer.numpy()
        for offset, array in self._parts:
            view[offset : offset + array.nbytes] = array.view(np.uint8).reshape(-1)


class MessageLayout:
    """One kind of message on one device, for any number of steps."""

    def __init__(
        self, tasks: Sequence[FrameTask], families: Sequence[Family], workspace: Workspace, formats: dict[int, int]
    ):
        self.workspace, self.device = workspace, workspace.device
        self._formats, self._families = formats, list(families)
        self._describe(tasks, families)
        self._version = -1

    # ── what stays ──

    def _describe(self, tasks: Sequence[FrameTask], families: Sequence[Family]) -> None:
        pieces = [family.pieces(task) for task, family in zip(tasks, families, strict=True)]
        tensor_count = sum(len(task.tensors) for task in tasks)
        self.tensors = np.zeros(tensor_count, TENSOR)
        self.frames = np.zeros(len(tasks), FRAME)
        self.streams = np.zeros(sum(len(p.streams) for p in pieces), STREAM_)
        self._templates: list[tuple[int, int, Bytes]] = []  # (frame, piece, what it is)
        self._places: dict[Family, list[int]] = {}
        where_pieces: list[tuple[int, int]] = []
        tensor = stream = symbol = part = tile = 0
        self._own: list[int] = []
        for i, (task, family, description) in enumerate(zip(tasks, families, pieces, strict=True)):
            self._describe_frame(i, task, description, stream)
            where_pieces.append((i, -1))
            where_pieces += [(i, k | slab << 8) for k, p in enumerate(description.pieces) for slab in range(_slabs(p))]
            first_tensor, first_symbol = tensor, symbol
            for k, t in enumerate(task.tensors):
                row, count = self.tensors[tensor], t.gradient.numel()
                row["count"], row["first"], row["frame"], row["stream"] = count, symbol, i, stream
                row["dtype"], row["parts"] = DTYPES[task.dtype], family.parts(count)
                row["tiles"], row["first_part"], row["first_tile"] = -(-count // TILE), part, tile
                self._own.append(description.own[k] if description.own else 0)
                self._places.setdefault(family, []).append(tensor)
                part, tile = part + int(row["parts"]), tile + int(row["tiles"])
                tensor, symbol = tensor + 1, symbol + count
            symbol = aligned(symbol)
            for plan in description.streams:
                row = self.streams[stream]
                row["count"] = task.count if plan.most is None else plan.most
                row["alphabet"], row["zero"], row["coder"], row["models"] = (
                    plan.alphabet, plan.zero, plan.coder, plan.models,
                )  # fmt: skip
                row["first_tensor"], row["tensors"] = first_tensor, len(task.tensors)
                row["symbols"] = first_symbol  # an offset as yet
                row["frame"], row["most_chunks"] = i, _most_chunks(int(row["count"]), plan.alphabet)
                stream += 1
        self.symbol_count, self.part_count, self.tile_count = symbol, part, tile
        self.chunks = pairs(self.streams["most_chunks"])
        self.pieces = np.array(where_pieces, dtype=WHERE)

    def _describe_frame(self, i: int, task: FrameTask, description: FramePieces, first_stream: int) -> None:
        row = self.frames[i]
        kind, tensor = description.wire_id | description.flags << 4, DTYPES[task.dtype] | len(task.shape) << 4
        row["start"] = np.frombuffer(headers.MAGIC + bytes([headers.VERSION, kind, tensor]), dtype=np.uint8)
        shape = b"".join(varint(d) for d in task.shape)
        row["shape_length"] = len(shape)
        row["shape"][: len(shape)] = np.frombuffer(shape, dtype=np.uint8)
        row["count"], row["pieces"] = task.count, len(description.pieces)
        for k, piece in enumerate(description.pieces):
            if isinstance(piece, Bytes):
                row["piece"][k]["kind"], row["piece"][k]["length"] = BYTES, len(piece.template)
                self._templates.append((i, k, piece))
            else:
                row["piece"][k]["kind"] = STREAM if piece >= 0 else LENGTH
                row["piece"][k]["stream"] = first_stream + (piece if piece >= 0 else ~piece)

    # ── what is on the device ──

    def _place(self, tasks: Sequence[FrameTask]) -> None:
        """Lay everything out on the device; again whenever the workspace has grown."""
        at = self._take_rooms()
        self._place_tensors(tasks, at)
        frames, streams = self.frames.copy(), self.streams.copy()
        static, lists = Blob(), self._lists_of_work()
        offsets = self._add_what_stays(static, frames, streams)
        template_offsets = [
            static.add(np.frombuffer(b.template, np.uint8)) if b.template else -1 for _, _, b in self._templates
        ]
        list_offsets = {family: [static.add(where) for where in of_family] for family, of_family in lists.items()}
        self._static = torch.empty(static.size, dtype=torch.uint8, device=self.device)
        base = self._static.data_ptr()
        at |= {name: base + offset for name, offset in offsets.items()}
        self._place_streams(streams, at)
        self._place_templates(frames, [base + offset if offset >= 0 else 0 for offset in template_offsets], at)
        host = host_bytes(static.size, torch.device("cpu"))
        static.write_to(host)
        self._static.copy_(host)
        self._frames_at = offsets["frames"]
        self._place_what_changes()
        self._write_job(at)
        self._plan_launches(lists, list_offsets)

    def _take_rooms(self) -> dict[str, int]:
        """Take what kernels need between two launches from the workspace, and return where it is."""
        sizes = {
            "symbols": self.symbol_count + 16,
            "samples": 4 * int(sum(min(int(n), SAMPLE) + 16 for n in self.tensors["count"])),
            "partial": 256 * self.part_count,
            "tile_sums": 32 * self.tile_count,
            "coded": sum(map(_coded_room, self.streams)),
            "own": sum(aligned(size, 256) for size in self._own) + 256,
            "templates": sum(aligned(max(len(b.template), b.most)) for _, _, b in self._templates) + 16,
        }
        at = {name: self.workspace.room(name, size).data_ptr() for name, size in sizes.items()}
        self._version = self.workspace.version
        return at

    def _place_tensors(self, tasks: Sequence[FrameTask], at: dict[str, int]) -> None:
        """Tell tensors where their samples and the scratch of their families are."""
        sample, own = at["samples"], at["own"]
        for row, size, task_format in zip(self.tensors, self._own, self._formats_of(tasks), strict=True):
            row["sample"], row["format"], row["own"] = sample, task_format, own
            sample += 4 * aligned(min(int(row["count"]), SAMPLE), 4)
            own += aligned(size, 256)

    def _add_what_stays(self, static: Blob, frames: np.ndarray, streams: np.ndarray) -> dict[str, int]:
        """Add what every message of this kind needs, and return the offsets. Frames and streams are filled in later."""
        chunk_total = int(self.streams["most_chunks"].sum())
        arrays: dict[str, np.ndarray] = {
            "counts": np.zeros(SYMBOLS * len(self.streams), np.uint64),
            "lengths": np.zeros(chunk_total, np.uint32),
            "offsets": np.zeros(chunk_total, np.uint64),
            "fits": np.zeros(len(self.tensors), FIT),
            "frames": frames,
            "streams": streams,
            "chunks": self.chunks,
            "pieces": self.pieces,
        }
        return {name: static.add(array) for name, array in arrays.items()}

    def _lists_of_work(self) -> dict[Family, list[np.ndarray]]:
        """Return which parts, tiles and groups of tiles the kernels of each family work on."""
        works = self.tensors["parts"], self.tensors["tiles"], -(-self.tensors["tiles"] // GROUP)
        return {family: [pairs(work, rows) for work in works] for family, rows in self._places.items()}

    def _place_streams(self, streams: np.ndarray, at: dict[str, int]) -> None:
        """Tell streams where their symbols, counts, chunks and coded bytes are."""
        coded, chunk = aligned(at["coded"]), 0
        for i, row in enumerate(streams):
            row["symbols"] = at["symbols"] + int(self.streams[i]["symbols"])
            row["counts"], row["coded"] = at["counts"] + 8 * SYMBOLS * i, coded
            row["lengths"], row["offsets"] = at["lengths"] + 4 * chunk, at["offsets"] + 8 * chunk
            row["format"] = self.tensors[int(row["first_tensor"])]["format"]
            chunk += int(row["most_chunks"])
            coded += _coded_room(row)

    def _place_templates(self, frames: np.ndarray, templates: Sequence[int], at: dict[str, int]) -> None:
        """Tell frames where the bytes of their pieces are, and tensors where to state their steps.

        `templates` are addresses, 0 where there is no template: a kernel writes such a piece to scratch.
        """
        scratch = at["templates"]
        for (frame, k, piece), address in zip(self._templates, templates, strict=True):
            frames[frame]["piece"][k]["bytes"] = address or scratch
            if not address:
                scratch += aligned(piece.most)
            rows = np.flatnonzero(self.tensors["frame"] == frame)
            for tensor, step in zip(rows, piece.steps, strict=False):
                self.tensors[tensor]["step_at"] = address + step

    def _place_what_changes(self) -> None:
        """Make room for what is copied for every message: status, tensors, and the job itself.

        Tensors and job are written to that room from now on, in memory from which the device copies them.
        """
        dynamic = Blob()
        self._status_at, tensors_at = dynamic.add(np.zeros(1, STATUS)), dynamic.add(self.tensors)
        self._job_at = dynamic.add(np.zeros(1, JOB))
        self._dynamic = torch.zeros(dynamic.size, dtype=torch.uint8, device=self.device)
        self._host = host_bytes(dynamic.size, self.device)
        self.status = host_bytes(STATUS.itemsize, self.device)
        self._status_here = self._dynamic[self._status_at : self._status_at + STATUS.itemsize]
        view, start = self._host.numpy(), self._dynamic.data_ptr()
        tensors = view[tensors_at : tensors_at + self.tensors.nbytes].view(TENSOR)
        tensors[:] = self.tensors
        self.tensors, self.job = tensors, view[self._job_at : self._job_at + JOB.itemsize].view(JOB)
        self._told_anew = tensors.view(np.uint64).reshape(len(tensors), -1)[:, :TOLD_ANEW]
        self.job[0]["tensors"], self.job[0]["status"] = start + tensors_at, start + self._status_at

    def _write_job(self, at: dict[str, int]) -> None:
        """Tell the job where everything is."""
        for name in ("fits", "streams", "frames", "chunks", "pieces", "partial", "tile_sums", "symbols"):
            self.job[0][name] = at[name]
        self.job[0]["stream_count"], self.job[0]["frame_count"] = len(self.streams), len(self.frames)
        self.job[0]["chunk_count"], self.job[0]["piece_count"] = len(self.chunks), len(self.pieces)

    def _plan_launches(self, lists: dict[Family, list[np.ndarray]], offsets: dict[Family, list[int]]) -> None:
        """Lay out all launches, and their arguments."""
        self.on_device = job = self._dynamic[self._job_at :]
        self.on_job = Arguments(job)
        self.launches = programs.Launches(self.device)
        self.batches: dict[Family, Batch] = {}
        for family, of_family in lists.items():
            parts, tiles, groups = (
                self._static[at : at + where.nbytes] for at, where in zip(offsets[family], of_family, strict=True)
            )
            most = int(self.tensors["count"][self._places[family]].max())
            longest = int(self.frames["count"][self.tensors["frame"][self._places[family]]].max())
            self.batches[family] = Batch(self.device, job, parts, tiles, groups, most, longest, self.launches)
            family.convert(self.batches[family])
        self._launch("choose_few", len(self.streams), 192)
        if int(self.streams["alphabet"].max()) > FEW:  # or there may be so many
            self._launch("choose", len(self.streams), 256)
        self._launch("encode_chunks", -(-len(self.chunks) // 2), 64)
        self._launch("lay_out", 1, 256)
        self._launch("place_all", len(self.pieces) + len(self.chunks), 160)

    def _launch(self, name: str, blocks: int, threads: int) -> None:
        self.launches.add("coding", name, blocks, threads, self.on_job)

    def _formats_of(self, tasks: Sequence[FrameTask]) -> list[int]:
        return [self._formats[id(task.converter)] for task in tasks for _ in task.tensors]

    # ── each step ──

    def prepare(self, tasks: Sequence[FrameTask], out: torch.Tensor, stamp: int = 0, everything: bool = False) -> None:
        """Tell the device where the tensors of this step are, and where the message goes."""
        if self._version != self.workspace.version:
            self._place(tasks)
        fields: list[int] = []
        for task, family in zip(tasks, self._families, strict=True):
            told = family.told(task) & 0xFFFFFFFFFFFFFFFF
            for t in task.tensors:
                fields += (
                    t.gradient.data_ptr(), 0 if t.before is None else t.before.data_ptr(),
                    0 if t.after is None else t.after.data_ptr(), told,
                )  # fmt: skip
        self._told_anew[:] = np.array(fields, np.uint64).reshape(-1, TOLD_ANEW)
        self.tensors["decay"] = [task.decay * t.factor for task in tasks for t in task.tensors]
        self.job["out"], self.job["room"] = out.data_ptr(), out.numel()
        self.job["stamp"], self.job["everything"] = stamp, everything
        self._dynamic.copy_(self._host, non_blocking=True)  # and zeros for the status

    def frame_lengths(self) -> list[int]:
        """Return how long the frames of the last message are; the host waits for it."""
        frames = self._static[self._frames_at : self._frames_at + self.frames.nbytes].cpu().numpy().view(FRAME)
        return [int(length) for length in frames["length"]]

    def fetch_status(self) -> None:
        """Copy the status to the host's memory; it is there when the stream has come so far."""
        self.status.copy_(self._status_here, non_blocking=True)


def _most_chunks(count: int, alphabet: int) -> int:
    """Return how many chunks so many symbols have at most.

    None takes more bits than a plain number. Where symbols often are plain numbers, which are cut into as many chunks
    as there may be, there are more, so that many warps have work.
    """
    bits = count * (8 if alphabet <= 4 else (alphabet - 1).bit_length())
    return bits // (BITS_PER_MEDIUM_CHUNK if count <= MEDIUM else BITS_PER_CHUNK) + 1


def _coded_room(stream: np.void) -> int:
    """Return how many bytes the coded chunks of a stream take at most, with what alignment and states cost."""
    return 2 * aligned(int(stream["count"]), 64) + (2 * 64 + 256) * (int(stream["most_chunks"]) + 1)


def _slabs(piece: Bytes | int) -> int:
    """Return how many blocks put a piece into the message."""
    return max(1, -(-max(len(piece.template), piece.most) // SLAB)) if isinstance(piece, Bytes) else 1


def pairs(counts: np.ndarray, rows: Sequence[int] | None = None) -> np.ndarray:
    """Return (row, 0), (row, 1) … (row, counts[row] − 1) of each row, one after the other."""
    rows_array = np.arange(len(counts)) if rows is None else np.asarray(rows)
    repeats = np.asarray(counts)[rows_array]
    pairs = np.zeros(int(repeats.sum()), WHERE)
    pairs["item"] = np.repeat(rows_array, repeats)
    starts = np.repeat(np.cumsum(repeats) - repeats, repeats)
    pairs["index"] = np.arange(len(pairs)) - starts
    return pairs
