"""What a kernel of one device asks of its tensors; where they are otherwise, the reference takes its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

CONDITION = "condition"  # the attribute of a marked kernel


def where(condition: Callable[[Any], bool]) -> Callable[[Kernel], Kernel]:
    """Mark a kernel as one for those tensors for which `condition` is true.

    `gradwire.kernels.dispatch` asks it about each argument that decides (`DECIDED_BY`; the first tensor, where nothing
    is said there). A direct call of the kernel does not ask.
    """

    def marked(kernel: Kernel) -> Kernel:
        setattr(kernel, CONDITION, condition)
        return kernel

    return marked
