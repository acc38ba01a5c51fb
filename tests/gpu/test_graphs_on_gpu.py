"""Messages whose kernels are started as one graph, on a real GPU: the same bits as if they were started one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import gradwire
from gradwire.cuda_runtime import graphs
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import FrameTask, TensorTask

GPU = torch.device("cuda")
SIZES = (1, 700, 70_001, 1 << 20)
Message = tuple[bytes, list[torch.Tensor], list[torch.Tensor]]  # frames, new memories and means


@contextmanager
def without_graphs() -> Iterator[None]:
    before, graphs.OLDEST_DRIVER = graphs.OLDEST_DRIVER, 1 << 30
    try:
        yield
    finally:
        graphs.OLDEST_DRIVER = before


class Rank:
    """Encodes and averages one message after the other."""

    def __init__(self, spec: str):
        self.converter = gradwire.codec(spec).converter
        self.encoder, self.decoder = MessageEncoder(GPU), MessageDecoder(GPU)

    def message(self, seed: int, sizes: tuple[int, ...] = SIZES) -> Message:
        torch.manual_seed(seed)
        tensors = [TensorTask(torch.randn(n, device=GPU) ** 3, torch.randn(n, device=GPU)) for n in sizes]
        for tensor in tensors:
            tensor.after = torch.full_like(tensor.gradient, torch.nan)
        tasks = [FrameTask(self.converter, [t], tuple(t.gradient.shape), 0.9, seed) for t in tensors]
        out = torch.zeros(sum(5 * n + 4096 for n in sizes), dtype=torch.uint8, device=GPU)
        length = self.encoder.encode(tasks, out).wait()
        assert length is not None
        means = [torch.full_like(t.gradient, torch.nan) for t in tensors]
        targets = [FrameTarget(self.converter, [mean]) for mean in means]
        present = [[True] * len(sizes)] * 2
        assert self.decoder.average(targets, [out[:length]] * 2, present, 0.5).wait()
        return bytes(out[:length].cpu().numpy()), [t.after for t in tensors if t.after is not None], means


def same(found: Message, expected: Message) -> bool:
    tensors = zip(found[1] + found[2], expected[1] + expected[2], strict=True)
    return found[0] == expected[0] and all(torch.equal(a, b) for a, b in tensors)


def test_the_same_bits_as_one_by_one() -> None:
    """Message after message, on another stream, and after the workspace has grown."""
    for spec in ("co3", "ecq", "sbc", "topk:p=0.01", "qsgd", "bingrad"):
        rank = Rank(spec)
        with without_graphs():
            plain = Rank(spec)
            expected = [plain.message(seed) for seed in range(4)]
        assert all(same(rank.message(seed), expected[seed]) for seed in range(3)), spec
        built = [
            layout.launches._graph for layout in (*rank.encoder._layouts.values(), *rank.decoder._layouts.values())
        ]
        assert len(built) == 2 and None not in built, spec  # this driver has graphs
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert same(rank.message(3), expected[3]), spec
        torch.cuda.current_stream().wait_stream(side)
        rank.message(9, (1 << 22,))
        assert all(same(rank.message(seed), expected[seed]) for seed in range(2)), spec
