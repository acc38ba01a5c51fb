"""Which frames a process decodes: their codec numbers and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradwire import codecs

Seen = list[tuple[int, tuple[int, ...]]]


@contextmanager
def frames_seen() -> Iterator[Seen]:
    """Codec number and shape of every frame that is opened to be averaged, in the order of the means."""
    seen: Seen = []
    before = codecs.open_frame

    def recording(data: np.ndarray) -> Any:
        header, payload = before(data)
        seen.append((header.codec, tuple(header.shape)))
        return header, payload

    codecs.open_frame = recording
    try:
        yield seen
    finally:
        codecs.open_frame = before
