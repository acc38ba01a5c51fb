"""The small trainings that `gradwire train` runs: one short file each."""

from __future__ import annotations

from ..errors import unknown_name
from .base import DataError, Defaults, Task
from .cifar10 import Cifar10, Cifar10Small
from .digits import Digits
from .fashion_mnist import FashionMnist
from .text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (Digits, FashionMnist, Cifar10, Cifar10Small, Text)}

__all__ = ["TASKS", "DataError", "Defaults", "Task", "find"]


def find(name: str) -> type[Task]:
    """The task of this name; making one of it loads its data."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]
