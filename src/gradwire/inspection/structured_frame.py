"""What a structured frame says of itself: how it looks at its tensor, and where its bytes go."""

from __future__ import annotations

import numpy as np

from gradwire.convert import ecq, low_rank, outliers, scale_classes, segments, structured, tensor_view
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader
from gradwire.inspection.frame_report import FrameReport


def describe_structured(report: FrameReport, header: headers.Header, payload: np.ndarray) -> None:
    """Fill in the report: factors and scales are side information, and all classes together are the symbols."""
    reader = Reader(payload.data)
    view = tensor_view.read_view(reader, header.shape)
    start = reader.position
    factors = low_rank.read_factors(reader, view)
    report.details = {"view": view_name(view), "rank": factors.rank, "factor bytes": reader.position - start}
    if reader.take(1)[0]:
        reader.position -= 1
        _describe_remainder(report, reader, view)
    elif reader.position != len(payload):
        raise FrameError("bytes after the end of a structured frame")
    else:
        report.side_bytes, report.symbol_bytes = reader.position, 0


def view_name(view: tensor_view.TensorView) -> str:
    """Return how a structured frame looks at its tensor, such as `kernels of 3×3`."""
    if view.kind == tensor_view.BLOCKS:
        return f"blocks of {view.width}"
    return f"kernels of {'×'.join(map(str, view.axes))}" if view.kind == tensor_view.KERNELS else "matrix"


def _describe_remainder(report: FrameReport, reader: Reader, view: tensor_view.TensorView) -> None:
    largest, offsets = ecq.read_points(reader)
    report.format, report.steps = f"grid of {2 * largest + 1}", [segments.read_step(reader)]
    start = reader.position
    classes = scale_classes.read_classes(reader, view)
    scale_bytes = reader.position - start
    apart = reader.varint(len(reader.data))
    if apart > len(reader.data) - reader.position:
        raise FrameError("frame is cut short")
    report.side_bytes = reader.position
    report.symbol_bytes = len(reader.data) - reader.position
    listed = outliers.read_outliers(
        reader.data[len(reader.data) - apart :], view.count, largest, structured.outlier_capacity(view.count)
    )
    report.details |= {
        "classes": classes.classes,
        "scale bytes": scale_bytes,
        "symbols": 2 * largest + 1,
        "offsets": len(offsets),
        "outliers": len(listed[0]),
        "class bytes": report.symbol_bytes - apart,
        "outlier bytes": apart,
    }
