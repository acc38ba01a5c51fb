"""A program that was started alone, so that there is nobody to send gradients to: its callbacks do nothing."""

from __future__ import annotations

import warnings


def is_alone(processes: int) -> bool:
    """Tell whether there is one process, and warn if so: for callbacks of a framework."""
    if processes == 1:
        warnings.warn(
            "there is one process, and nobody to send gradients to: Compress does nothing", UserWarning, stacklevel=3
        )
    return processes == 1
