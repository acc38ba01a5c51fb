"""Flower's arrays and torch's tensors, without more copies than it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from .. import wire
from ..errors import GradwireError

NUMPY = "numpy.ndarray"
_SUPPORTED = {str(dtype).removeprefix("torch."): dtype for dtype in wire.DTYPES}


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
    """Whether all arrays are NumPy's, of dtypes that frames can hold."""
    return all(array.stype == NUMPY and array.dtype in _SUPPORTED for array in arrays)


def tensors(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    return {name: tensor(name, array) for name, array in arrays.items()}


def tensor(name: str, array: Array) -> torch.Tensor:
    try:
        values = array.numpy()
        if array.dtype not in _SUPPORTED or str(values.dtype) != array.dtype or values.shape != tuple(array.shape):
            raise ValueError(
                f"{array.dtype} of shape {tuple(array.shape)}, but its data is {values.dtype} {values.shape}"
            )
    except (ValueError, TypeError, OSError, EOFError) as error:
        raise GradwireError(f"the array {name!r} cannot be used ({error})") from error
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def array(values: torch.Tensor) -> Array:
    own = values.clone()
    return Decoded(own, own.clone)
