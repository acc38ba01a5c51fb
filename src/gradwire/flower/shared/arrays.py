"""Flower's arrays and torch's tensors, without more copies than it takes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.lib.format as npy
import torch
from flwr.app import Array, ArrayRecord

from gradwire.errors import GradwireError
from gradwire.frame import headers

NUMPY = "numpy.ndarray"
_SUPPORTED = {str(dtype).removeprefix("torch."): dtype for dtype in headers.DTYPES}


class Decoded(Array):
    """An array of which no bytes are made unless somebody asks for them.

    `make` gives every caller of `numpy` an array of his own, as Flower's does; it is of the same kind as `like`.
    """

    def __init__(self, like: torch.Tensor, make: Callable[[], torch.Tensor]):
        name = str(like.dtype).removeprefix("torch.")
        self.__dict__.update(_make=make, dtype=name, shape=tuple(like.shape), stype=NUMPY)

    def numpy(self) -> np.ndarray:
        return super().numpy() if "data" in self.__dict__ else self.__dict__["_make"]().numpy()

    def __getattr__(self, name: str) -> Any:
        if name != "data" or "_make" not in self.__dict__:
            raise AttributeError(name)
        self.data = Array.from_numpy_ndarray(self.numpy()).data
        return self.data

    def __reduce__(self) -> tuple[Any, ...]:
        """Elsewhere, and in copies, it is an ordinary array."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


Decoded.__qualname__ = Array.__qualname__  # by which Flower knows what to make of an object's bytes


def record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """A record of these very arrays: Flower's constructor would make bytes of those that are decoded."""
    result = ArrayRecord()
    for name, array in arrays.items():
        result[name] = array
    return result


def supported(arrays: Iterable[Array]) -> bool:
    """Whether all arrays are NumPy's, of dtypes and ranks that frames can hold."""
    return all(
        array.stype == NUMPY and array.dtype in _SUPPORTED and len(array.shape) <= headers.MAX_RANK for array in arrays
    )


def tensors(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    return {name: tensor(name, array) for name, array in arrays.items()}


def tensor(name: str, array: Array) -> torch.Tensor:
    entries = values(name, array)
    if array.dtype not in _SUPPORTED:
        raise GradwireError(f"the array {name!r} is {array.dtype}, which no frame holds")
    return torch.from_numpy(entries if entries.flags.writeable else entries.copy())


def values(name: str, array: Array) -> np.ndarray:
    """The entries of an array, without a copy, if it is what it says it is; else a GradwireError.

    NumPy's own reader allocates whatever the bytes say of their shape.
    """
    try:
        entries = array.numpy() if isinstance(array, Decoded) else _entries(array)
        if str(entries.dtype) != array.dtype or entries.shape != tuple(array.shape):
            raise ValueError(
                f"{array.dtype} of shape {tuple(array.shape)}, but its data is {entries.dtype} {entries.shape}"
            )
    except Exception as error:  # a hostile header can raise nearly anything
        raise GradwireError(f"the array {name!r} cannot be used ({str(error)[:200]})") from error
    return entries


def _entries(array: Array) -> np.ndarray:
    if array.stype != NUMPY:
        raise ValueError(f"its kind is {array.stype}")
    file = io.BytesIO(array.data)
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    start, count = file.tell(), math.prod(shape)
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"no array of {dtype}")
    if count * dtype.itemsize != len(array.data) - start:
        raise ValueError(f"{len(array.data) - start} bytes for {dtype} of shape {shape}")
    flat = np.frombuffer(array.data, dtype=dtype, count=count, offset=start) if count else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if by_columns else "C")


def array(values: torch.Tensor) -> Array:
    own = values.clone()
    return Decoded(own, own.clone)
