"""What tests of kernels for GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cuda_on_cpu import cuda_on_cpu


@pytest.fixture(scope="module")
def kernels_on_cpu() -> Iterator[None]:
    """All kernels of a file's tests run on the CPU."""
    with cuda_on_cpu():
        yield
