"""The figures of a run: bytes and seconds, as every worker counted them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

BYTES = ("frame_bytes", "wire_bytes_sent", "wire_bytes_received", "dense_bytes")
PHASES = ("encode", "wait", "decode")


Stats = dict[str, float]


def summarize(steps: int, seconds: float, before: Stats, after: Stats) -> dict[str, Any]:
    """All workers' counts between two calls of `stats`, and their means: the figures "per worker"."""
    own = {name: after[name] - before[name] for name in (*BYTES, *(f"{phase}_s" for phase in PHASES))}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"seconds": seconds, **own})
    mean = {name: sum(worker[name] for worker in everyone) / len(everyone) for name in everyone[0]}
    per_step = {"total": mean["seconds"] / steps, **{p: mean[f"{p}_s"] / steps for p in PHASES}}
    # Data, forward, backward and optimizer; encoding and decoding go on beside, or are what is waited for.
    per_step["compute"] = per_step["total"] - per_step["wait"]
    return {
        "measured_steps": steps,  # fewer than all when the run was resumed
        **{name: mean[name] for name in BYTES},
        "ratio": mean["dense_bytes"] / mean["frame_bytes"],
        "bits_per_parameter": 32 * mean["frame_bytes"] / mean["dense_bytes"],
        "seconds_per_step": per_step,
        "per_worker": everyone,
    }
