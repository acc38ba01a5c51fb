"""Many streams of symbols coded at once, by the native module: side by side, and on all threads."""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native
from gradwire.kernels.cpu.native_arguments import as_bytes
from gradwire.kernels.reference.grid import LOGS

__all__ = ["class_bits", "code_classes", "code_symbols", "read_classes", "read_symbols"]


def class_bits(counts: np.ndarray) -> float | None:
    """Choose a coding for each class."""
    return _native.class_bits(counts.reshape(-1), len(counts), LOGS)


def code_classes(streams: np.ndarray, counts: np.ndarray) -> bytes | None:
    """Choose codings, and code all classes."""
    return _native.code_classes(streams, counts.reshape(-1), len(counts), LOGS, torch.get_num_threads()).tobytes()


def code_symbols(symbols: np.ndarray, alphabet: int, zero_symbol: int) -> bytes | None:
    """Count, choose and code."""
    return _native.code_symbols(symbols, alphabet, zero_symbol, LOGS, torch.get_num_threads()).tobytes()


def read_classes(
    data: memoryview, counts: np.ndarray, largest: int, streams: np.ndarray, zeros: np.ndarray
) -> int | None:
    """Decode all classes side by side."""
    good, used = _native.read_classes(as_bytes(data), counts, largest, streams, zeros, torch.get_num_threads())
    return used if good else None


def read_symbols(data: memoryview, alphabet: int, zero_symbol: int, symbols: np.ndarray) -> bool | None:
    """Decode one stream."""
    return _native.read_symbols(as_bytes(data), alphabet, zero_symbol, symbols, torch.get_num_threads()) or None
