"""Launches that are laid out once, and started for any number of messages."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import FrameTask
from support.device_frames import HOST, encode, frame_task, tensor_tasks

pytestmark = pytest.mark.usefixtures("kernels_on_cpu")
SIZES = (5000, 70001)


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
    for seed, sizes in enumerate((SIZES, SIZES, (200_000,), SIZES)):
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
