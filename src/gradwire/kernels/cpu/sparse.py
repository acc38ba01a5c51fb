"""The kernels of sparse codecs: selection, and codes of positions, by the native module."""

from __future__ import annotations

__all__: list[str] = []
