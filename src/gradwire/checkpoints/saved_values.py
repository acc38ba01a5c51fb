"""Reading a saved state, which may be damaged, of another model, or of nothing that gradwire has written.

Everything is checked before anything is taken over: what is refused with a CheckpointError leaves all memories as they
were. Values that are returned are copies, so that a caller's tensors are never written to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from gradwire.errors import CheckpointError

MOST_STEPS = 2**31  # more than any training has; seeds have 32 bits for them


def mapping_in(state: Any, key: str) -> Mapping[str, Any]:
    """Return the dict under this key of a state, which must have names as keys; an empty one if there is none."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a state is a dict, as state_dict() returns it, not {type(state).__name__}")
    found = state.get(key, {})
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"not a state of gradwire: its {key!r} is not a dict by name")
    return found


def tensors_in(
    state: Any, key: str, names: Collection[str] = (), shapes: Mapping[str, torch.Size] | None = None,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return copies of the tensors under this key, by parameter name, contiguous and in this dtype.

    CheckpointError unless all of them are finite, of parameters among `names` (where these are known), and have their
    `shapes` (where those are known).
    """
    found = mapping_in(state, key)
    unknown = sorted(set(found) - set(names)) if names else []
    if unknown:
        raise CheckpointError(
            f"the state has {key} of parameters that the model does not have: {', '.join(unknown[:5])}; it is of "
            f"another model, or of the model before its layers were renamed"
        )
    return {name: _copied(tensor, f"{key} of {name!r}", (shapes or {}).get(name), dtype, device)
            for name, tensor in found.items()}  # fmt: skip


def _copied(tensor: Any, what: str, shape: torch.Size | None, dtype: torch.dtype, device: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"the {what} in this state is no tensor, but {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.is_floating_point():
        raise CheckpointError(f"the {what} in this state is a tensor of {tensor.dtype}, not of floats that can be read")
    if shape is not None and tensor.shape != shape:  # first: a small file can name a shape that fits no memory
        raise CheckpointError(
            f"the {what} in this state has shape {tuple(tensor.shape)}, and the model's {tuple(shape)}"
        )
    copy = torch.empty(tensor.shape, dtype=dtype, device=device)
    with torch.no_grad():
        copy.copy_(tensor)
    if not bool(torch.isfinite(copy).all()):
        raise CheckpointError(f"the {what} in this state is not finite: it is damaged, or of a training that diverged")
    return copy


def count_in(state: Any, key: str, default: int | None = None) -> int:
    """Return the whole number, 0 or more, under this key of a state; the default, if there is one, where it lacks."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a state is a dict, as state_dict() returns it, not {type(state).__name__}")
    value = state.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_STEPS:
        raise CheckpointError(f"not a state of gradwire: its {key!r} is {value!r:.50}, not a number of steps")
    return value
