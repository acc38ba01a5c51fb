"""Sums on the device that begin with what a tensor holds, and of frames of another dtype than the sum's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire
from gradwire import codecs
from gradwire.gpu import FrameTarget, FrameTask, MessageDecoder, MessageEncoder, TensorTask, room_for
from support.cuda_on_cpu import cuda_on_cpu

HOST = torch.device("cpu")
SIZE, WEIGHT = 9001, 1 / 3  # more than two tiles, and products that are rounded


def message_of(codec: codecs.Codec, gradient: torch.Tensor) -> torch.Tensor:
    tasks = [FrameTask(codec.converter, [TensorTask(gradient)], (SIZE,))]
    out = torch.empty(room_for(tasks), dtype=torch.uint8)
    with cuda_on_cpu():
        return out[: MessageEncoder(HOST).encode(tasks, out).wait()]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["co3", "ecq", "orq", "topk:p=0.05"])
def test_sums_are_those_of_the_host(recipe, dtype, adds):
    torch.manual_seed(0)
    codec = gradwire.codec(recipe)
    messages = [message_of(codec, torch.randn(SIZE).pow(3).to(dtype)) for _ in range(3)]
    for start in (0, 1):  # aligned, and not
        held = torch.randn(SIZE + 1)[start : start + SIZE]
        host, device = held.clone(), held
        for i, message in enumerate(messages):
            header, payload = codecs.open_frame(np.asarray(message))
            codecs.decode_payload(header, payload, host, WEIGHT, adds or i > 0)
        with cuda_on_cpu():
            target = FrameTarget(codec.converter, [device], dtype)
            assert MessageDecoder(HOST).average([target], messages, [[True]] * 3, WEIGHT, adds).wait()
        assert torch.equal(host, device)
