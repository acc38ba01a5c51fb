"""What torch knows of tensors, and does to many of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire.torch_internals.versions import gone


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor was written to in place.

    Relies on `Tensor._version`, by which autograd itself finds such writes in torch 2.8 to 2.15. Without it it raises a
    GradwireError: an old scale of the loss would be taken for the present one.
    """
    try:
        return tensor._version
    except AttributeError as error:
        raise gone("torch.Tensor._version") from error


def memory_of(tensor: torch.Tensor) -> object:
    """Return what stands for the memory of a tensor: it equals that of every tensor in the same memory, and no other.

    It keeps the address from being used again, but not the memory. Relies on `StorageWeakRef` of
    `torch.multiprocessing.reductions`, by which torch shares tensors between processes, in torch 2.8 to 2.15. Without
    it it raises a GradwireError: buckets that DDP has built anew could be taken for those before, which held other
    gradients.
    """
    try:
        from torch.multiprocessing.reductions import StorageWeakRef
    except ImportError as error:
        raise gone("torch.multiprocessing.reductions.StorageWeakRef") from error
    return StorageWeakRef(tensor.untyped_storage())


def divide_all(tensors: Sequence[torch.Tensor], divisor: float) -> None:
    """Divide tensors of one dtype and device in place: on a GPU, by one kernel.

    Relies on `torch._foreach_div_`, which torch's optimizers use in torch 2.8 to 2.15. Without it, tensors are divided
    one by one.
    """
    if hasattr(torch, "_foreach_div_"):
        torch._foreach_div_(list(tensors), divisor)
    else:
        for tensor in tensors:
            tensor.div_(divisor)


def leaves_of(nested: Any) -> list[Any]:
    """Return what lies in lists, tuples, dicts and other containers that torch knows, however deep.

    Relies on `torch.utils._pytree.tree_leaves`, the same in torch 2.8 to 2.15. Without it it raises a GradwireError:
    DataParallel would not see the outputs of a model, nor that their backward pass begins.
    """
    try:
        from torch.utils._pytree import tree_leaves
    except ImportError as error:
        raise gone("torch.utils._pytree.tree_leaves") from error
    return list(tree_leaves(nested))


def entries_of(sparse: torch.Tensor) -> int:
    """Return how many entries (for gradients of embeddings: rows) a sparse tensor holds; not necessarily coalesced.

    Relies on `Tensor._nnz`, the same in torch 2.8 to 2.15. Without it it raises a GradwireError: coalescing a gradient
    to count its rows would cost more than the rest of the step.
    """
    try:
        return sparse._nnz()
    except AttributeError as error:
        raise gone("torch.Tensor._nnz") from error


def hold_in_cpp(tensors: list[torch.Tensor]) -> object:
    """Return an object of C++ that holds the tensors: once it is the last one, freeing them never asks Python.

    Relies on `torch._C.ScriptList`, the list that `torch.jit.script` makes of a list, in torch 2.8 to 2.15. Without it
    they are held by Python, and a thread of torch that frees one while the interpreter ends may abort the process.
    """
    script_list: Any = getattr(torch._C, "ScriptList", None)
    return list(tensors) if script_list is None else script_list(tensors)
