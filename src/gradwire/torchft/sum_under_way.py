"""What torchft waits for: an allreduce under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class SumUnderWay(dist.Work):
    """A tensor that is being replaced by its sum over all replicas.

    `wait` returns False if that has failed, and the error is in the future. It does not raise it: torchft's DDP asks for
    the future after `wait`, and would end the program if `wait` had raised.
    """

    def __init__(self, tensor: torch.Tensor, messages: int, drain: Callable[[], None]):
        """Begin with so many messages under way; `drain` finishes them, and is called by whoever waits."""
        super().__init__()
        self.tensor = tensor
        self._left, self._drain = messages, drain
        self._over, self._future = threading.Event(), torch.futures.Future[list[torch.Tensor]]()
        self._error: BaseException | None = None

    def message_came(self) -> bool:
        """Count a message, and tell whether it was the last one."""
        self._left -= 1
        return self._left == 0

    def succeed(self) -> None:
        """The tensor is the sum now."""
        self._over.set()
        self._future.set_result([self.tensor])

    def fail(self, error: Exception) -> None:
        """The tensor will not be the sum; its entries may be anything."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        """Tell whether it is over, well or not."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Tell whether the tensor is the sum."""
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error, if there was one."""
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over, and return whether the tensor is the sum."""
        self._drain()
        self._over.wait(timeout.total_seconds() if timeout else None)
        return self.is_success()

    def synchronize(self) -> None:
        """Wait until it is over."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait until it is over: what was written on a GPU is there then."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait until it is over, and return the future that has the tensor, or the error."""
        self._drain()
        return self._future


class PlainWork(dist.Work):
    """A collective of another process group, whose errors are in its future alone, as those of `SumUnderWay` are."""

    def __init__(self, work: dist.Work):
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over, and return whether it went well."""
        with suppress(RuntimeError):
            return bool(self._work.wait(timeout) if timeout else self._work.wait())
        return False

    def is_completed(self) -> bool:
        """Tell whether it is over, well or not."""
        return self._work.is_completed()

    def synchronize(self) -> None:
        """Let the current stream of a GPU wait until it is over."""
        self._work.synchronize()

    def block_current_stream(self) -> None:
        """Let the current stream of a GPU wait until it is over."""
        self._work.block_current_stream()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the collective."""
        return self._work.get_future()
