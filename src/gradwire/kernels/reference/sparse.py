"""The kernels of sparse codecs: selection, and codes of positions."""

from __future__ import annotations

__all__: list[str] = []
