"""What programs tell torch that is no business of ours: default types and devices, and modes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def numpys_errors() -> Iterator[None]:
    """What overflows, underflows or is divided by zero raises: programs that look for a NaN ask numpy for it."""
    with np.errstate(all="raise"):
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: default_device("meta"),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "numpy's errors": numpys_errors,
}


def forget() -> None:
    """Empty all caches: a tensor in one of them may have been made under other settings."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "gradwire":
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
