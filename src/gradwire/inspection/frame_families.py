"""What frames of levels, of sparse tensors, of sketches and of homomorphic codes say of themselves."""

from __future__ import annotations

import struct

import numpy as np

from gradwire import compress
from gradwire.compress import positions
from gradwire.convert import homomorphic, levels, magnitudes, sketch, sparse_values
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader
from gradwire.inspection.frame_report import FrameReport, describe_symbols

TABLES = {levels.EXPLICIT: "explicit", levels.EVEN: "even", levels.SYMMETRIC: "symmetric"}
VALUES = ("one value", "one magnitude and signs", "fp32", "fp16", "bf16", "minifloat", "magnitudes and signs")


def describe_levels(report: FrameReport, header: headers.Header, payload: np.ndarray) -> None:
    """Fill in the report on a frame of levels."""
    reader = Reader(payload.data)
    layout, count, kind, precision = levels.read_side(reader, header)
    numbers = Reader(reader.take(layout.numbers(levels.widths(kind, count)) * precision.itemsize))
    for starts in layout.groups():
        levels.read_values(numbers, starts, count, kind, precision, header.dtype)
    report.format = f"{count} levels"
    report.side_bytes = reader.position
    describe_symbols(report, header, reader, compress.Alphabet(count, count // 2))
    report.details = {
        "levels": count,
        "bucket": layout.bucket or "whole",
        "buckets": layout.number,
        "table": f"{TABLES[kind]}, {str(precision).removeprefix('torch.')}",
    }


def describe_sparse(report: FrameReport, header: headers.Header, payload: np.ndarray) -> None:
    """Positions and values both count as symbols; the coder is that of the positions."""
    reader = Reader(payload.data)
    sent = reader.varint(header.elements)
    report.format, report.details = f"{sent} sent", {"sent": sent}
    if sent:
        kind = reader.byte()
        if kind & 15 >= len(VALUES):
            raise FrameError("damaged values of a sparse frame")
        start = reader.position
        coded = positions.open_positions(reader, kind >> 4, sent, header.elements)
        for _ in coded.parts(
            positions.PART
        ):  # to see whether they are damaged; all at once they would be eight bytes each
            pass
        reader.position = coded.end
        used = reader.position - start
        report.coder, parameter = (("golomb", "b"), ("classes", "m"))[kind >> 4]
        report.side_bytes = start
        report.details |= {
            "values": VALUES[kind & 15],
            "positions": f"{report.coder}, {parameter} = {payload[start]}",
            "bits per position": round(8 * used / sent, 3),
            "position bytes": used,
            "value bytes": len(payload) - reader.position,
        }
        if kind & 15 == sparse_values.MAGNITUDES:
            report.details["levels"] = 2 * len(magnitudes.read_table(reader))
    report.symbol_bytes = len(payload) - report.side_bytes


def describe_sketch(report: FrameReport, header: headers.Header, payload: np.ndarray) -> None:
    """Fill in the report on a frame of a count sketch."""
    reader = Reader(payload.data)
    table, columns, kept = reader.byte(), reader.varint(header.elements), reader.varint(header.elements)
    scale, seed = struct.unpack("<fQ", reader.take(12))
    rows, precision = table & 15, table >> 4
    names = tuple(sketch.PRECISIONS)
    if rows not in sketch.ROWS or precision >= len(names):
        raise FrameError("invalid sketch")
    report.format, report.side_bytes = f"{rows}×{columns}", reader.position
    report.symbol_bytes = len(reader.rest())
    if report.symbol_bytes != rows * columns * sketch.PRECISIONS[names[precision]].itemsize:
        raise FrameError("invalid sketch")
    report.details = {
        "rows": rows,
        "columns": columns,
        "kept": kept,
        "cells": names[precision],
        "scale": scale,
        "seed": seed,
    }


def describe_homomorphic(report: FrameReport, header: headers.Header, payload: np.ndarray) -> None:
    """Fill in the report on a frame of summable words."""
    reader = Reader(payload.data)
    plan, grid = homomorphic.read_side(reader, header)
    report.format, report.steps, report.side_bytes = f"{grid.bits}-bit sums", [grid.step], reader.position
    report.symbol_bytes = len(reader.rest())
    if report.symbol_bytes != 4 * plan.total_words:
        raise FrameError("wrong length of index and sketch")
    report.details = {"index": plan.index, "index bytes": 4 * plan.index_words, "sketch bytes": 4 * plan.sketch_words}
    if plan.index != "dense":
        report.details |= {"lanes": plan.lanes, "cells": plan.cells, "seed": plan.seed}
