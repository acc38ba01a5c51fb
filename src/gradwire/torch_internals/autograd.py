"""The backward pass that is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from gradwire.torch_internals.versions import gone


def in_backward() -> bool:
    """Tell whether this thread is inside a backward pass.

    Relies on `torch._C._current_graph_task_id`, which is -1 outside of one in torch 2.8 to 2.15. Without it it raises a
    GradwireError: DataParallel could not tell a backward pass that failed from one that is still running.
    """
    task = getattr(torch._C, "_current_graph_task_id", None)
    if task is None:
        raise gone("torch._C._current_graph_task_id")
    return bool(task() != -1)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have this called at the end of the outermost backward pass that is under way; RuntimeError outside of one.

    Relies on `Variable._execution_engine.queue_callback`, by which DDP and FSDP2 themselves end a step in torch 2.8 to
    2.15. Without it it raises a GradwireError: DataParallel and FSDP2 would not know when a step is over.
    """
    engine: Any = getattr(Variable, "_execution_engine", None)
    if not hasattr(engine, "queue_callback"):
        raise gone("torch.autograd.Variable._execution_engine.queue_callback")
    engine.queue_callback(callback)
