"""Which K rows of a batch make the weight gradient: topK, weightedK or randK (arXiv 2110.09164, section III)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradwire import kernels
from gradwire.errors import SpecError, unknown_name

POLICIES = ("topk", "weightedk", "randk")


@dataclass(frozen=True)
class Choice:
    """How many rows, as a number (int) or as a share of the batch (float), by which policy, and of what: of inputs less
    their mean, which then goes through exactly, or of inputs as they are.
    """

    k: int | float
    policy: str = "topk"
    centre: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int | float):
            raise SpecError(f"k must be a number of rows (int) or a share of them (float), not {self.k!r}")
        if isinstance(self.k, int) and self.k < 1:
            raise SpecError(f"k={self.k}: give at least one row, or a share of them such as 0.25")
        if isinstance(self.k, float) and not 0 < self.k <= 1:
            raise SpecError(f"k={self.k}: a share of the rows is above 0 and at most 1; a number of rows is an int")
        if not isinstance(self.policy, str) or self.policy.lower() not in POLICIES:
            raise unknown_name("policy", str(self.policy), POLICIES)
        if not isinstance(self.centre, bool):
            raise SpecError(f"centre must be True or False, not {self.centre!r}")
        object.__setattr__(self, "policy", self.policy.lower())

    def count(self, rows: int) -> int:
        """K for a batch of so many rows: at least one, at most all."""
        if isinstance(self.k, int):
            return min(rows, self.k)
        return min(rows, max(1, math.ceil(round(self.k * rows, 6))))  # 0.07·100 is a little more than 7

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """The indexes of the chosen rows, ascending; `scores` are the norms of their outer products."""
        rows = scores.shape[0]
        count = self.count(rows)
        if count == rows:
            return torch.arange(count, device=scores.device)
        return kernels.largest(self._keys(scores), count)

    def _keys(self, scores: torch.Tensor) -> torch.Tensor:
        """Keys whose largest K are the choice."""
        if self.policy == "topk":
            return scores
        uniform = torch.rand_like(scores)
        if self.policy == "randk":
            return uniform
        # The K largest of log p + Gumbel noise are K draws without replacement with p ∝ scores².
        return 2 * scores.log() - uniform.log().neg().log()
