"""The small trainings that `gradwire train` runs: one short file each."""

from __future__ import annotations

from gradwire.errors import unknown_name
from gradwire.tasks.base import DataError, Defaults, Task
from gradwire.tasks.cifar10 import Cifar10, Cifar10Small
from gradwire.tasks.digits import Digits
from gradwire.tasks.fashion_mnist import FashionMnist
from gradwire.tasks.text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (Digits, FashionMnist, Cifar10, Cifar10Small, Text)}

__all__ = ["TASKS", "DataError", "Defaults", "Task", "find"]


def find(name: str) -> type[Task]:
    """The task of this name; making one of it loads its data."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]
