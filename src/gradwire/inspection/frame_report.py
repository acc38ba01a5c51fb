"""The report on one frame, and the part of it that coded symbols fill in."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire import compress
from gradwire.compress import rans
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader
from gradwire.small_float_formats import Format


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
    details: dict[str, int | float | str] = field(default_factory=dict)  # what only this codec has

    @property
    def elements(self) -> int:
        """How many entries the tensor has."""
        return math.prod(self.shape)

    @property
    def frame_bytes(self) -> int:
        """The length of the whole frame in bytes."""
        return self.header_bytes + self.side_bytes + self.model_bytes + self.lane_bytes + self.symbol_bytes

    @property
    def bits_per_entry(self) -> float | None:
        """Bits of the frame for each entry; None for an empty tensor."""
        return 8 * self.frame_bytes / self.elements if self.elements else None

    @property
    def ratio(self) -> float:
        """How many times smaller than the tensor as it is."""
        return self.dense_bytes / self.frame_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and derived figures, as `gradwire inspect --json` writes them."""
        derived = ("elements", "frame_bytes", "bits_per_entry", "ratio")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def describe_symbols(
    report: FrameReport, header: headers.Header, reader: Reader, alphabet: Format | compress.Alphabet
) -> None:
    """Of all that the reader has left; the side information is what it has read."""
    coding = compress.read_head(reader, alphabet)
    report.model_bytes = reader.position - report.side_bytes
    report.coder, report.model = coding.coder.name, coding.model.name if coding.model else None
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
