"""The bytes of an update: a table that says which tensors each frame carries, then the frames.

docs/flower.md specifies every byte. This module works on tensors and their names and knows nothing of Flower;
`message.seal` puts the header with token, model number and checksum before these bytes.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from gradwire import codecs, kernels
from gradwire.aggregate.messages.message_coder import encode_frames
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import whole_tensors
from gradwire.catalogue.parse_recipe import recipe
from gradwire.catalogue.spec_by_name import SMALL, Spec, parse_spec, recipe_of_name
from gradwire.codecs import CONVERTIBLE
from gradwire.correct.error_memory_by_parameter import ErrorMemory
from gradwire.errors import FrameError, GradwireError
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader, varint

Tensors = Mapping[str, torch.Tensor]
# Running statistics of batch normalization. Coarse steps could make a variance negative, and its square root is taken.
STATISTICS = ("*running_mean", "*running_var")
VARIANCES = STATISTICS[1]
MOST_FRAMES = 2**20


@dataclass
class Encoded:
    """The bytes of an update, and the error memory after it: what the bytes leave out, by name of tensor.

    Only tensors whose recipe keeps an error memory are in `memory`.
    """

    data: bytes
    memory: dict[str, torch.Tensor] = field(default_factory=dict)


class DeferredDecoding(Protocol):
    """What a server passes to `decode` so that large tensors are decoded later, and the others are checked its way."""

    def start_update(self) -> None:
        """Begin with a new update."""

    def add(self, name: str, header: headers.Header, payload: np.ndarray, before: torch.Tensor) -> None:
        """Take the frame of a large tensor, which `decode` then leaves out of its result."""

    def check(self, name: str, after: torch.Tensor, before: torch.Tensor) -> None:
        """Raise a FrameError if a decoded tensor must not be handed to a strategy."""


def full_spec(spec: Spec, names: Sequence[str]) -> Spec:
    """Return the spec for all tensors of a model, which has these names.

    Running statistics travel as `bf16`, unless a pattern names them or their recipe is `none`, which loses nothing.
    """
    patterns = spec if isinstance(spec, Mapping) else {"*": spec}
    recipes = parse_spec(patterns)
    if any("running_" in pattern for pattern in patterns) or all(r.name == "none" for r in recipes.values()):
        return patterns
    statistics = [name for name in names if is_statistic(name)] if len(recipes) > 1 else []
    exact = {glob.escape(name): "none" for name in statistics if recipe_of_name(name, recipes).name == "none"}
    return {**exact, **dict.fromkeys(STATISTICS, "bf16"), **patterns}


def encode(
    differences: Tensors, values: Tensors, names: Sequence[str], spec: Spec, memory: Tensors | None = None,
    steps: int = 0, seed: int = 0,
) -> Encoded:  # fmt: skip
    """Encode an update as a table and frames: float `differences`, lossy by `spec`, and `values` without loss.

    `names` are all tensor names of the model in its order, `memory` is the error memory before this update, `steps`
    is the number of updates before this one, and `seed` differs between clients. Raises a GradwireError if a
    difference is not finite. The arguments are not changed.
    """
    numbers = {name: i for i, name in enumerate(names)}
    recipes, errors = ModelRecipes(full_spec(spec, names)), ErrorMemory()
    # Nobody writes to them: what this update leaves out goes to other tensors.
    errors.load({name: e.detach().to("cpu", torch.float32).contiguous() for name, e in (memory or {}).items()})
    tensors = [(name, t.detach().float().contiguous()) for name, t in differences.items() if t.numel()]
    for name, tensor in tensors:
        if not np.isfinite(kernels.absmax(tensor.view(-1))):
            raise GradwireError(f"the update of {name!r} holds a NaN or an infinity: the training has diverged")
    recipes.know_model(tensors)
    # What did not change and has nothing left in memory would only cost a header.
    moved = [(name, t) for name, t in tensors if name in errors.memory or kernels.absmax(t.view(-1))]
    plans = recipes.plan_frames(whole_tensors(moved), steps)
    frames = encode_frames(plans, recipes, errors, steps, seed)
    entries = [varint(2 * len(p.parts)) + b"".join(varint(numbers[n]) for n in p.names) for p in plans]
    exact: dict[torch.dtype, list[str]] = {}
    for name, value in values.items():
        if value.numel():
            exact.setdefault(value.dtype, []).append(name)
    for group in exact.values():
        entries.append(varint(2 * len(group) + 1) + b"".join(varint(numbers[n]) for n in group))
        flat = torch.cat([values[name].detach().reshape(-1) for name in group])
        frames += recipe("none").codec.encode(flat)
    errors.commit()
    return Encoded(varint(len(entries)) + b"".join(entries) + frames, errors.memory)


def decode(
    data: codecs.Bytes, model: Tensors, new_dtypes: bool = False, deferred: DeferredDecoding | None = None
) -> dict[str, torch.Tensor]:
    """Decode an update to `model`: return the tensors that it changes, as they are after it.

    Large tensors go to `deferred` instead, if it is given. All results have the dtypes of the model's tensors, also
    where Flower has turned integers into floats by averaging them; with `new_dtypes`, values keep the dtype in which
    they were sent. Raises a FrameError if the bytes are damaged or hostile. Whatever they claim, the result takes no
    more memory than the model itself, and decoding it at most half of a tensor beside (docs/wire-format.md). The model
    is not changed.
    """
    view = memoryview(codecs.as_bytes(data))
    names = list(model)
    table, frames = _table(view, names)
    if len(frames) != len(table):
        raise FrameError(f"{len(frames)} frames, but {len(table)} are announced")
    result: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    if deferred is not None:
        deferred.start_update()
    for frame, (is_value, group) in zip(frames, table, strict=True):
        header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
        sizes = [model[name].numel() for name in group]
        if header.elements != sum(sizes) or not seen.isdisjoint(group) or len(set(group)) < len(group):
            raise FrameError(f"a frame of {header.elements} elements for {', '.join(group[:3])}, expected {sum(sizes)}")
        if header.nonfinite:
            raise FrameError(f"a NaN or an infinity in {', '.join(group[:3])}")
        seen.update(group)
        if is_value:
            if not new_dtypes:
                _check_dtypes(header, group, model)
            _put_values(header, payload, group, model, result, new_dtypes)
        elif deferred is not None and _is_large(header, group, model):
            deferred.add(group[0], header, payload, model[group[0]])
        else:
            _add_differences(header, payload, group, model, result)
    for name, tensor in result.items():
        if deferred is not None:
            deferred.check(name, tensor, model[name])
        elif tensor.is_floating_point() and not np.isfinite(largest_magnitude(tensor)):
            raise FrameError(f"a NaN or an infinity in {name!r} after the update")
    return result


def _table(view: memoryview, names: Sequence[str]) -> tuple[list[tuple[bool, list[str]]], list[memoryview]]:
    """Read the table, as pairs of "are these values?" and the names of a frame's tensors, and split the frames."""
    reader = Reader(view)
    table = []
    left = len(names)  # a tensor is in one frame at most, so that a hostile table is no longer than an honest one
    for _ in range(reader.varint(min(MOST_FRAMES, len(names)))):
        count, is_value = divmod(reader.varint(2 * left + 1), 2)
        if not count:
            raise FrameError("a frame of no tensors")
        left -= count
        table.append((bool(is_value), [names[reader.varint(len(names) - 1)] for _ in range(count)]))
    return table, headers.split(reader.rest(), len(table))


