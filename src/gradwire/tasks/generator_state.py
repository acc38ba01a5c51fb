"""The state of torch's generators on a worker, as one tensor for its checkpoint."""

from __future__ import annotations

import torch


def state(device: torch.device) -> torch.Tensor:
    """That of the CPU; where the worker has a GPU, then that of the GPU, which draws rows (gradwire.backward)."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def restore(device: torch.device, saved: torch.Tensor) -> None:
    """What a run on the other kind of device has saved is used as far as it goes."""
    of_cpu = len(torch.get_rng_state())
    torch.set_rng_state(saved[:of_cpu])
    if device.type == "cuda" and len(saved) > of_cpu:
        torch.cuda.set_rng_state(saved[of_cpu:], device)
