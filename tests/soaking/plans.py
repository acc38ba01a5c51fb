"""Which training an episode has, and what happens to it: chosen at random, by the episode's own generator."""

from __future__ import annotations

import random

from soaking.faults import FATAL, HARMLESS, Fault
from soaking.training import DATA_PARALLEL, DDP, FSDP, LOCAL_SGD, Training

# Under DDP without ecq, also for small tensors: its frames depend on the buckets, which the first step after a restart
# has in another order (docs/checkpoints.md).
SPECS = {
    DDP: ("co3", "co3:decay=1", "topk:p=0.05,small=same", "stc:p=0.05,small=same", "dgc:p=0.05,small=same", "qsgd",
          "orq", "signsgd", "fp16", "none", "homomorphic:p=0.05"),
    DATA_PARALLEL: ("co3", "co3:decay=1", "topk:p=0.05", "sbc:p=0.05", "ecq:decay=1", "terngrad", "bingrad",
                    "homomorphic:p=0.05"),
    LOCAL_SGD: ("co3", "sbc:p=0.05", "stc:p=0.05", "none"),
    FSDP: ("co3", "topk:p=0.05", "ecq", "none"),
}  # fmt: skip
SUMS = "homomorphic:p=0.05"
STEPS = (12, 16, 20, 24)
PATIENT, IMPATIENT = 60.0, 3.0  # seconds of timeout: where nobody is waited for to no end, and where one is


def training(chance: random.Random, by_aggregator: bool = False) -> Training:
    wrapper = chance.choice((DDP, DATA_PARALLEL) if by_aggregator else (DDP, DDP, DATA_PARALLEL, LOCAL_SGD, FSDP))
    spec = SUMS if by_aggregator else chance.choice(SPECS[wrapper])
    ways = ("all_gather", "scatter_reduce") if spec != SUMS else ("all_gather",)
    world = chance.choice((2, 3))
    steps = chance.choice(STEPS)
    not_finite = (chance.randrange(world), chance.randrange(3, steps - 2)) if chance.random() < 0.2 else (-1, -1)
    return Training(
        wrapper,
        spec,
        chance.choice(ways) if wrapper in (DDP, DATA_PARALLEL) else "",
        world,
        steps,
        chance.choice((1, 2, 3)) if wrapper == LOCAL_SGD else 1,
        chance.choice((1, 2)),
        not_finite,
    )


def faults(chance: random.Random, of: Training, by_aggregator: bool, alone: bool) -> list[Fault]:
    """One to three, each for an attempt of its own. Some need a network of the episode's own (`alone`)."""
    kinds = [kind for kind in FATAL + HARMLESS if alone or kind not in ("packet loss", "full disk")]
    if of.spec.startswith("qsgd"):
        kinds.remove("other spec")
    if by_aggregator:
        kinds = [kind for kind in kinds if kind not in ("other spec", "packet loss")]
        kinds += 3 * ["aggregator restarted", "lossy relay", "flood", "fallback"]
    else:
        kinds.remove("aggregator killed")
    kinds += 3 * ["kill"]
    return [fault(chance, chance.choice(kinds), of) for _ in range(chance.choice((1, 1, 2, 3)))]


def fault(chance: random.Random, kind: str, of: Training) -> Fault:
    seconds = {"pause": chance.uniform(0.1, 1.0), "slow": chance.uniform(0.1, 1.0), "late": 2 * IMPATIENT + 3}
    step = chance.randrange(3, of.steps - 1)  # DDP has made its buckets anew by then
    return Fault(kind, chance.randrange(of.world), step, seconds.get(kind, 0.0), chance.random() * 0.02)


def timeout_under(fault: Fault | None, by_aggregator: bool) -> float:
    """The aggregator is not told that a rank was killed: it hears nothing from it."""
    waited_for = ("stop", "late", "aggregator killed", *(("kill", "kill while saving", "exception") * by_aggregator))
    return IMPATIENT if fault is not None and fault.kind in waited_for else PATIENT
