"""Calls of the native module and what came of them, as a file that tests/native_arm64/driver.cpp reads.

A case is a function's name, flags (1: it raises ValueError; 2: it stops before an entry that is not finite), its
arguments, its result, and for each array among the arguments whether it was changed, how many of its bytes count, and
these if it was. Numbers are little-endian; a value is a byte that says what follows:

    0 None   1 bool, a byte   2 integer, 8 bytes   3 float, 8 bytes   4 text: length, 4 bytes, and the text
    5 sequence: length, 4 bytes, and its values
    6 array: its number among the arrays of the case, 4 bytes; if it is new, also the letter of its kind, bytes of an
      item, number of items (8 bytes), and its bytes
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from gradwire import _native, kernels

# What these functions write behind what they return the length of is rubbish, and not the same on all machines.
CODED = {"rans_encode": 5, "quantize_rans": 11, "grid_rans": 12}  # where the bytes go
FOUND = {"fixed_all": (8, 9)}
STOPPING = {"quantize_rans": 1, "grid_rans": 1, "select": 0}  # where the result says how many entries were done
FEW = {"grid_measure": 10}  # of whose cases so many are enough: each has a table of half a megabyte
NO_KERNELS = {"use", "available", "siphash", "packet_codes"}  # the last two belong to the aggregator


class Cases:
    """Cases in the order of the calls; of equal ones only the first."""

    def __init__(self) -> None:
        self.encoded: dict[bytes, None] = {}
        self.counts: Counter[str] = Counter()

    @property
    def functions(self) -> set[str]:
        return set(self.counts)

    def write(self, path: Any) -> None:
        with open(path, "wb") as file:
            file.writelines(self.encoded)

    def add(self, name: str, function: Callable, arguments: tuple) -> Any:
        """Make the call, and keep it."""
        self.counts[name] += 1
        if self.counts[name] > FEW.get(name, math.inf):
            return function(*arguments)
        arguments = addressed(name, arguments)
        case = Case(name)
        given = case.value(list(arguments))
        arrays, before = list(case.arrays), [a.tobytes() for a in case.arrays]
        result = error = None
        try:
            result = function(*[a.ctypes.data if isinstance(a, Address) else plain(a) for a in arguments])
        except ValueError as e:
            error = e
        returned = case.value(result)
        stops = error is None and case.stops(arguments, result)
        after = b""
        for i, array in enumerate(arrays):
            content = array.tobytes()
            changed = content != before[i]
            counts = len(content) if error or stops else case.counting(i, array, arguments, result)
            after += struct.pack("<BQ", changed, counts) + (content[:counts] if changed else b"")
        flags = struct.pack("<B", (error is not None) | stops << 1)
        self.encoded[text(name) + flags + given + returned + after] = None
        if error:
            raise error
        return result


class Address(np.ndarray):
    """An array that is given by its address."""


def plain(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(a.ctypes.data if isinstance(a, Address) else plain(a) for a in argument)
    return argument


def text(of: str) -> bytes:
    return struct.pack("<I", len(of)) + of.encode()


class Case:
    def __init__(self, name: str):
        self.name = name
        self.arrays: list[np.ndarray] = []

    def value(self, x: Any) -> bytes:
        if x is None:
            return b"\0"
        if isinstance(x, str):
            return b"\4" + text(x)
        if isinstance(x, list | tuple):
            return struct.pack("<BI", 5, len(x)) + b"".join(map(self.value, x))
        if np.ndim(x):
            return self.array(np.asarray(x))
        return self.number(x)

    def number(self, x: Any) -> bytes:
        if isinstance(x, bool | np.bool_):
            return struct.pack("<BB", 1, x)
        if isinstance(x, int | np.integer):
            return struct.pack("<BQ", 2, int(x) & 2**64 - 1)
        return struct.pack("<Bd", 3, x)

    def array(self, x: np.ndarray) -> bytes:
        same = [i for i, a in enumerate(self.arrays) if (a.ctypes.data, a.nbytes) == (x.ctypes.data, x.nbytes)]
        if same and x.nbytes:
            return struct.pack("<BI", 6, same[0])
        assert x.flags.c_contiguous and x.dtype.kind in "fiu", f"{self.name} was given an array of {x.dtype}"
        self.arrays.append(x)
        head = struct.pack("<BIcBQ", 6, len(self.arrays) - 1, x.dtype.kind.encode(), x.dtype.itemsize, x.size)
        return head + x.tobytes()

    def stops(self, arguments: tuple, result: Any) -> bool:
        return self.name in STOPPING and result[STOPPING[self.name]] < len(arguments[0])

    def counting(self, number: int, array: np.ndarray, arguments: tuple, result: Any) -> int:
        """How many bytes of an array count after the call: of what could not be decoded, none."""
        if result is False:
            return 0
        if self.name in CODED and array is self.of(arguments, CODED[self.name]):
            return sum(result if self.name == "rans_encode" else result[0])
        if any(array is self.of(arguments, place) for place in FOUND.get(self.name, ())):
            return result[0] * array.itemsize
        return array.nbytes

    def of(self, arguments: tuple, place: int) -> np.ndarray | None:
        given = np.asarray(arguments[place])
        return next((a for a in self.arrays if a.ctypes.data == given.ctypes.data), None)


def at(address: int, dtype: type, count: int) -> Address:
    memory = (ctypes.c_char * (np.dtype(dtype).itemsize * count)).from_address(address) if count else b""
    return np.frombuffer(memory, dtype=dtype).view(Address)


def addressed(name: str, arguments: tuple) -> tuple:
    """The arguments with arrays where they are addresses: the kernels of rows take those."""

    def matrix(given: tuple) -> tuple:
        address, rows, columns, half = given
        return at(address, np.uint16 if half else np.float32, rows * columns), rows, columns, half

    def side(given: tuple) -> tuple:
        rows, memory, *numbers, mean = given
        return matrix(rows), memory and matrix(memory), *numbers, mean and matrix(mean)

    match name, arguments:
        case "join_rows", (inputs, outputs, keep, threads, scores):
            return side(inputs), side(outputs), keep, threads, at(scores, np.float64, inputs[0][1])
        case "take_rows", (inputs, outputs, chosen, n, threads, taken):
            types = [np.uint16 if s[0][3] else np.float32 for s in (inputs, outputs)]
            to = tuple(at(a, t, n * s[0][2]) for a, t, s in zip(taken, types, (inputs, outputs), strict=True))
            return side(inputs), side(outputs), at(chosen, np.int64, n), n, threads, to
        case "largest", (keys, n, count, places):
            return at(keys, np.float64, n), n, count, at(places, np.int64, count)
    return arguments


@contextmanager
def recorded() -> Iterator[Cases]:
    """Keep all calls that are made within, on the portable kernels."""
    cases = Cases()
    with pytest.MonkeyPatch.context() as patch, kernels.use("portable"):
        for name, function in list(vars(_native).items()):
            if name in kernel_functions():
                patch.setattr(_native, name, lambda *a, n=name, f=function: cases.add(n, f, a))
        yield cases


def kernel_functions() -> set[str]:
    """The names of the module's functions that compute something."""
    functions = {name for name, x in vars(_native).items() if type(x).__name__ == "nb_func"}
    return functions - NO_KERNELS
