"""What a frame says of itself, and where its bytes go (docs/wire-format.md)."""

from __future__ import annotations

import numpy as np

from gradwire import codecs, compress
from gradwire.convert import ecq, minifloat, segments
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader
from gradwire.inspection.frame_families import describe_homomorphic, describe_levels, describe_sketch, describe_sparse
from gradwire.inspection.frame_report import FrameReport, describe_symbols
from gradwire.inspection.structured_frame import describe_structured
from gradwire.models import gennorm_moments, gennorm_tables

FLAGS = {headers.NONFINITE: "non-finite", headers.SEGMENTED: "segmented"}
# In the order of the wire.
NAMES = ("stored", "minifloat", "cast", "grid", "levels", "sparse", "sketch", "homomorphic", "structured")
LIMITED = {
    headers.LEVELS: describe_levels, headers.SPARSE: describe_sparse, headers.SKETCH: describe_sketch,
    headers.HOMOMORPHIC: describe_homomorphic, headers.STRUCTURED: describe_structured,
}  # fmt: skip


def describe(frame: bytes | memoryview) -> FrameReport:
    """All about one frame; FrameError if its checksum or a field is wrong."""
    header, payload = codecs.open_frame(codecs.as_bytes(frame))
    report = FrameReport(
        version=headers.VERSION,
        codec=NAMES[header.codec],
        dtype=str(header.dtype).removeprefix("torch."),
        shape=header.shape,
        flags=[name for bit, name in FLAGS.items() if header.flags & bit],
        header_bytes=header.length,
        symbol_bytes=header.payload_length,
        dense_bytes=header.elements * header.dtype.itemsize,
    )
    if header.codec == headers.MINIFLOAT:
        _describe_minifloat(report, header, payload)
    elif header.codec == headers.GRID:
        _describe_grid(report, header, payload)
    elif header.codec in LIMITED:
        # Reading these takes time and memory in proportion to their entries: as many as `decode` would allow.
        if header.elements > max(codecs.DEFAULT_LIMIT, codecs.ELEMENTS_PER_BYTE * len(payload)):
            raise FrameError(f"frame declares {header.elements} elements: too many to look into")
        LIMITED[header.codec](report, header, payload)
    return report


def _describe_minifloat(report: FrameReport, header: headers.Header, payload: np.ndarray) -> None:
    reader = Reader(payload.data)
    fmt = minifloat.read_format(reader)
    report.format, report.steps = str(fmt), _read_steps(reader, header)
    report.side_bytes = reader.position
    describe_symbols(report, header, reader, fmt)
    if report.model == "gennorm":
        index, zero_mass = payload[report.side_bytes + 1 : report.side_bytes + report.model_bytes].tolist()
        report.beta, report.zero_mass = float(gennorm_moments.BETAS[index]), zero_mass / gennorm_tables.ZERO_STEPS


def _describe_grid(report: FrameReport, header: headers.Header, payload: np.ndarray) -> None:
    reader = Reader(payload.data)
    largest, _ = ecq.read_points(reader)
    report.format, report.steps = f"grid of {2 * largest + 1}", _read_steps(reader, header)
    outliers = reader.varint(len(payload))
    if outliers > len(payload) - reader.position:
        raise FrameError("frame is cut short")
    report.side_bytes = reader.position
    symbols = Reader(payload.data[: len(payload) - outliers], reader.position)
    describe_symbols(report, header, symbols, compress.Alphabet(2 * largest + 1, largest))
    report.symbol_bytes += outliers
    report.details = {"outlier bytes": outliers}


def _read_steps(reader: Reader, header: headers.Header) -> list[float]:
    if header.flags & headers.SEGMENTED:
        return [step for _, step in segments.Segments(reader, header.elements)]
    return [segments.read_step(reader)]


def describe_message(message: bytes, limit: int = 0) -> tuple[list[FrameReport], int]:
    """All about the first `limit` frames of a message (0: all), and how many there are; all must be whole."""
    reports: list[FrameReport] = []
    position = number = 0
    while position < len(message):
        number += 1
        try:
            end = position + headers.read_header(memoryview(message)[position:]).frame_length
            if end > len(message):
                raise FrameError(f"cut short: {len(message) - position} of {end - position} bytes")
            report = describe(memoryview(message)[position:end])
        except FrameError as error:
            raise FrameError(f"frame {number}, at byte {position}: {error}") from None
        if not limit or number <= limit:
            reports.append(report)
        position = end
    return reports, number
