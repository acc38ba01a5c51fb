"""Tensors out of files: .npy, .npz, .pt, .pth and .safetensors, by name.

A file may be damaged or hostile: nothing is unpickled but tensors and plain containers, and no array is
allocated that the file is too short to hold. What goes wrong is a GradwireError of one line.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.errors import GradwireError

LARGEST_VIEW = 1 << 32  # bytes that a tensor may show of fewer bytes in the file
Named = list[tuple[str, torch.Tensor]]


def load(path: Path) -> Named:
    """All tensors of a file in their order; ints and bools too."""
    loader = _LOADERS.get(path.suffix.lower())
    if loader is None:
        raise GradwireError(
            f"{path} is neither a gradwire frame (it does not start with 'GW') nor a tensor file "
            f"({', '.join(_LOADERS)})"
        )
    try:
        return loader(path)
    except GradwireError:
        raise
    # The parsers behind this raise whatever a damaged file makes them stumble over: KeyError, struct.error, …
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise GradwireError(f"cannot read {path}: the file is damaged or cut short ({reason})") from error


def _load_npy(path: Path) -> Named:
    with path.open("rb") as file:
        _check_array_header(file, path.stat().st_size, str(path))
    # Mapped, so that numpy compares the declared size with the file's before it reserves memory.
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return _from_numpy(path.stem, array)


def _load_npz(path: Path) -> Named:
    tensors: Named = []
    with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as arrays:
        for member in archive.infolist():
            with archive.open(member) as file:
                _check_array_header(file, member.file_size, f"{path}: {member.filename}")
            name = member.filename.removesuffix(".npy")
            tensors += _from_numpy(name, arrays[name])
    return tensors


def _check_array_header(file: Any, size: int, where: str) -> None:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise GradwireError(f"{where} holds Python objects, which are not loaded: save plain arrays")
    if math.prod(shape) * dtype.itemsize > size:
        raise GradwireError(f"{where} is cut short: it declares {shape} of {dtype} and has {size} bytes")


def _from_numpy(name: str, array: np.ndarray) -> Named:
    try:
        # Copied in native byte order: torch takes no other, and no read-only memory.
        return [(name, torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="))))]
    except TypeError:  # strings, records: not tensors
        return []


def _load_torch(path: Path) -> Named:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise GradwireError(
            f"cannot read {path}: it is damaged, or holds Python objects, which are not loaded (save tensors "
            f"or a state_dict)"
        ) from None
    return list(_flatten("", content, set()))


def _flatten(name: str, node: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        if node.numel() * node.itemsize > max(LARGEST_VIEW, _stored_bytes(node)):
            raise GradwireError(f"{name or 'a tensor'}, {tuple(node.shape)}, is far larger than the file")
        yield name or "tensor", node.detach()
        return
    if not isinstance(node, (dict, list, tuple)) or id(node) in seen:  # a container may hold itself
        return
    seen.add(id(node))
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _flatten(f"{name}.{key}" if name else str(key), child, seen)


def _stored_bytes(tensor: torch.Tensor) -> int:
    """What the file holds of it: a view that repeats itself, or a sparse tensor, holds less than it shows."""
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0


def _load_safetensors(path: Path) -> Named:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise GradwireError(
            "reading .safetensors needs the extra `safetensors`: pip install 'gradwire[safetensors]'"
        ) from None
    return list(load_file(path).items())


_LOADERS: dict[str, Callable[[Path], Named]] = {
    ".npy": _load_npy,
    ".npz": _load_npz,
    ".pt": _load_torch,
    ".pth": _load_torch,
    ".safetensors": _load_safetensors,
}
