"""What all tests share: two tiers, the kernels they run on, and the ranks that serve them.

pytest                          everything but the slow tests
pytest --quick                  the quick tier: `make test`
pytest --rest                   what the quick tier leaves out; `make test-all` runs one after the other
pytest --slow                   the slow ones too: tensors of more than 2³¹ entries, up to 12 GB of memory
pytest -k name                  one test, or one scenario with ranks, by its name, of whichever tier
pytest -k name --case text      of a loop over many cases, those whose names contain the text
GRADWIRE_NO_NATIVE=1 pytest     without the native module; otherwise its absence is a failure
pytest --gpu                    what a machine with a GPU should run: `make test-gpu`
HYPOTHESIS_PROFILE=explore      new random examples each time, and many more of them
pytest -n 2                     two tests at a time
pytest --defaults float64       under another default of torch: float64, bfloat16, device (meta), deterministic,
                                inference or threads; support/odd_defaults.py says what each of them covers

The quick tier has every promise once: every family of kernels on the reference and on the best instruction set, every
golden frame, every entry point with real ranks, every main fault. A test, a parameter or a scenario that repeats a
promise (on another instruction set, with another recipe, at length) is marked `@pytest.mark.thorough`, which leaves it
to the rest. Loops over many cases are one test, which lists every case that failed by its name (support/cases.py); of
loops over combinations, the quick tier takes a diagonal, and the rest all others.

Scenarios with ranks are in support/rank_pool.py.

Tests that need a GPU are marked `@pytest.mark.gpu`, or lie in tests/gpu, and are skipped where there is none. `--gpu`
runs them and all others whose way depends on whether torch sees a GPU. It needs torch, numpy and pytest alone: without
an index to install from, files whose packages are missing are skipped. Without pytest, tests/gpu/run.py runs tests/gpu.
"""

from __future__ import annotations

import functools
import gc
import os
import re
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import cases, odd_defaults
from support.helpers import BACKENDS, use_backend
from support.rank_pool import RankPool

torch.set_num_threads(1)  # tensors are small here, and tests may run beside each other
with suppress(ImportError):  # tests that use it then fail, or are skipped with --gpu
    import hypothesis

    hypothesis.settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
    hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# They wait for processes of their own; test_ddp.py stands for all scenarios with ranks, which one worker runs.
LONGEST = ["test_flower_deployment.py", "test_ddp.py", "test_train.py", "test_federated.py", "test_examples.py",
           "test_every_recipe.py", "test_triton_rows.py"]  # fmt: skip
TESTS = Path(__file__).parent
SEE_GPUS = ("gpu", "distributed", "fsdp", "backward")  # folders whose tests depend on whether torch sees a GPU
REQUIRED = ("gradwire", "support", "torch", "numpy")  # what no test can do without


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the thorough tests")
    parser.addoption("--rest", action="store_true", help="run only what --quick leaves out")
    parser.addoption("--case", default="", help="of loops over cases, run only those whose names contain this")
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
    parser.addoption("--gpu", action="store_true", help="run only what a machine with a GPU should run")
    parser.addoption("--defaults", choices=odd_defaults.NAMES, help="run everything under another default of torch")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: repeats a promise of the quick tier at length; --quick leaves it out")
    cases.wanted = config.getoption("--case")
    odd_defaults.choose(config.getoption("--defaults"))
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where torch sees none")
    config.addinivalue_line("markers", "slow: needs much memory or time; runs only with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    functions = set()
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        function = item.path, getattr(item, "originalname", item.name)
        if folder == "gpu_sources" and function in functions:  # each takes a while on the CPU: the first stands for all
            item.add_marker(pytest.mark.thorough)
        functions.add(function)
        if folder == "gpu":  # not marked there, since those files do without pytest
            item.add_marker(pytest.mark.gpu)
        needs_gpu = item.get_closest_marker("gpu") is not None
        if needs_gpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if is_thorough(item):
            wanted = not config.getoption("--quick")
        else:
            wanted = not config.getoption("--rest") or cases.is_split(item.function)
        wanted &= not config.getoption("--gpu") or needs_gpu or folder in SEE_GPUS
        (kept if wanted else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=starting_place)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """With --gpu, skip files whose packages are not installed: elsewhere that is a failure."""
    report = yield
    if report.failed and collector.config.getoption("--gpu"):
        missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr))
        if missing and missing[1] not in REQUIRED:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {missing[1]} is not installed")
    return report


def starting_place(item: pytest.Item) -> int:
    """What takes longest comes first, so that two workers end at the same time."""
    file = item.path.name
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def is_thorough(item: pytest.Item) -> bool:
    return item.get_closest_marker("thorough") is not None or item.get_closest_marker("slow") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Say which of its combinations a loop over cases is to take in this tier."""
    split = not is_thorough(item) and cases.is_split(item.function)
    quick, rest = (item.config.getoption(option) for option in ("--quick", "--rest"))
    cases.part = "" if not split else cases.DIAGONAL if quick else cases.OTHERS if rest else ""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Set the mode of --defaults for the test itself; defaults that hold within gradwire alone need nothing here."""
    with odd_defaults.around_call():
        return (yield)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One worker runs all scenarios with ranks, so that ranks are started once, and do not compete with other ranks.
    All other tests go to whoever is free, but those that share something stay together: a module with fixtures of its
    own for all tests, and tests that differ in parameters alone.
    """
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def text(path: str) -> str:
        return (config.rootpath / path).read_text()

    config.option.loadscopereorder = False  # what takes longest has been put first

    class SharedTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if "rank_pool import" in text(path) or "fault_trials import" in text(path):
                return "ranks"
            return path if 'scope="module"' in text(path) else nodeid.partition("[")[0]

    return SharedTogether(config, log)


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in (BACKENDS[0], BACKENDS[-1]) else [pytest.mark.thorough])
        for name in BACKENDS
    ],
    scope="module",
)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once on the reference kernels, and once on each instruction set of the native ones."""
    with use_backend(request.param):
        yield request.param


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for scenarios: started when they are needed, and then there for all tests of the session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # DDP models keep the group
    dist.destroy_process_group()
