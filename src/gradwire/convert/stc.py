"""Sparse ternary compression, STC (arXiv 1903.02891): the k largest magnitudes, each as μ·sign(u).

μ is the mean of those magnitudes; one sign bit per position.
"""

from __future__ import annotations

import numpy as np
import torch

from gradwire import kernels
from gradwire.convert.conversion import Conversion, in_host_memory
from gradwire.convert.sparse import Sparse, one_value
from gradwire.convert.sparse_values import ONE_MAGNITUDE


class STC(Sparse):
    """The largest magnitudes, all with their mean magnitude and their signs."""

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        chosen, values = self.select(conversion)
        raw, magnitude = one_value(kernels.mean_magnitude(values), conversion.dtype)
        magnitude, negative = magnitude.to(values.device), values < 0
        signs = kernels.pack_bits(in_host_memory(negative).view(np.uint8), 1)
        return self.write(
            conversion,
            out,
            chosen,
            ONE_MAGNITUDE,
            raw + signs,
            torch.where(negative, -magnitude, magnitude),
        )
