"""What the client's training has changed: differences of float tensors, and values of all others."""

from __future__ import annotations

import math

import torch
from flwr.app import Array, ArrayRecord

from gradwire.flower.shared import arrays, update


def mismatch(received: ArrayRecord, trained: ArrayRecord) -> str | None:
    """Say how the trained model differs from the received one in names, shapes or kinds of arrays; None if it does not.

    Floats may become integers again: the server turns integers into floats when it averages them.
    """
    if names := received.keys() ^ trained.keys():
        name = min(names)
        return f"{name!r} is only in the {'reply' if name in trained else 'model'}"
    for name, old in received.items():
        new = trained[name]
        if not arrays.supported((old, new)):
            return f"{name!r} has a type that cannot be compressed"
        if tuple(old.shape) != tuple(new.shape):
            return f"{name!r} has the shape {tuple(new.shape)}, not {tuple(old.shape)}"
        if _is_float(new) and not _is_float(old):
            return f"{name!r} is {new.dtype}, not {old.dtype}"
    return None


def _is_float(array: Array) -> bool:
    return "float" in array.dtype


def changes(model: ArrayRecord, trained: ArrayRecord) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the differences of all float tensors, at least in fp32, and the values of other tensors that changed."""
    differences, values = {}, {}
    for name, array in model.items():
        old, new = arrays.tensor(name, array), arrays.tensor(name, trained[name])
        if new.is_floating_point():
            difference = new.to(torch.promote_types(new.dtype, torch.float32)) - old
            if not math.isfinite(difference.sum()):
                # ∞ − ∞ is NaN: entries that nobody changed, such as those of a mask, have no difference.
                difference[(new == old) | (new.isnan() & old.isnan())] = 0
            differences[name] = difference
        elif old.dtype != new.dtype or not torch.equal(old, new):
            values[name] = new
    return differences, values


def collapsed_variances(model: ArrayRecord, differences: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the running variances that have to be sent as values.

    They fell so far that their difference in bf16 would be wrong by more than half of what is left, or would take them
    below zero.
    """
    result = {}
    for name, difference in differences.items():
        if update.is_variance(name) and difference.numel():
            old = arrays.tensor(name, model[name])
            new, decoded = old + difference, old + difference.bfloat16()
            if bool(((decoded - new).abs() > new.abs() / 2).any()):
                result[name] = new.to(old.dtype)
    return result
