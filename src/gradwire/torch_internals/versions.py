"""The versions of torch that gradwire was tried with, and the error that names them."""

from __future__ import annotations

import torch

from gradwire.errors import GradwireError

OLDEST, NEWEST = "2.8", "2.15"  # scripts/torch_matrix.py runs the tests with them, and with the one in constraints.txt


def gone(interface: str, oldest: str = OLDEST) -> GradwireError:
    """Return the error that says which private name of torch is missing, and with which versions gradwire works."""
    return GradwireError(
        f"this is torch {torch.__version__}, which has no {interface} as gradwire knows it: install torch {oldest} to "
        f"{NEWEST}, or a newer gradwire"
    )
