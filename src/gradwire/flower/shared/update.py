"""An update as bytes: which tensors each frame carries, and the frames. docs/flower.md has every byte.

Knows tensors and their names, and nothing of Flower; `message_prefix.py` puts the head before it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gradwire import codecs, kernels
from gradwire.aggregate.messages.message_coder import encode_frames
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import whole_tensors
from gradwire.catalogue.all_recipes import recipe
from gradwire.catalogue.spec_by_name import SMALL, Spec
from gradwire.codecs import CONVERTIBLE
from gradwire.correct.error_memory import Residual
from gradwire.errors import FrameError, GradwireError
from gradwire.flower.shared.lazy_tensors import MOST, Later
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader, varint

Tensors = Mapping[str, torch.Tensor]
STATISTICS = ("*running_mean", "*running_var")  # of batch normalization: lossy steps would make them negative
VARIANCES = STATISTICS[1]  # batch normalization takes their square root
MOST_FRAMES = 2**20


@dataclass
class Encoded:
    """An update on its way, and what it leaves out."""

    data: bytes
    memory: dict[str, torch.Tensor] = field(default_factory=dict)  # by name, of tensors whose recipe remembers


def full_spec(spec: Spec) -> Spec:
    """The spec of all tensors of a model: running statistics as `bf16`, unless a pattern names them."""
    patterns = spec if isinstance(spec, Mapping) else {"*": spec}
    named = any("running_" in pattern for pattern in patterns)
    return patterns if named else {**dict.fromkeys(STATISTICS, "bf16"), **patterns}


def encode(
    differences: Tensors, values: Tensors, names: Sequence[str], spec: Spec, memory: Tensors | None = None,
    steps: int = 0, seed: int = 0,
) -> Encoded:  # fmt: skip
    """Table and frames of an update: float `differences`, lossy by `spec`, and `values` as they are.

    `names` are all names of the model in its order, `memory` is what earlier updates left out, `steps` how many
    there were, and `seed` differs between clients.
    """
    numbers = {name: i for i, name in enumerate(names)}
    recipes, errors = ModelRecipes(full_spec(spec)), Residual()
    errors.load_state_dict({"memory": dict(memory or {})})
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
    data: codecs.Bytes, model: Tensors, new_dtypes: bool = False, later: Later | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that the update changes, as they are after it; large ones may be left for `later`.

    Takes no more memory than the model itself, whatever the bytes say. All have the dtypes of the model's tensors, also
    integers of which Flower has made floats by averaging; with `new_dtypes` values may have any.
    """
    view = memoryview(codecs.as_bytes(data))
    names = list(model)
    table, frames = _table(view, names)
    if len(frames) != len(table):
        raise FrameError(f"{len(frames)} frames, but {len(table)} are announced")
    result: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    if later is not None:
        later.tensors = {}
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
        elif later is not None and _is_large(header, group, model):
            later.add(group[0], header, payload, model[group[0]])
        else:
            _add_differences(header, payload, group, model, result)
    for name, tensor in result.items():
        if later is not None:  # on a server, for a strategy
            check_size(name, tensor, model[name])
        elif tensor.is_floating_point() and not np.isfinite(_largest(tensor)):
            raise FrameError(f"a NaN or an infinity in {name!r} after the update")
    return result


def check_size(name: str, tensor: torch.Tensor, before: torch.Tensor) -> None:
    """A FrameError where a tensor is not finite, or too large to be anything but diverged, and was not before."""
    if not tensor.is_floating_point() or (largest := _largest(tensor)) <= MOST:
        return
    if not before.is_floating_point() or not largest <= _largest(before):
        raise FrameError(f"a NaN, an infinity or {largest:.3g} in {name!r} after the update")


def _table(view: memoryview, names: Sequence[str]) -> tuple[list[tuple[bool, list[str]]], list[memoryview]]:
    reader = Reader(view)
    table = []
    left = len(names)  # each tensor is in one frame at most, so that a hostile table is not longer than an honest one
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
    flat = torch.empty(header.elements, dtype=header.dtype)
    codecs.decode_payload(header, payload, flat)
    for name, part in zip(group, flat.split([model[n].numel() for n in group]), strict=True):
        result[name] = part.view(model[name].shape).to(header.dtype if new_dtypes else model[name].dtype)


def _add_differences(
    header: headers.Header, payload: np.ndarray, group: list[str], model: Tensors, result: dict[str, torch.Tensor]
) -> None:
    if any(model[name].dtype not in CONVERTIBLE for name in group) or header.dtype != torch.float32:
        raise FrameError(f"differences of {header.dtype} for {', '.join(group[:3])}, which is no such tensor")
    first = model[group[0]]
    if len(group) == 1 and first.dtype == torch.float32:
        out = torch.empty(first.shape)
        result[group[0]] = codecs.decode_onto(header, payload, out, first.contiguous())
        return
    flat = torch.empty(header.elements)
    codecs.decode_payload(header, payload, flat)
    for name, part in zip(group, flat.split([model[n].numel() for n in group]), strict=True):
        result[name] = (model[name] + part.view(model[name].shape)).to(model[name].dtype)


def _is_large(header: headers.Header, group: list[str], model: Tensors) -> bool:
    """Whether it is a tensor by itself, of the kind that all frames with differences hold."""
    fp32 = header.dtype == model[group[0]].dtype == torch.float32
    return len(group) == 1 and header.elements >= SMALL and fp32 and not is_variance(group[0])


def is_variance(name: str) -> bool:
    return fnmatch.fnmatchcase(name, VARIANCES)


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    if not tensor.numel():
        return 0.0
    if tensor.dtype == torch.float32:
        return float(kernels.absmax(tensor.reshape(-1)))
    return float(tensor.abs().max())
