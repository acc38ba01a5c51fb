"""Which version of torch the tests run with: some of what is tested is not in all that gradwire supports."""

from __future__ import annotations

import torch

from gradwire.torch_internals import fully_shard


def is_from(version: str) -> bool:
    """Tell whether this torch is that version, or a newer one."""
    return [int(part) for part in torch.__version__.split(".")[:2]] >= [int(part) for part in version.split(".")]


HAS_FSDP2 = is_from(fully_shard.OLDEST)
HAS_MUON = hasattr(torch.optim, "Muon")
GLOO_TAKES_COMPLEX = is_from("2.10")  # plain DDP of 2.8 cannot train complex parameters over it
