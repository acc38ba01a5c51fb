"""The kernels of evenly spaced grids (ecq)."""

from __future__ import annotations

__all__: list[str] = []
