"""Reading and writing the fields of a frame: bounds-checked, so that no hostile frame reads past its end."""

from __future__ import annotations

import struct

from gradwire.errors import FrameError


def varint(value: int) -> bytes:
    """Return a number as unsigned LEB128: seven bits a byte, the lowest first."""
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def bfloat16(value: float) -> bytes:
    """Return two bytes of a number that bfloat16 holds exactly."""
    return struct.pack("<f", value)[2:]


class Reader:
    """Takes fields off the front of a buffer; a read past the end raises FrameError, and so does an invalid field."""

    def __init__(self, data: memoryview, position: int = 0):
        self.data, self.position = data, position

    def take(self, count: int) -> memoryview:
        """Take the next `count` bytes."""
        if count > len(self.data) - self.position:
            raise FrameError("frame is cut short")
        piece = self.data[self.position : self.position + count]
        self.position += count
        return piece

    def rest(self) -> memoryview:
        """Take all bytes that are left."""
        return self.take(len(self.data) - self.position)

    def byte(self) -> int:
        """Take one byte as a number."""
        position = self.position
        if position >= len(self.data):
            raise FrameError("frame is cut short")
        self.position = position + 1
        return self.data[position]

    def bfloat16(self) -> float:
        """Take two bytes as a bfloat16 number."""
        return float(struct.unpack("<f", b"\0\0" + self.take(2))[0])

    def varint(self, limit: int) -> int:
        """Take an unsigned LEB128 number in its shortest form, which must not exceed `limit`."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
            if shift > 49:
                raise FrameError("number in frame is too long")
        if byte == 0 and shift:
            raise FrameError("number in frame is not in its shortest form")
        if value > limit:
            raise FrameError(f"number in frame is too large: {value} > {limit}")
        return value
