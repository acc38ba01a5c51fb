"""The choice of the largest entries, in CUDA C++ (sources/selection.cu)."""

from __future__ import annotations

import torch

from gradwire.cuda_runtime import programs
from gradwire.kernels.conditions import where
from gradwire.kernels.cuda.launches import UNIT, Launcher, flat_fp32, fp32_bits
from gradwire.kernels.reference import sparse as reference
from gradwire.kernels.reference.sparse import Selection

__all__ = ["select"]

can_run = programs.can_run  # the dispatcher asks it
BINS = 2048
COUNTING_BLOCKS = 1056  # eight for each of 132: each has a histogram of its own to hand over


@where(flat_fp32)
def select(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    count: int | None, low: int = 1, one_sign: bool = False,
) -> Selection:  # fmt: skip
    """Select the `count` largest magnitudes of u = g + decay·e; the host waits once, for their number."""
    if one_sign or not gradient.numel():
        return reference.select(gradient, memory, memory_out, decay, count, low, one_sign)
    gpu, entries, low = Launcher("selection", gradient.device), gradient.numel(), max(1, low)
    # A memory that is updated in place must be as it was if u turns out not to be finite.
    in_place = memory is not None and memory_out is not None and memory.data_ptr() == memory_out.data_ptr()
    kept = memory_out
    if in_place or (memory is not None and kept is None):
        kept = gpu.empty(entries, torch.float32)
    u = gradient if kept is None else kept
    histogram, choice, told = gpu.zeros(BINS, torch.int32), gpu.zeros(4), gpu.zeros(1)
    gpu.start(
        "compensate_and_count", min(-(-entries // 1024), COUNTING_BLOCKS), 256, gradient, memory, kept, entries,
        fp32_bits(decay), low, histogram, choice,
    )  # fmt: skip
    if count is None or count >= entries:
        gpu.start("take_all", 1, 1, low, choice)
    else:
        gpu.start("pick_bin", 1, 1024, histogram, count, low, 1, choice)
        for shift in (10, 0):
            gpu.start(
                "count_next", min(-(-entries // 1024), COUNTING_BLOCKS), 256, u, entries, low, shift, choice, histogram
            )
            gpu.start("pick_bin", 1, 1024, histogram, count, low, 0, choice)
    units = -(-entries // UNIT)
    values, locals_ = gpu.empty(units * UNIT, torch.float32), gpu.empty(units * UNIT, torch.int16)
    staged, equals, counts = (gpu.empty(units, torch.int32) for _ in range(3))
    gpu.for_units(units, "stage_selected", u, entries, choice, values, locals_, staged, equals)
    gpu.sum_up(equals, units, told)
    gpu.for_each(units, "count_selected", staged, equals, units, choice, counts)
    gpu.sum_up(counts, units, told)
    total, not_finite = torch.cat([told, choice[3:]]).tolist()
    if not_finite:
        return 0, gpu.empty(0, torch.int64), u[:0]
    if in_place and memory_out is not None:
        memory_out.copy_(u)
    positions, selected = gpu.empty(total, torch.int64), gpu.empty(total, torch.float32)
    gpu.for_units(
        units, "collect_selected", values, locals_, staged, equals, counts, units, choice, positions, selected
    )
    return entries, positions, selected
