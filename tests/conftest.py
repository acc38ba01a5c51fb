"""What all tests share: the kernels they run on, and which of them are slow.

pytest                          everything but the slow tests
pytest --slow                   the slow ones too: tensors of more than 2³¹ entries, up to 12 GB of memory
GRADWIRE_NO_NATIVE=1 pytest     without the native module; otherwise its absence is a failure
HYPOTHESIS_PROFILE=explore      new random examples each time, and many more of them
pytest -n 2                     two tests at a time, as `make test` has it; of those with ranks, one
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist

from support.helpers import BACKENDS, use_backend

torch.set_num_threads(1)  # tensors are small here, and tests may run beside each other
hypothesis.settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: needs much memory or time; runs only with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One worker runs all modules that launch ranks, so that ranks, which have timeouts, do not compete with other
    ranks. All other tests go to whoever is free, but those that share something stay together: a module with fixtures
    of its own for all tests, and tests that differ in parameters alone, of which many are done sooner than handed out.
    """
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def text(path: str) -> str:
        return (config.rootpath / path).read_text()

    class RanksTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if "launch(" in text(path):
                return "ranks"
            return path if 'scope="module"' in text(path) else nodeid.partition("[")[0]

    return RanksTogether(config, log)


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once on the reference kernels, and once on each instruction set of the native ones."""
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # DDP models keep the group
    dist.destroy_process_group()
