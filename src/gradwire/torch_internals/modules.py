"""What is inside of wrappers around modules and functions, and what modules are told while they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
T = TypeVar("T")


def compiled_model(model: Any) -> Any:
    """Return the model that `torch.compile` has wrapped, or the model itself if it is not wrapped.

    Relies on `_orig_mod` of the wrapper, which is in the names of its `state_dict`, too, in torch 2.8 to 2.15. Without
    it, `attach` refuses a compiled model and says that it needs a DistributedDataParallel one.
    """
    return getattr(model, "_orig_mod", model)


def hooks_of(model: nn.parallel.DistributedDataParallel) -> list[str]:
    """Return the names of the communication hooks that a DDP model has.

    Relies on `DistributedDataParallel._comm_hooks`, pairs of a hook and its state in torch 2.8 to 2.15. Without it, an
    error that a model has a hook already does not name the hook.
    """
    return [getattr(hook, "__name__", str(hook)) for hook, _ in getattr(model, "_comm_hooks", ())]


def reduces_in_python(model: nn.parallel.DistributedDataParallel) -> bool:
    """Tell whether torch.compile averages the gradients of a DDP model itself, in which case hooks are not called.

    Relies on `DistributedDataParallel._use_python_reducer`, the same in torch 2.8 to 2.15. Without it, attaching to
    such a model fails with torch's own error.
    """
    return bool(getattr(model, "_use_python_reducer", False))


def held_by(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, nn.Module | None]]:
    """Return the dicts in which a module holds its own parameters and modules, and not copies of them.

    Relies on `torch.nn.Module._parameters` and `_modules`, the same in torch 2.8 to 2.15. Without them it raises
    AttributeError: nobody would notice a layer that was replaced after its model was wrapped.
    """
    return module._parameters, module._modules


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Have torch.compile leave this function alone; a decorator.

    Relies on `torch._disable_dynamo`, the same in torch 2.8 to 2.15. `torch.compiler.disable` is the public name, and
    what is used without it, but imports the compiler at once, which takes a second; this does so at the first call, as
    torch's own optimizers do.
    """
    disable = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable
    disabled: Callable[P, T] = disable(function)
    return disabled


def scale_of(grad_scaler: Any) -> torch.Tensor | None:
    """Return the tensor that holds a GradScaler's scale; None before its first use, and for other scalers.

    Relies on `torch.amp.GradScaler._scale`, the same in torch 2.8 to 2.15. Without it the scaler is asked for its scale
    each time, which on a GPU waits for the GPU.
    """
    scale: torch.Tensor | None = getattr(grad_scaler, "_scale", None)
    return scale


class WatchedModule(nn.Module):
    """A module that is told when it is moved, saved, loaded or replicated.

    Relies on the methods of `torch.nn.Module` that it overrides: torch calls them, and its own modules override them,
    in torch 2.8 to 2.15. Without them a module would not be told: its memory would stay on another device, or be
    missing in checkpoints. tests/torch_internals says so.
    """

    def when_moved(self) -> None:
        """Called after the parameters were moved or cast."""

    def when_saved(self, destination: dict[str, Any], prefix: str) -> None:
        """Called after this module's own tensors were put into a state_dict, where their names begin with `prefix`."""

    def when_loaded(self, state: dict[str, Any], prefix: str, unexpected: list[str], errors: list[str]) -> None:
        """Called after this module's own tensors were loaded; may change the lists of what torch complains about."""

    def when_replicated(self) -> None:
        """Called before `torch.nn.DataParallel` makes a replica."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.when_moved()
        return self

    def _replicate_for_data_parallel(self) -> Any:
        self.when_replicated()
        return super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.when_saved(destination, prefix)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, local: Any, strict: bool, missing: list[str], unexpected: list[str],
        errors: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(state, prefix, local, strict, missing, unexpected, errors)
        self.when_loaded(state, prefix, unexpected, errors)
