"""The kernels of evenly spaced grids (ecq), by the native module."""

from __future__ import annotations

__all__: list[str] = []
