"""The kernels of quantizers with a few levels in each bucket (BinGrad, ORQ, QSGD, …)."""

from __future__ import annotations

__all__: list[str] = []
