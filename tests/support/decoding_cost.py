"""What a call costs: the memory that it takes beyond what was there, and CPU time of all threads.

Memory is the peak of the resident set, which the kernel keeps (VmHWM) and forgets when it is told to: it sees what
Python, numpy, torch and native code touch alike. Free memory is given back first, so that none of it can be used again
unseen. It is exact to some hundred kilobytes, since the kernel counts pages in batches.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from typing import NamedTuple

_libc = ctypes.CDLL(None)
_MMAP_THRESHOLD = -3  # of mallopt
_SET_THP_DISABLE = 41  # of prctl


class Cost(NamedTuple):
    """Peak bytes beyond those before the call, and CPU seconds."""

    memory: int
    seconds: float


def can_measure() -> bool:
    """Whether this system tells and resets the peak of the resident set, as Linux with glibc does."""
    try:
        _reset_peak()
        return hasattr(_libc, "malloc_trim") and _kilobytes("VmHWM") > 0
    except (OSError, KeyError):
        return False


def give_back_at_once(smallest: int = 1 << 16) -> None:
    """Have free memory of this size returned to the system at once, so that none that is not in use is counted."""
    _libc.mallopt(_MMAP_THRESHOLD, smallest)


def small_pages_only() -> None:
    """Have this process use no huge pages: one of them counts 2 MB where a few bytes are touched."""
    _libc.prctl(_SET_THP_DISABLE, 1, 0, 0, 0)


def cost_of(call: Callable[[], object], small: bool = False) -> Cost:
    """Make the call and return what it cost; its result is dropped, and what it raises is passed on.

    A `small` call takes little memory, so that there is no need to look for free memory first.
    """
    if not small:
        gc.collect(0)
        _libc.malloc_trim(0)
    _reset_peak()
    before, start = _kilobytes("VmRSS"), time.process_time()
    try:
        call()
    finally:
        seconds, peak = time.process_time() - start, _kilobytes("VmHWM")
        cost = Cost(max(0, peak - before) * 1024, seconds)
    return cost


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _kilobytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))
