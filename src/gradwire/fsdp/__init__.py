"""Compressed gradients for FSDP2: `gradwire.fsdp.attach(fsdp_model, "co3")` (docs/fsdp.md)."""

from gradwire.fsdp.handle import FSDPHandle, attach

Handle = FSDPHandle  # its public name

__all__ = ["FSDPHandle", "Handle", "attach"]
