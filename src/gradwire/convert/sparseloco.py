"""SparseLoCo's form (arXiv 2508.15706): the k largest magnitudes of every chunk, each as one of 2^bits levels.

The paper sends the 64 largest of 4096 entries. A chunk makes sure that no region of a tensor waits until its entries
are among the largest of all, and smaller chunks do that better: with 3 of 256 and one magnitude, fewer bits lead to
the same loss (docs/sparse.md). Positions and levels are those of M22 with m = 0, whose levels are the means of the
entries in their cells; so frames are the usual sparse ones, and do not tell that entries were chosen by chunks.
"""

from __future__ import annotations

import torch

from gradwire import kernels
from gradwire.convert.conversion import Conversion, require_finite
from gradwire.convert.m22 import M22
from gradwire.errors import SpecError

LARGEST_CHUNK = 1 << 20


class SparseLoCo(M22):
    """The k largest magnitudes of every chunk of consecutive entries, with 2^bits levels for the values."""

    families = ("quantize", "sparse", "positions")

    def __init__(self, k: int = 3, chunk: int = 256, bits: int = 1, positions: str = "auto"):
        if not 1 <= k < chunk <= LARGEST_CHUNK:
            raise SpecError(f"k={k} of chunk={chunk}: a chunk has up to {LARGEST_CHUNK} entries, and k are fewer")
        super().__init__(p=k / chunk, bits=bits, m=0, positions=positions)
        self.of_chunk, self.chunk = k, chunk

    def count(self, elements: int) -> int:
        """Return how many entries of a tensor are sent at most."""
        return elements // self.chunk * self.of_chunk + min(self.of_chunk, elements % self.chunk)

    def select(self, conversion: Conversion, one_sign: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and u of the chosen entries, and leave u of all entries in memory_out."""
        conversion.require_finite()
        u = conversion.compensated()
        require_finite(u)  # a memory that is not would spoil the frame
        if conversion.memory_out is not None:
            conversion.memory_out.copy_(u)
        chosen = kernels.largest_of_chunks(u, self.chunk, self.of_chunk)
        return chosen, u[chosen]
