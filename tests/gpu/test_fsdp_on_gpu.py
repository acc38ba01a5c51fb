"""FSDP2's exchanges of gradients that lie on a GPU: coded there, over Gloo, and with the same bits as on the CPU.

FSDP2 itself needs NCCL and a GPU for each rank. So ranks that share one GPU call the exchanges as FSDP2 would.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from gradwire.aggregate.messages.device_messages import DeviceMessages
from gradwire.aggregate.transport.link import Link
from gradwire.fsdp.part_error_memory import PartErrorMemory
from gradwire.fsdp.shard_exchanges import ReplicaAllReduce, ShardReduceScatter
from gradwire.fsdp.shard_frames import ShardFrames
from gradwire.fsdp.shard_layout import ShardedShape, ShardLayout

WORLD = 3
SHAPES = [ShardedShape("large", (700, 300)), ShardedShape("small", (10, 30)), ShardedShape("bias", (7,))]
SIZES = {shape.name: torch.Size(shape.size) for shape in SHAPES}


def test_exchanges_on_the_gpu_are_those_of_the_cpu() -> None:
    in_ranks(same_bits)


def test_messages_with_an_infinity_are_made_on_the_cpu() -> None:
    in_ranks(infinity)


def in_ranks(work: Callable[[int, torch.device], None], device: str = "cuda:0") -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(in_group, (folder, work, device), WORLD)


def in_group(rank: int, folder: str, work: Callable[[int, torch.device], None], device: str) -> None:
    dist.init_process_group("gloo", f"file://{Path(folder) / 'store'}", rank=rank, world_size=WORLD)
    work(rank, torch.device(device))
    dist.barrier()
    dist.destroy_process_group()


class Exchanges:
    """Both exchanges of one rank, each with its error memory, on rows of one device."""

    def __init__(self, spec: str, device: torch.device, dtype: torch.dtype, memory: torch.dtype) -> None:
        self.layout, self.device, self.dtype = ShardLayout(SHAPES, WORLD), device, dtype
        self.frames = [ShardFrames(spec, SIZES, PartErrorMemory(memory)) for _ in range(2)]
        self.link = Link()
        self.scatter = ShardReduceScatter(self.frames[0], self.link)
        self.replicas = ReplicaAllReduce(self.frames[1], self.link)

    def step(self, seed: int, spoiled: bool = False) -> list[torch.Tensor]:
        """What this rank gets of both, in the host's memory."""
        generator = torch.Generator().manual_seed(seed * WORLD + self.link.rank)
        rows = torch.zeros(WORLD, self.layout.row, dtype=self.dtype)
        for row, places in zip(rows, self.layout.rows, strict=True):
            for place in places:
                size = place.row.stop - place.row.start
                row[place.row] = torch.randn(size, generator=generator).pow(3).to(self.dtype)
        if spoiled:
            rows[1, 5] = float("inf")
        rows = rows.to(self.device)
        out, shard = torch.empty_like(rows[0]), rows[1].clone()
        self.scatter("module", self.layout, rows, out, 1 / WORLD)
        self.replicas("module", self.layout, 1, shard, 1 / WORLD)
        for frames in self.frames:
            frames.end_step(frames.ledger.finite)
        return [out.cpu(), shard.cpu()]

    def memories(self) -> list[torch.Tensor]:
        return [e for frames in self.frames for e in frames.memory.state_dict().values()]


def same_bits(rank: int, device: torch.device) -> None:
    made = count_made()
    for dtype, memory in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        on_cpu, on_gpu = (Exchanges("co3", d, dtype, memory) for d in (torch.device("cpu"), device))
        for step in range(3):
            before = len(made)
            expected, found = on_cpu.step(step), on_gpu.step(step)
            assert len(made) - before >= WORLD  # one message to each other rank, and one to replicas
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b), (dtype, step, float((a - b).abs().max()))
        for a, b in zip(on_cpu.memories(), on_gpu.memories(), strict=True):
            assert torch.equal(a, b)
        for frames in on_gpu.frames:
            assert {e.device for e in frames.memory._memory.values()} == {device}


def infinity(rank: int, device: torch.device) -> None:
    exchanges = Exchanges("co3", device, torch.float32, torch.float32)
    exchanges.step(0)
    before = exchanges.memories()
    out, shard = exchanges.step(1, spoiled=rank == 2)
    assert torch.isfinite(out).all() == (rank != 1) and not torch.isfinite(shard).all()
    assert all(torch.equal(a, b) for a, b in zip(before, exchanges.memories(), strict=True))
    assert torch.isfinite(torch.cat(exchanges.step(2))).all()


def count_made() -> list[int]:
    """The lengths of the messages that kernels make from now on."""
    made: list[int] = []
    encode = DeviceMessages.encode

    def counting(self: DeviceMessages, *args: object) -> object:
        found = encode(self, *args)
        made.extend([found[1]] if found else [])
        return found

    DeviceMessages.encode = counting
    return made
