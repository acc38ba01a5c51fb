"""How a tensor is cut into buckets: by an encoder, and as a frame says it (docs/wire-format.md, codec 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader

MOST = 2048  # buckets, and ...
MANY = 64  # from this number of buckets on, those of a segment are a group of their own
NUMBERS = 1 << 14  # ... levels of all of them, that a decoder has in memory at a time


@dataclass(frozen=True)
class Buckets:
    """How an encoder cuts a tensor."""

    bucket: int  # entries in a bucket; 0 if every segment is one bucket
    segments: tuple[int, ...]  # their lengths
    starts: np.ndarray  # the index at which each bucket starts, and at the end the number of entries

    @property
    def sizes(self) -> np.ndarray:
        """The number of entries of each bucket."""
        return np.diff(self.starts)


def make_buckets(count: int, segments: tuple[int, ...], bucket: int, levels: int) -> Buckets:
    """Cut a tensor into buckets that restart at each segment.

    Segments with less than two entries a level share a bucket with the next one.
    """
    joined: list[int] = []
    for length in segments or (count,):
        if joined and (length < 2 * levels or joined[-1] < 2 * levels):
            joined[-1] += length
        else:
            joined.append(length)
    return cut(tuple(joined), bucket if bucket < max(joined) else 0)


def cut(segments: tuple[int, ...], bucket: int) -> Buckets:
    """Return buckets of `bucket` entries (0: as large as their segment) that restart at each of these segments."""
    ends = np.cumsum(segments)
    pieces = [np.arange(end - n, end, bucket or n) for n, end in zip(segments, ends, strict=True)]
    return Buckets(bucket, segments, np.append(np.concatenate(pieces), ends[-1]).astype(np.int64))


class CodedBuckets:
    """The buckets of a frame, a group at a time: there may be one for every four entries.

    Lengths of segments are read again whenever they are asked for, and never kept.
    """

    def __init__(self, count: int, bucket: int, levels: int, segments: Reader | None):
        """Take the lengths of the segments off their reader, if the frame has any; FrameError if they are invalid."""
        self.bucket, self._count, self._levels = bucket, count, levels
        self._number, self._lengths = 1, None
        if segments is not None:
            self._number = segments.varint(len(segments.data))
            self._lengths, self._at = segments.data, segments.position
        total = longest = self.number = 0
        shortest = count
        for length in self._walk():
            total, longest, shortest = total + length, max(longest, length), min(shortest, length)
            self.number += -(-length // bucket) if bucket else 1
        if total != count or (self._number > 1 and shortest < 2 * levels):
            raise FrameError("segments do not add up to the tensor, or are too small")
        if bucket and not 2 * levels <= bucket < longest:
            raise FrameError("invalid size of buckets")
        if segments is not None:
            segments.position = self._end

    def numbers(self, width: int) -> int:
        """Return how many numbers all buckets have, of up to `width` each: small ones have less."""
        total = 0
        for length in self._walk():
            whole, rest = divmod(length, self.bucket or length)
            total += whole * min(max(self.bucket or length, 2), width) + (min(max(rest, 2), width) if rest else 0)
        return total

    def groups(self) -> Iterator[np.ndarray]:
        """Yield the index at which each bucket of a group starts, and that at which the last one ends."""
        most = max(1, min(MOST, NUMBERS // self._levels))
        starts: list[int] = []
        start = 0
        for length in self._walk():
            end, size = start + length, self.bucket or length
            while start < end:
                stop = min(end, start + (most - len(starts)) * size)
                if not starts and stop - start >= MANY * size:
                    yield np.append(np.arange(start, stop, size, dtype=np.int64), stop)
                else:
                    starts.extend(range(start, stop, size))
                    if len(starts) == most:
                        yield np.array([*starts, stop], dtype=np.int64)
                        starts = []
                start = stop
        if starts:
            yield np.array([*starts, start], dtype=np.int64)

    def _walk(self) -> Iterator[int]:
        """Yield the length of every segment."""
        if self._lengths is None:
            yield self._count
            return
        data, at = self._lengths, self._at
        for _ in range(self._number):
            if at < len(data) and data[at] < 128:  # as most are: a call would take longer than all the rest
                yield data[at]
                at += 1
            else:
                reader = Reader(data, at)
                yield reader.varint(self._count)
                at = reader.position
        self._end = at
