"""ECQ on the GPU: grid frames."""

from __future__ import annotations

import numpy as np

from gradwire.convert.conversion import Converter
from gradwire.convert.ecq import Ecq
from gradwire.frame.headers import GRID, SEGMENTED
from gradwire.gpu.families import Batch, Bytes, Family, FramePieces, FrameTask, StreamPlan, Unpack, stated_steps
from gradwire.gpu.structures import SAMPLE
from gradwire.kernels import grid_capacity

LARGEST = 127  # magnitude of a symbol
HEAD, SHIFTS, SEARCHERS = 8192, 7, 512  # as in sources/grid.h and grid_spread.h
BUCKET, PIECE_BITS = 4096, 256  # as in sources/apart.h
SHORT = 1 << 17  # entries of a frame, as in sources/grid.cu
LENGTH_BYTES = 10  # of a varint, at most


class GridFamily(Family):
    """Grids that meet a rate or an error, rounded to nearest."""

    combines = ("combine", "combine_grid")
    unpacks = (
        Unpack("outliers", "begin_pieces", 128, True),
        Unpack("outliers", "join_pieces", 128, True),
        Unpack("outliers", "settle_pieces", 1024, False),
        Unpack("outliers", "list_outliers", 128, True),
    )

    def takes(self, converter: Converter) -> bool:
        """Tell whether it is ECQ. Stochastic rounding is left to the CPU."""
        return isinstance(converter, Ecq) and not converter.stochastic

    def pieces(self, task: FrameTask) -> FramePieces:
        """Return the grid with the step of each tensor, how long the list of outliers is, symbols, and outliers."""
        assert isinstance(task.converter, Ecq)
        side = stated_steps(bytes([LARGEST, 2, 0, 0]), task.tensors)
        capacity = grid_capacity(task.count)
        return FramePieces(
            GRID,
            SEGMENTED if len(task.tensors) > 1 else 0,
            [side, Bytes(most=LENGTH_BYTES), 0, Bytes(most=64 + 8 * capacity)],
            # The kernels say how many symbols there really are.
            [StreamPlan(2 * LARGEST + 1, LARGEST)],
            own=[HEAD + 8 * capacity] + [0] * (len(task.tensors) - 1),
        )

    def room_to_decode(self, converter: Converter, count: int) -> tuple[int, int]:
        """Return the number of entries, and room for outliers, an index of them, and pieces of their codes.

        The header sources/apart.h says how they lie there.
        """
        room, index = grid_capacity(count), (count // BUCKET // 2 + 2) * 2
        pieces = 8 * (64 + 8 * room) // PIECE_BITS + 1
        return count, 256 + 8 * room + 4 * index + 40 * pieces

    def format(self, converter: Converter) -> np.ndarray:
        """Return the target: the rate, and the error; one of them is 0."""
        assert isinstance(converter, Ecq)
        target = converter.target
        return np.array([target.rate or 0.0, 0.0 if target.rate else target.nmse], dtype=np.float64).view(np.uint8)

    def convert(self, batch: Batch) -> None:
        """Sample, search, choose, convert, and list the outliers."""
        batch.launch_parts("grid_search", "sample")
        if batch.most > SAMPLE:
            batch.launch_on_all_tiles("grid_search", "look_closer")
        # One block for each width of the cell of zero: of the blocks of all parts, those of a tensor's first do it.
        batch.launch_parts("grid_search", "search", SEARCHERS, each=SHIFTS)
        batch.launch_parts("grid_search", "compare")
        batch.launch_tiles("grid", "convert")
        if batch.longest > SHORT:  # else the conversion has coded the outliers
            batch.launch_groups("grid", "measure_outliers")
            batch.launch_groups("grid", "clear_outliers")
            batch.launch_groups("grid", "write_outliers")
