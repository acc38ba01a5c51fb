"""What torchft waits for: an allreduce under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


class SumUnderWay(dist.Work):
    """A tensor that is being replaced by its sum over all replicas; if that fails, `wait` and the future say so."""

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
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch says that it takes a result

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
        """Wait until the tensor is the sum, and return True; AggregateError if a replica was lost."""
        self._drain()
        self._over.wait(timeout.total_seconds() if timeout else None)
        if self._error is not None:
            raise self._error
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
