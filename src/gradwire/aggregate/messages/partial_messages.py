"""Messages that leave out tensors without a gradient: coded, and averaged as if the missing ones were zeros."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch

from gradwire.aggregate.messages import present_tensors
from gradwire.aggregate.messages.frame_coding import most_frame_bytes, unusable_message
from gradwire.aggregate.messages.frame_plan import FramePlan, fingerprint, only_present
from gradwire.aggregate.messages.message_coder import HOST, MessageCoder
from gradwire.aggregate.messages.step_tensors import StepTensors
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.aggregate.transport.message_prefix import Subject
from gradwire.errors import FrameError


class PartialMessages:
    """Codes messages of one rank with a note in front that says which tensors they carry.

    With `sums` they are added up rather than averaged: for those who divide themselves.
    """

    def __init__(self, coder: MessageCoder, tensors: StepTensors, sums: bool = False):
        self.coder, self.tensors, self._sums = coder, tensors, sums

    def subject(self, plans: Sequence[FramePlan]) -> Subject:
        """Return what the messages of all ranks must be about, and the most bytes that one can have."""
        known = self.coder.known
        most = known.fact("most bytes", plans, most_message_bytes)
        return Subject(self.coder.ledger.steps, known.fact("fingerprint", plans, fingerprint), most)

    def encode(
        self, key: Hashable, plans: Sequence[FramePlan], to: torch.device = HOST, everything: bool = False
    ) -> tuple[torch.Tensor, int]:
        """Return a block with this rank's message, on the device `to` if it was made on a GPU, and its length.

        With `everything` it carries tensors without a gradient, too, for what is in their memories.
        """
        parts = self.coder.known.fact("parts", plans, _parts)
        present = self.tensors.which_have_gradients(parts, self.coder.which_are_zero)
        if everything:
            present = [True] * len(parts)
        return self.coder.encode(key, only_present(plans, present), present_tensors.pack(present), to)

    def average(self, arrived: Sequence[tuple[int, torch.Tensor]], plans: Sequence[FramePlan]) -> list[bool]:
        """Replace the parts by the means of these ranks' messages, or their sums; return which were in any of them."""
        weight = 1.0 if self._sums else 1 / len(arrived)
        parts = self.coder.known.fact("parts", plans, _parts)
        notes = [self._opened(sender, message, len(parts)) for sender, message in arrived]
        flags = [present for present, _ in notes]
        bodies = [message[start:] for (_, message), (_, start) in zip(arrived, notes, strict=True)]
        if self.coder.average_on_device(plans, bodies, flags, weight):
            sent = [any(of_part) for of_part in zip(*flags, strict=True)]
            self.tensors.note_sent(part.name for part, was_sent in zip(parts, sent, strict=True) if was_sent)
            return sent
        opened = [
            (sender, present, body.cpu().numpy())
            for (sender, _), present, body in zip(arrived, flags, bodies, strict=True)
        ]
        if all(map(all, flags)):
            sent = [True] * len(parts)
            self.coder.average(plans, [(sender, frames) for sender, _, frames in opened], weight)
        else:
            sent = [False] * len(parts)
            for sender, present, frames in opened:
                values = self._decoded_parts(sender, frames, only_present(plans, present), weight)
                for i in (i for i, is_present in enumerate(present) if is_present):
                    entries = parts[i].entries
                    decoded = next(values).view(entries.shape)
                    entries.add_(decoded) if sent[i] else entries.copy_(decoded)  # as if all ranks had sent all parts
                    sent[i] = True
            for part, was_sent in zip(parts, sent, strict=True):
                if not was_sent:
                    part.entries.zero_()
        self.tensors.note_sent(part.name for part, was_sent in zip(parts, sent, strict=True) if was_sent)
        return sent

    def _opened(self, sender: int, message: torch.Tensor, count: int) -> tuple[list[bool], int]:
        """Return which tensors a message carries, and where its frames begin."""
        try:
            return present_tensors.unpack(message[: present_tensors.most_bytes(count)].cpu().numpy(), count)
        except FrameError as error:
            raise unusable_message(sender, error) from error

    def _decoded_parts(
        self, sender: int, frames: np.ndarray, plans: Sequence[FramePlan], weight: float
    ) -> Iterator[torch.Tensor]:
        """Yield what a message says of each of its parts, times `weight`."""
        targets = []
        for plan in plans:
            first = plan.parts[0].tensor
            wide = torch.promote_types(first.dtype, torch.float32)
            targets.append(torch.empty(sum(plan.sizes), dtype=wide, device=first.device))
        self.coder.decode(sender, frames, plans, targets, weight, accumulate=False)
        for plan, target in zip(plans, targets, strict=True):
            yield from target.split(plan.sizes)


def _parts(plans: Sequence[FramePlan]) -> list[TensorPart]:
    return [part for plan in plans for part in plan.parts]


def most_message_bytes(plans: Sequence[FramePlan]) -> int:
    """Return the most bytes that the note and the frames of these plans can have."""
    return present_tensors.most_bytes(sum(len(plan.parts) for plan in plans)) + most_frame_bytes(plans)
