"""Launches that are laid out once, and started for any number of messages."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import FrameTask
from gradwire.gpu.unattended import FRONT, UnattendedMessages
from support.device_frames import HOST, encode, frame_task, tensor_tasks

pytestmark = pytest.mark.usefixtures("kernels_on_cpu")
SIZES, ALONE = (500, 20_001), (60_000,)


def tasks_of(spec: str, sizes: tuple[int, ...], seed: int) -> list[FrameTask]:
    torch.manual_seed(seed)
    tasks = [frame_task(spec, [tensor]) for tensor in tensor_tasks(sizes)]
    for task in tasks:
        task.seed = seed
    return tasks


@pytest.mark.parametrize("spec", ["co3", "ecq", "sbc", "qsgd"])
def test_later_messages_are_those_of_a_new_encoder(spec: str) -> None:
    """With other tensors, seeds and places, and after the workspace has grown for a longer message."""
    encoder, decoder = MessageEncoder(HOST), MessageDecoder(HOST)
    for seed, sizes in enumerate((SIZES, SIZES, ALONE, SIZES)):
        tasks, again = tasks_of(spec, sizes, seed), tasks_of(spec, sizes, seed)
        frames = encode(tasks, encoder)
        assert frames == encode(again)
        for task, other in zip(tasks, again, strict=True):
            assert torch.equal(task.tensors[0].after, other.tensors[0].after)  # type: ignore[arg-type]
        message = torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8)
        means = [torch.full((n,), float("nan")) for n in sizes]
        targets = [FrameTarget(task.converter, [mean]) for task, mean in zip(tasks, means, strict=True)]
        assert decoder.average(targets, [message], [[True] * len(sizes)], 1.0).wait()
        for frame, mean in zip(frames, means, strict=True):
            assert torch.equal(mean, gradwire.decode(frame))


def test_later_messages_that_nobody_waits_for() -> None:
    """With other stamps, blocks and orders, besides; a tensor without a gradient keeps its memory, or sends it."""
    messages = UnattendedMessages(MessageEncoder(HOST), MessageDecoder(HOST))
    for step, (sizes, everything) in enumerate(((SIZES, False), (SIZES, True), (ALONE, False), (SIZES, False))):
        tasks, again = tasks_of("co3", sizes, step), tasks_of("co3", sizes, step)
        for of_message in (tasks, again):
            of_message[-1].tensors[0].gradient.zero_()
        frames, stamp = encode(again), 2**63 + step
        block = torch.zeros(sum(map(len, frames)) + 4096 * (step + 1), dtype=torch.uint8)
        layout = messages.encode(sizes, tasks, block, stamp, everything)
        means = [torch.full((n,), float("nan")) for n in sizes]
        targets = [FrameTarget(task.converter, [mean]) for task, mean in zip(tasks, means, strict=True)]
        outcome = messages.average(sizes, layout, targets, [block], stamp)
        outcome.wait()
        assert outcome.finite and not outcome.waited
        length = sum(layout.frame_lengths())
        assert int.from_bytes(outcome.prefixes[0][:8].tobytes(), "little") == length + 1
        assert int.from_bytes(outcome.prefixes[0][8:].tobytes(), "little") == stamp
        assert (bytes(block[FRONT : FRONT + length].numpy()) == b"".join(frames)) == everything
        for task, other, mean in zip(tasks, again, means, strict=True):
            sent = task is not tasks[-1] or everything
            memory = other.tensors[0].after if sent else task.tensors[0].before
            assert torch.equal(task.tensors[0].after, memory)  # type: ignore[arg-type]
            assert bool(mean.any()) == sent
