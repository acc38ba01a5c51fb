"""Compressed gradients for FSDP2: `gradwire.fsdp.attach(fsdp_model, "co3")` (docs/fsdp.md)."""

from gradwire.fsdp.handle import FSDPHandle, attach

__all__ = ["FSDPHandle", "attach"]
