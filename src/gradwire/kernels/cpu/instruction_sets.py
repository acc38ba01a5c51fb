"""The instruction sets of the native kernels: portable, and those with vectors that this machine has."""

from __future__ import annotations

from gradwire import _native

__all__ = ["instruction_sets", "use"]


def instruction_sets() -> list[str]:
    """Return the names of those that this machine has, the best last; the best is in use at first."""
    return _native.available()


def use(name: str) -> None:
    """Run the native kernels of all threads on this instruction set from now on; for tests and benchmarks."""
    if not _native.use(name):
        raise ValueError(f"this machine has no {name!r} kernels; it has {', '.join(instruction_sets())}")
