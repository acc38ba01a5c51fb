"""Which frames a process decodes: their codec numbers and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from gradwire import codecs
from gradwire.frame import headers

Seen = list[tuple[int, tuple[int, ...]]]


@contextmanager
def frames_seen() -> Iterator[Seen]:
    """Codec number and shape of every frame that is opened to be averaged, in the order of the means."""
    seen: Seen = []
    open_frame, payload_of = codecs.open_frame, codecs.payload_of

    def recording_open(data: np.ndarray) -> tuple[headers.Header, np.ndarray]:
        header, payload = open_frame(data)
        seen.append((header.codec, tuple(header.shape)))
        return header, payload

    def recording_payload(header: headers.Header, frame: memoryview) -> np.ndarray:
        seen.append((header.codec, tuple(header.shape)))
        return payload_of(header, frame)

    codecs.open_frame, codecs.payload_of = recording_open, recording_payload
    try:
        yield seen
    finally:
        codecs.open_frame, codecs.payload_of = open_frame, payload_of
