"""All tests under another default of torch: `pytest --defaults float64`, and its like.

A test would fail for reasons of its own if its tensors became float64, or had no values. So a default dtype and a
default device hold only while gradwire runs: every function of gradwire, and every method of its classes, sets the
default when a test calls it, and sets it back when it returns. What a test is given to call, such as `torch.randn`,
sees torch's ordinary defaults. The modes (deterministic, inference, threads) hold for a test's whole call.

No backward pass is possible in inference mode: a test is skipped when it comes to its first.

What gradwire calls back is a test's own code, and has to say so if it makes tensors: `@odd_defaults.ordinary()`.

Programs that tests start do not take part, nor do `gradwire.cli` and `gradwire.tasks`, which are programs themselves.
Generators and context managers take part where gradwire itself uses them. Ranks of rank_pool.py do as the test does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

from support.torch_settings import default_dtype, deterministic

PROGRAMS = ("gradwire.cli", "gradwire.tasks", "gradwire.flower.one_process", "gradwire.kernels.cuda")
ODD_THREADS = 3
CACHED = type(functools.cache(len))


class Shared:
    """A setting of the whole process: whoever comes first sets it, and whoever leaves last sets it back."""

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]) -> None:
        self._setting, self._lock, self._inside, self._undo = setting, threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._undo.enter_context(self._setting())
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._undo.close()


@contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(ODD_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def inference() -> Iterator[None]:
    def skip(*_: object, **__: object) -> None:
        pytest.skip("no backward pass is possible in inference mode")

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(torch.autograd, "backward", skip)  # which Tensor.backward calls, too
        patch.setattr(torch.autograd, "grad", skip)
        yield


WITHIN_GRADWIRE: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float64": Shared(lambda: default_dtype(torch.float64)),
    "bfloat16": Shared(lambda: default_dtype(torch.bfloat16)),
    "device": lambda: torch.device("meta"),  # the default device of this thread, as set_default_device sets it
}
WHOLE_CALLS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "deterministic": deterministic,
    "inference": inference,
    "threads": threads,
}
NAMES = [*WITHIN_GRADWIRE, *WHOLE_CALLS]
chosen: str | None = None  # of the option --defaults


def choose(name: str | None) -> None:
    """Before test files are imported, since these take functions out of gradwire's modules."""
    global chosen  # noqa: PLW0603
    chosen = name
    if name in WITHIN_GRADWIRE:
        Entrances(WITHIN_GRADWIRE[name]).open_all()


@contextmanager
def ordinary() -> Iterator[None]:
    """What holds for a test's own code where gradwire calls it back, such as a client's training: also a decorator."""
    dtype = default_dtype(torch.float32) if chosen in ("float64", "bfloat16") else nullcontext()
    with dtype, torch.device("cpu") if chosen == "device" else nullcontext():
        yield


def around_call() -> AbstractContextManager[object]:
    """What holds for the whole of a test, or of a rank's scenario."""
    return WHOLE_CALLS[chosen]() if chosen in WHOLE_CALLS else nullcontext()


class Entrances:
    """Puts a function that sets the default in the place of every function of gradwire."""

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]) -> None:
        self._setting, self._here = setting, threading.local()
        self._made: dict[Any, Callable[..., Any]] = {}

    def open_all(self) -> None:
        modules = [module for module in gradwire_modules() if not module.__name__.startswith(PROGRAMS)]
        for module in modules:
            for name, value in list(vars(module).items()):
                if not is_gradwires(value) or name.startswith("__"):
                    continue
                if inspect.isclass(value):
                    self._open_class(value)
                else:
                    setattr(module, name, self._entrance(value))

    def _open_class(self, owner: type) -> None:
        if issubclass(owner, BaseException) or owner in self._made:
            return
        self._made[owner] = owner
        for name, value in list(vars(owner).items()):
            if name.startswith("__") and name not in ("__init__", "__call__", "__enter__", "__exit__"):
                continue
            if isinstance(value, staticmethod | classmethod) and is_gradwires(value.__func__):
                setattr(owner, name, type(value)(self._entrance(value.__func__)))
            elif isinstance(value, property) and is_gradwires(value.fget):
                setattr(owner, name, property(self._entrance(value.fget), value.fset, value.fdel, value.__doc__))
            elif inspect.isfunction(value) and is_gradwires(value):
                setattr(owner, name, self._entrance(value))

    def _entrance(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(inspect.unwrap(function)):
            return function
        if function not in self._made:
            self._made[function] = entrance = self._make(function)
            self._made[entrance] = entrance
        return self._made[function]

    def _make(self, function: Callable[..., Any]) -> Callable[..., Any]:
        here, setting = self._here, self._setting

        @functools.wraps(function)
        def entrance(*args: Any, **named: Any) -> Any:
            # gradwire's own threads are daemons, and their functions do not return while they live.
            if getattr(here, "inside", False) or threading.current_thread().daemon:
                return function(*args, **named)
            here.inside = True
            try:
                with setting():
                    return function(*args, **named)
            finally:
                here.inside = False

        for name in ("cache_clear", "cache_info"):
            if hasattr(function, name):
                setattr(entrance, name, getattr(function, name))
        return entrance


def is_gradwires(value: object) -> bool:
    """Whether it is a function, a cached function or a class that gradwire defines, and no program."""
    module = getattr(value, "__module__", None) or ""
    known = inspect.isfunction(value) or inspect.isclass(value) or isinstance(value, CACHED)
    return known and module.startswith("gradwire.") and not module.startswith(PROGRAMS)


def gradwire_modules() -> list[ModuleType]:
    """All that can be imported: some need a package that is not always there."""
    import gradwire

    for module in pkgutil.walk_packages(gradwire.__path__, "gradwire.", onerror=lambda _: None):
        if not module.name.startswith((*PROGRAMS, "gradwire.integrations")):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                assert not (error.name or "").startswith("gradwire"), error
    return [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "gradwire"]
