"""Sparse binary compression, SBC (arXiv 1805.08768): one side of the tensor, and one value for all of it.

With k = ⌈p·d⌉: μ⁺ is the mean of the k largest entries, μ⁻ the mean magnitude of the k smallest. If μ⁺ ≥ μ⁻ the
positions of those largest travel with the value +μ⁺, else those of the smallest with −μ⁻: no sign bits, one float.
Where fewer than k entries are positive (negative), the mean is of those there are; an empty side has mean 0.
"""

from __future__ import annotations

import torch

from gradwire import kernels
from gradwire.convert.conversion import Conversion
from gradwire.convert.sparse import Sparse, one_value
from gradwire.convert.sparse_values import ONE_VALUE


class SBC(Sparse):
    """The largest entries of one sign, all with their mean value."""

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        chosen, values = self.select(conversion, one_sign=True)
        mean = kernels.mean_magnitude(values)
        raw, sent = one_value(-mean if bool((values[:1] < 0).any()) else mean, conversion.dtype)
        return self.write(conversion, out, chosen, ONE_VALUE, raw, sent)
