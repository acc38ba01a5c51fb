"""Gradients and memories as nobody expects them, encoded by the kernels for GPUs, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gradwire
from gradwire.gpu import workspace
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import FrameTask, TensorTask
from support.cuda_on_cpu import cuda_on_cpu

CPU = torch.device("cpu")
SPECS = ["co3", "ecq", "topk", "sbc", "stc", "qsgd"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def length_of(spec: str, gradient: torch.Tensor, memory: torch.Tensor) -> int | None:
    task = TensorTask(gradient, memory, torch.empty(len(gradient)))
    out = torch.empty(4 * len(gradient) + 8192, dtype=torch.uint8)
    return (
        MessageEncoder(CPU).encode([FrameTask(gradwire.codec(spec).converter, [task], gradient.shape, 0.9)], out).wait()
    )


@pytest.mark.parametrize("spec", SPECS)
def test_a_memory_that_is_not_finite_leaves_the_message_to_the_host(spec: str) -> None:
    """Limited to the range of fp32, a NaN of the memory would be sent as -3.4e38."""
    gradient, memory = torch.linspace(-1, 1, 3001), torch.linspace(1, 0, 3001)
    assert length_of(spec, gradient, memory) is not None
    for bad in (torch.nan, torch.inf):
        for place in (0, 1500, 3000):
            damaged = memory.clone()
            damaged[place] = bad
            assert length_of(spec, gradient, damaged) is None


def test_only_some_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which parameters have a gradient may differ in every step, for ever."""
    monkeypatch.setattr(workspace, "MOST_LAYOUTS", 3)
    codec, encoder, decoder = gradwire.codec("co3"), MessageEncoder(CPU), MessageDecoder(CPU)
    for size in (100, 200, 300, 400, 500, 100, 300):
        out, mean = torch.empty(8192, dtype=torch.uint8), torch.empty(size)
        task = FrameTask(codec.converter, [TensorTask(torch.linspace(-1, 1, size))], (size,))
        length = encoder.encode([task], out).wait()
        assert decoder.average([FrameTarget(codec.converter, [mean])], [out[:length]], [[True]], 1.0).wait()
        assert torch.equal(mean, gradwire.decode(bytes(out[:length].numpy())))
        assert len(encoder._layouts) <= 3 and len(decoder._layouts) <= 3


@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_beyond_fp32_leaves_the_message_to_the_host(spec: str) -> None:
    gradient, memory = torch.linspace(-1, 1, 3001), torch.zeros(3001)
    gradient[1500], memory[1500] = 3e38, 3e38
    assert length_of(spec, gradient, memory) is None
