"""The kernels of the homomorphic code on a GPU, at sizes that fill it, against the kernels of the CPU."""

from __future__ import annotations

import torch

import gradwire
from gradwire import kernels
from gradwire.homomorphic import code
from gradwire.homomorphic.grid import by_largest
from gradwire.homomorphic.plan import choose, choose_index

DEVICE = torch.device("cuda")
ENTRIES = 5_000_003


def on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(DEVICE) for t in tensors]


def check_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check that a tensor of the GPU has the bits of one of the CPU."""
    assert a.is_cuda and (a.shape, a.dtype) == (b.shape, b.dtype), (a.shape, b.shape)
    assert torch.equal(a.cpu().view(torch.int32), b.view(torch.int32)) if len(b) else True


def entries(density: float = 1.0, run: int = 1, count: int = ENTRIES) -> torch.Tensor:
    here = (torch.rand(-(-count // run)) < density).repeat_interleave(run)[:count]
    return torch.where(here, torch.randn(count) ** 3, 0.0)


def words(density: float, run: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.nonzero(entries(density, run)).flatten()
    return positions, torch.randint(-(2**31), 2**31, (len(positions),)).int()


def test_entries_become_words_and_entries_again() -> None:
    torch.manual_seed(1)
    for bits in (32, 16, 8, 4):
        for density, seed in ((0.05, None), (1.0, 5)):
            grid, gradient, memory = by_largest(130, bits, 3), entries(density), entries()
            after = torch.full((ENTRIES,), torch.nan)
            given = 0.9, grid.step, grid.most, bits, seed
            at, values, exponent, squares = kernels.quantize_all(gradient, memory, after, *given)
            g, m, a = on_gpu(gradient, memory, torch.full((ENTRIES,), torch.nan))
            found = kernels.quantize_all(g, m, a, *given)
            check_same(found[0], at)
            check_same(found[1], values)
            check_same(a, after)
            assert found[2] == exponent and abs(found[3] - squares) <= 1e-9 * squares
            out = torch.zeros(ENTRIES)
            kernels.put_words(out, at, values, bits, grid.step / 3)
            there = torch.zeros(ENTRIES, device=DEVICE)
            kernels.put_words(there, *found[:2], bits, grid.step / 3)
            check_same(there, out)


def test_the_largest_entries_are_found() -> None:
    torch.manual_seed(2)
    for gradient in (entries(), entries(0.05), entries().round(), torch.ones(ENTRIES)):
        for wanted in (1, ENTRIES // 100, ENTRIES // 20, ENTRIES - 1, None):
            memory, after = entries(0.5), torch.empty(ENTRIES)
            done, at, values = kernels.select(gradient, memory, after, 0.9, wanted)
            g, m, a = on_gpu(gradient, memory, torch.full((ENTRIES,), torch.nan))
            found = kernels.select(g, m, a, 0.9, wanted)
            assert found[0] == done
            check_same(found[1], at)
            check_same(found[2], values)
            check_same(a, after)


def test_index_sketch_and_peeling() -> None:
    torch.manual_seed(3)
    for density, run in ((0.05, 1), (0.001, 1), (0.05, 64), (0.185, 1)):
        positions, values = words(density, run)
        marked = code.blocks(positions, ENTRIES)
        there = on_gpu(positions, values)
        assert code.blocks(there[0], ENTRIES) == marked
        for room in (1.0, 0.7):  # with the second, blocks are left
            plan = choose(ENTRIES, {lanes: max(1, int(count * room)) for lanes, count in marked.items()}, 7)
            index, sketch = code.encode(plan, positions, values)
            for _ in range(3):  # threads meet in another order each time
                found = code.encode(plan, *there)
                check_same(found[0], index)
                check_same(found[1], sketch)
                expected, decoded = code.decode(plan, index, sketch), code.decode(plan, *found)
                check_same(decoded.positions, expected.positions)
                check_same(decoded.values, expected.values)
                check_same(decoded.left, expected.left)
                assert decoded.consistent and expected.consistent
            if plan.index != "dense":
                found[1][len(sketch) // 2] += 1
                assert code.decode(plan, *found).consistent == code.decode(plan, index, found[1].cpu()).consistent


def test_words_of_a_union() -> None:
    torch.manual_seed(4)
    for density, run in ((0.05, 1), (0.0005, 1), (0.05, 16)):
        (positions, values), (others, _) = words(density, run), words(density, run)
        marked = code.blocks(torch.unique(torch.cat([positions, others])), ENTRIES)
        plan = choose_index(ENTRIES, marked, {lanes: 2 * count for lanes, count in marked.items()}, 7)
        index = code.index_of(plan, positions) | code.index_of(plan, others)
        there = on_gpu(index, positions, values)
        for a, b in zip(code.align(plan, *there), code.align(plan, index, positions, values), strict=True):
            check_same(a, b)


def test_frames_are_those_of_the_cpu() -> None:
    torch.manual_seed(5)
    for spec in ("homomorphic:p=0.05", "homomorphic:p=all", "homomorphic:p=0.1,bits=8"):
        codec, gradient, memory = gradwire.codec(spec), entries(0.1, count=300_001), entries(count=300_001)
        assert codec.runs_on(DEVICE)
        out = torch.empty(codec.max_frame_bytes(gradient), dtype=torch.uint8)
        there = on_gpu(gradient, memory)
        frames = []
        for g, m in ((gradient, memory), there):
            frames.append(bytes(out[: codec.encode_into(g, out, residual=m, decay=0.9)].numpy()))
        assert frames[0] == frames[1]
        check_same(there[1], memory)
