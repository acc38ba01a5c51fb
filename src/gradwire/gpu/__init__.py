"""Whole messages of frames on a GPU: encoded and averaged there, in some ten launches each (docs/gpu.md)."""

from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder, can_encode, has_kernels, room_for
from gradwire.gpu.families import FrameTask, TensorTask

__all__ = [
    "FrameTarget", "FrameTask", "MessageDecoder", "MessageEncoder", "TensorTask", "can_encode", "has_kernels",
    "room_for",
]  # fmt: skip
