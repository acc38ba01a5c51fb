"""Complex tensors as pairs of reals: memories, momentum and frames know real entries alone."""

from __future__ import annotations

import torch


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a complex tensor with a last dimension of two, real and imaginary part; others as they are.

    A complex tensor whose conjugation is still to be done is copied.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
