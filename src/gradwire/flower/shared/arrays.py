"""Conversion between Flower's arrays and torch's tensors, with as few copies as possible."""

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


class DecodedArray(Array):
    """A Flower array that is serialized to bytes only when somebody asks for `data`.

    `make` returns the tensor; it is called for every call of `numpy`, so that each caller may change what he gets, as
    with Flower's own arrays. The tensor has the dtype and the shape of `template`.
    """

    def __init__(self, template: torch.Tensor, make: Callable[[], torch.Tensor]):
        name = str(template.dtype).removeprefix("torch.")
        self.__dict__.update(_make=make, dtype=name, shape=tuple(template.shape), stype=NUMPY)

    def numpy(self) -> np.ndarray:
        """Return the entries as an array that the caller may change."""
        return super().numpy() if "data" in self.__dict__ else self.__dict__["_make"]().numpy()

    def __getattr__(self, name: str) -> Any:
        if name != "data" or "_make" not in self.__dict__:
            raise AttributeError(name)
        self.data = Array.from_numpy_ndarray(self.numpy()).data
        return self.data

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies are ordinary arrays of Flower."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


DecodedArray.__qualname__ = Array.__qualname__  # Flower finds the class of an object's bytes by this name


def record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record of these very arrays. Flower's constructor would serialize every `DecodedArray` among them."""
    result = ArrayRecord()
    for name, array in arrays.items():
        result[name] = array
    return result


def supported(arrays: Iterable[Array]) -> bool:
    """Whether all arrays are NumPy arrays with dtypes and ranks that frames can hold."""
    return all(
        array.stype == NUMPY and array.dtype in _SUPPORTED and len(array.shape) <= headers.MAX_RANK for array in arrays
    )


def is_like(array: Array, sent: Array) -> bool:
    """Whether an array is of the kind that a client may return for the one that it was sent.

    Numbers may have another type, since servers average integers to floats, and some make fp64 of fp32; but one that
    frames can hold: a mean with others would have that type, and the next client could not read it.
    """
    kinds = ("bool", "int", "uint", "float")
    if (array.stype, array.dtype) == (sent.stype, sent.dtype):
        return True
    return supported((array,)) and sent.stype == NUMPY and sent.dtype.startswith(kinds)


def reals(name: str, array: Array) -> torch.Tensor | None:
    """Return the entries of an array as numbers that can be compared, also of types that no frame holds.

    Complex entries are pairs of reals, and types that torch does not know are rounded to fp64. None for what is no
    number. Raises a GradwireError as `values` does.
    """
    if array.stype != NUMPY:
        return None
    entries = values(name, array)
    if entries.dtype.kind not in "biufc":
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        if entries.dtype.kind == "c":
            entries = entries.astype(np.complex64 if array.dtype == "complex64" else np.complex128)
            entries = np.stack((entries.real, entries.imag), axis=-1)
        elif array.dtype not in _SUPPORTED:
            entries = entries.astype(np.float64)
    return torch.from_numpy(entries if entries.flags.writeable else entries.copy())


def tensors(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """Return all arrays of a record as tensors; see `tensor`."""
    return {name: tensor(name, array) for name, array in arrays.items()}


def tensor(name: str, array: Array) -> torch.Tensor:
    """Return an array as a tensor, which may share memory with it. Raises a GradwireError for what no frame holds."""
    entries = values(name, array)
    if array.dtype not in _SUPPORTED:
        raise GradwireError(f"the array {name!r} is {array.dtype}, which no frame holds")
    return torch.from_numpy(entries if entries.flags.writeable else entries.copy())


def values(name: str, array: Array) -> np.ndarray:
    """Return the entries of an array without a copy.

    Raises a GradwireError if its bytes do not have the dtype and the shape that the array states. NumPy's own reader
    is not used, since it allocates whatever the bytes claim.
    """
    try:
        entries = array.numpy() if isinstance(array, DecodedArray) else _entries(array)
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
    """Return a tensor as an array; later changes of the tensor do not show in it."""
    private = values.clone()
    return DecodedArray(private, private.clone)
