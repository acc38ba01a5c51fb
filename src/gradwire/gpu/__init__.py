"""Whole messages of frames on a GPU: encoded and averaged there, in some ten launches each (docs/gpu.md)."""

from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder, can_encode, has_kernels, room_for
from gradwire.gpu.families import FrameTask, TensorTask
from gradwire.gpu.layout import MessageLayout
from gradwire.gpu.unattended import Outcome, UnattendedMessages

__all__ = [
    "FrameTarget", "FrameTask", "MessageDecoder", "MessageEncoder", "MessageLayout", "Outcome", "TensorTask",
    "UnattendedMessages", "can_encode", "has_kernels", "room_for",
]  # fmt: skip
