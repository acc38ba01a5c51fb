"""Messages of frames, made on the device: whole buckets in some ten launches, whatever the number of tensors.

Fit, step, table and sizes stay on the device; the host learns the length of the message when it is ready.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from gradwire.convert.conversion import Converter
from gradwire.cuda_runtime import programs
from gradwire.gpu.families import Family, FrameTask
from gradwire.gpu.grid import GridFamily
from gradwire.gpu.layout import DTYPES, MessageLayout
from gradwire.gpu.levels import LEVEL_FAMILIES
from gradwire.gpu.minifloat import MinifloatFamily
from gradwire.gpu.sparse import SparseFamily
from gradwire.gpu.structures import NONFINITE, STATUS
from gradwire.gpu.workspace import Workspace, make_room, recorded

FAMILIES: tuple[Family, ...] = (MinifloatFamily(), GridFamily(), SparseFamily(), *LEVEL_FAMILIES)


@functools.lru_cache(maxsize=4096)
def family_of(converter: Converter) -> Family | None:
    """Return the family whose kernels do what this converter does, if there is one."""
    return next((family for family in FAMILIES if family.takes(converter)), None)


def has_kernels(converter: Converter, dtype: torch.dtype) -> bool:
    """Tell whether there are kernels for frames of this converter; the same on all machines, with a GPU or without."""
    return dtype in DTYPES and family_of(converter) is not None


def can_encode(converter: Converter, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether tensors of this dtype become frames of this converter on this device."""
    return has_kernels(converter, dtype) and programs.can_run(device)


@dataclass
class PendingMessage:
    """A message that is being made; `wait` returns when it is there."""

    layout: MessageLayout
    event: torch.cuda.Event | None

    def wait(self) -> int | None:
        """Return the length of the message, or None if the host has to encode it: it holds a NaN or an infinity."""
        if self.event is not None:
            self.event.synchronize()
        status = self.layout.status.numpy().view(STATUS)[0]
        return None if int(status["bits"]) else int(status["length"])

    @property
    def nonfinite(self) -> bool:
        """Whether a gradient holds a NaN or an infinity; known after `wait`."""
        return bool(int(self.layout.status.numpy().view(STATUS)[0]["bits"]) & NONFINITE)


def room_for(tasks: Sequence[FrameTask]) -> int:
    """Return the room that frames of these tasks need: no entry takes more than two bytes, as a rule."""
    return sum(2 * task.count + 4096 + 16 * len(task.tensors) for task in tasks)


class MessageEncoder:
    """Encodes the messages of one device, one after the other, on the current stream of the calling thread.

    A message's result has to be waited for before the next message of the same layout is encoded. Messages of
    different keys have layouts of their own.
    """

    def __init__(self, device: torch.device):
        self.device, self.workspace = device, Workspace(device)
        self._layouts: dict[tuple[object, ...], MessageLayout] = {}
        self._formats: dict[int, int] = {}
        self._families: dict[int, Family] = {}
        self._kept: list[Converter] = []  # so that no other converter gets the id of one that is known
        self._records: dict[bytes, torch.Tensor] = {}  # what kernels have to know of converters, by content

    def encode(self, tasks: Sequence[FrameTask], out: torch.Tensor) -> PendingMessage:
        """Write the frames of these tasks to the front of `out`, one after the other, and update their memories."""
        layout = self.prepared(tasks, out)
        layout.launches.start()
        layout.fetch_status()
        return PendingMessage(layout, recorded(self.device))

    def prepared(
        self, tasks: Sequence[FrameTask], out: torch.Tensor, key: Hashable = None, stamp: int = 0,
        everything: bool = False,
    ) -> MessageLayout:  # fmt: skip
        """Return the layout of a message, which has been told where tensors are and where the message goes.

        Stamp and `everything` are those of `UnattendedMessages.encode`.
        """
        known = self._families
        families = [known.get(id(task.converter)) or self._family(task.converter) for task in tasks]
        kind = (
            key,
            *[
                (family.alike(task.converter, task.count), task.shape, task.dtype, task.lengths)
                for task, family in zip(tasks, families, strict=True)
            ],
        )
        layout = self._layouts.get(kind)
        if layout is None:
            make_room(self._layouts)
            layout = self._layouts[kind] = MessageLayout(tasks, families, self.workspace, self._formats)
        layout.prepare(tasks, out, stamp, everything)
        return layout

    def _family(self, converter: Converter) -> Family:
        """Return the family of a converter that has not been here before."""
        family = family_of(converter)
        assert family is not None, "the caller has asked can_encode"
        content = family.format(converter)
        record = self._records.get(content.tobytes())
        if record is None:
            record = self._records[content.tobytes()] = torch.from_numpy(content.copy()).to(self.device)
        self._kept.append(converter)
        self._families[id(converter)], self._formats[id(converter)] = family, record.data_ptr()
        return family