def _check_dtypes(header: headers.Header, group: list[str], model: Tensors) -> None:
    for name in group:
        expected = model[name].dtype
        if header.dtype != expected and (header.dtype.is_floating_point or not expected.is_floating_point):
            raise FrameError(f"{name!r} is {header.dtype}, expected {expected}")


def _put_values(
    header: headers.Header, payload: np.ndarray, group: list[str], model: Tensors, result: dict[str, torch.Tensor],
    new_dtypes: bool,
) -> None:  # fmt: skip
    flat = torch.empty(header.elements, dtype=header.dtype, device="cpu")
    codecs.decode_payload(header, payload, flat)
    for name, part in zip(group, torch.split(flat, [model[n].numel() for n in group]), strict=True):
        result[name] = part.view(model[name].shape).to(header.dtype if new_dtypes else model[name].dtype)


def _add_differences(
    header: headers.Header, payload: np.ndarray, group: list[str], model: Tensors, result: dict[str, torch.Tensor]
) -> None:
    if any(model[name].dtype not in CONVERTIBLE for name in group) or header.dtype != torch.float32:
        raise FrameError(f"differences of {header.dtype} for {', '.join(group[:3])}, which is no such tensor")
    first = model[group[0]]
    if len(group) == 1 and first.dtype == torch.float32:
        out = torch.empty(first.shape, dtype=torch.float32, device="cpu")
        result[group[0]] = codecs.decode_onto(header, payload, out, first.contiguous())
        return
    flat = torch.empty(header.elements, dtype=torch.float32, device="cpu")
    codecs.decode_payload(header, payload, flat)
    for name, part in zip(group, torch.split(flat, [model[n].numel() for n in group]), strict=True):
        result[name] = (model[name] + part.view(model[name].shape)).to(model[name].dtype)


def _is_large(header: headers.Header, group: list[str], model: Tensors) -> bool:
    """Whether a frame of differences holds a single large fp32 tensor that is no variance, which may need clamping."""
    fp32 = header.dtype == model[group[0]].dtype == torch.float32
    return len(group) == 1 and header.elements >= SMALL and fp32 and not is_variance(group[0])


def is_statistic(name: str) -> bool:
    """Whether a tensor of this name is a running statistic of batch normalization."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in STATISTICS)


def is_variance(name: str) -> bool:
    """Whether a tensor of this name is a running variance of batch normalization."""
    return fnmatch.fnmatchcase(name, VARIANCES)


def largest_magnitude(tensor: torch.Tensor) -> float:
    """Return the largest magnitude of the entries, 0 if there are none, NaN if one of them is NaN."""
    if not tensor.numel():
        return 0.0
    if tensor.dtype == torch.float32:
        return float(kernels.absmax(tensor.reshape(-1)))
    return float(tensor.abs().max())
