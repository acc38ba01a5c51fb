"""What tests of gradwire.torchft share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    from support.torchft_groups import shut_down_all  # tests are skipped where torchft is not installed

    shut_down_all()
