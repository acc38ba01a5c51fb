"""CO3 on the GPU: minifloat frames."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gradwire.compress.coders import RANS
from gradwire.convert.conversion import Converter
from gradwire.convert.minifloat import Minifloat, pack_format
from gradwire.frame.headers import MINIFLOAT, SEGMENTED
from gradwire.gpu.families import GENNORM, HISTOGRAM, Batch, Family, FramePieces, FrameTask, StreamPlan, stated_steps
from gradwire.gpu.structures import SAMPLE
from gradwire.models import gennorm_moments, gennorm_tables
from gradwire.models.gennorm_moments import GRID
from gradwire.small_float_formats import Format

FORMAT = np.dtype(
    [("ratios", "f8", GRID), ("steps", "f8", GRID), ("largest", "f4"), ("spare", "f4"), ("min_exponent", "i4"),
     ("mantissa", "i4"), ("top", "i4"), ("zero", "i4"), ("sign", "i4"), ("spare2", "i4"), ("masses", "u4", (GRID, 128))]
)  # fmt: skip


class MinifloatFamily(Family):
    """Minifloat with a shipped table, rounded to nearest and coded by rANS."""

    def takes(self, converter: Converter) -> bool:
        """Tell whether it is CO3 with a preset format, as the recipe has it."""
        return (
            isinstance(converter, Minifloat)
            and not converter.stochastic
            and converter.coder is RANS
            and gennorm_tables.has_table(converter.format)
            and bool(converter.format.sign)
        )

    def pieces(self, task: FrameTask) -> FramePieces:
        """Return side information with the step of each tensor, and the symbols."""
        converter = task.converter
        assert isinstance(converter, Minifloat)
        side = stated_steps(pack_format(converter.format), task.tensors)
        models = sum({"gennorm": GENNORM, "histogram": HISTOGRAM}[model.name] for model in converter.models)
        stream = StreamPlan(converter.format.symbols, converter.format.zero_symbol, models=models)
        return FramePieces(MINIFLOAT, SEGMENTED if len(task.tensors) > 1 else 0, [side, 0], [stream])

    def format(self, converter: Converter) -> np.ndarray:
        """Return the format's shape and the shipped tables of the GenNorm."""
        assert isinstance(converter, Minifloat)
        return _format(converter.format)

    def convert(self, batch: Batch) -> None:
        """Sample, fit, try steps, convert."""
        batch.launch_parts("minifloat", "sample")
        if batch.most > SAMPLE:
            batch.launch_on_all_tiles("minifloat", "look_closer")
        batch.launch_parts("minifloat", "try_steps")
        batch.launch_tiles("minifloat", "convert")


@lru_cache
def _format(fmt: Format) -> np.ndarray:
    record = np.zeros(1, FORMAT)
    record["ratios"] = gennorm_moments.RATIOS
    record["steps"] = [gennorm_tables.step_over_mean(fmt, index) for index in range(GRID)]
    record["largest"], record["min_exponent"], record["mantissa"] = fmt.largest, fmt.min_exponent, fmt.mantissa
    record["top"], record["zero"], record["sign"] = len(fmt.magnitudes) - 1, fmt.zero_symbol, fmt.sign
    masses = gennorm_tables.masses(fmt)
    record["masses"][0, :, : masses.shape[1]] = masses
    return record.view(np.uint8)
