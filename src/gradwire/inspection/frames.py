"""What a frame says of itself, and where its bytes go (docs/wire-format.md)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .. import codecs, compress, wire
from ..compress import rans
from ..convert import ecq, minifloat
from ..errors import FrameError
from ..fields import Reader
from ..formats import Format
from ..models import gennorm

FLAGS = {wire.NONFINITE: "non-finite", wire.SEGMENTED: "segmented"}
CODERS = {number: name for name, number in compress.CODERS.items()} | {compress.CONSTANT: "constant"}
MODELS = {compress.NO_MODEL: None, compress.GENNORM: "gennorm", compress.HISTOGRAM: "histogram"}


@dataclass
class FrameReport:
    """Fields that a codec does not have are None."""

    version: int
    codec: str
    dtype: str
    shape: tuple[int, ...]
    flags: list[str]
    header_bytes: int
    symbol_bytes: int  # all of the payload, where nothing below is counted
    dense_bytes: int
    side_bytes: int = 0  # format and steps
    model_bytes: int = 0  # how symbols are coded: the coding byte and the model's parameters
    lane_bytes: int = 0  # the layout of rANS and the final states
    format: str | None = None
    steps: list[float] = field(default_factory=list)  # one; one per segment if segmented
    coder: str | None = None
    model: str | None = None
    beta: float | None = None
    zero_mass: float | None = None
    frequencies: list[int] | None = None
    precision: int | None = None
    lanes: int | None = None
    chunks: int | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def frame_bytes(self) -> int:
        return self.header_bytes + self.side_bytes + self.model_bytes + self.lane_bytes + self.symbol_bytes

    @property
    def bits_per_entry(self) -> float | None:
        return 8 * self.frame_bytes / self.elements if self.elements else None

    @property
    def ratio(self) -> float:
        """How many times smaller than the tensor as it is."""
        return self.dense_bytes / self.frame_bytes

    def as_dict(self) -> dict[str, Any]:
        derived = ("elements", "frame_bytes", "bits_per_entry", "ratio")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def describe(frame: bytes | memoryview) -> FrameReport:
    """All about one frame; FrameError if its checksum or a field is wrong."""
    header, payload = codecs.open_frame(codecs.as_bytes(frame))
    report = FrameReport(
        version=wire.VERSION,
        # One codec, one file: the decoder's module carries the codec's name.
        codec=codecs.DECODERS[header.codec].__module__.rpartition(".")[2],
        dtype=str(header.dtype).removeprefix("torch."),
        shape=header.shape,
        flags=[name for bit, name in FLAGS.items() if header.flags & bit],
        header_bytes=header.length,
        symbol_bytes=header.payload_length,
        dense_bytes=header.elements * header.dtype.itemsize,
    )
    if header.codec == wire.MINIFLOAT:
        _describe_minifloat(report, header, payload)
    elif header.codec == wire.GRID:
        _describe_grid(report, header, payload)
    return report


def _describe_minifloat(report: FrameReport, header: wire.Header, payload: np.ndarray) -> None:
    reader = Reader(payload.data)
    fmt = minifloat.read_format(reader)
    report.format, report.steps = str(fmt), _read_steps(reader, header)
    report.side_bytes = reader.position
    _describe_symbols(report, header, reader, fmt)
    if report.model == "gennorm":
        index, zero_mass = payload[report.side_bytes + 1 : report.side_bytes + report.model_bytes].tolist()
        report.beta, report.zero_mass = float(gennorm.BETAS[index]), zero_mass / gennorm.ZERO_STEPS


def _describe_grid(report: FrameReport, header: wire.Header, payload: np.ndarray) -> None:
    reader = Reader(payload.data)
    largest, _ = ecq.read_points(reader)
    report.format, report.steps = f"grid of {2 * largest + 1}", _read_steps(reader, header)
    outliers = reader.varint(len(payload))
    if outliers > len(payload) - reader.position:
        raise FrameError("frame is cut short")
    report.side_bytes = reader.position
    symbols = Reader(payload.data[: len(payload) - outliers], reader.position)
    _describe_symbols(report, header, symbols, compress.Alphabet(2 * largest + 1, largest))
    report.symbol_bytes += outliers


def _read_steps(reader: Reader, header: wire.Header) -> list[float]:
    if header.flags & wire.SEGMENTED:
        return [step for _, step in minifloat.read_segments(reader, header.elements)]
    return [minifloat.read_step(reader)]


def _describe_symbols(
    report: FrameReport, header: wire.Header, reader: Reader, alphabet: Format | compress.Alphabet
) -> None:
    coding = compress.read_head(reader, alphabet)
    report.model_bytes = reader.position - report.side_bytes
    report.coder, report.model = CODERS[coding.coder], MODELS[coding.model]
    if coding.frequencies is not None:
        report.precision, report.frequencies = coding.precision, coding.frequencies.tolist()
    report.symbol_bytes = len(reader.data) - reader.position
    if coding.coder == compress.RANS:
        lane_bits, lengths, body = rans.read_head(reader.rest(), header.elements)
        report.lanes, report.chunks = 1 << lane_bits, len(lengths)
        states = 3 * report.lanes * report.chunks
        if len(body) < states:
            raise FrameError("rans chunk is cut short")
        report.lane_bytes = report.symbol_bytes - len(body) + states
        report.symbol_bytes -= report.lane_bytes


def describe_message(message: bytes, limit: int = 0) -> tuple[list[FrameReport], int]:
    """All about the first `limit` frames of a message (0: all), and how many there are; all must be whole."""
    reports: list[FrameReport] = []
    position = number = 0
    while position < len(message):
        number += 1
        try:
            end = position + wire.read_header(memoryview(message)[position:]).frame_length
            if end > len(message):
                raise FrameError(f"cut short: {len(message) - position} of {end - position} bytes")
            report = describe(memoryview(message)[position:end])
        except FrameError as error:
            raise FrameError(f"frame {number}, at byte {position}: {error}") from None
        if not limit or number <= limit:
            reports.append(report)
        position = end
    return reports, number
