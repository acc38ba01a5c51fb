"""The trainings of benchmarks/federated.py: settings, contestants, and which contestants run in which setting."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

SKEW = 0.3  # Dirichlet's α


@dataclass(frozen=True)
class Contestant:
    """How messages travel: the clients' recipe, and the server's where downloads are compressed too."""

    codec: str
    download: str | None = None
    rate: str | None = None  # how the server changes the clients' recipe over the rounds
    note: str = ""


# Sparse recipes send more in the first quarter of the rounds: what is left out then waits, with 10 of 100 clients in a
# round, for ten rounds on average, and is of a model that has moved on.
STC = "stc:p=0.01,power=0.5,warmup={quarter},start=0.1"
SBC = "sbc:p=0.01,power=0.5,warmup={quarter},start=0.1"

PLAIN = "none"
CONTESTANTS: dict[str, Contestant] = {
    PLAIN: Contestant("none", note="FedAvg as Flower has it: raw fp32 arrays"),
    "fp16": Contestant("fp16"),
    "co3 fp8": Contestant("co3:format=fp8"),
    "co3": Contestant("co3", note="fp4"),
    "ecq 2 bits": Contestant("ecq:rate=2", note="ours"),
    "ecq 1.5 bits": Contestant("ecq:rate=1.5", note="ours"),
    "ecq 1 bit": Contestant("ecq:rate=1", note="ours"),
    "structured 3%": Contestant("structured", note="ours"),
    "structured 10%": Contestant("structured:nmse=0.1", note="ours"),
    "structured 20%": Contestant("structured:nmse=0.2", note="ours"),
    "m22": Contestant("m22"),
    "topk 10%": Contestant("topk:p=0.1", note="what DeepReduce starts from"),
    "sbc": Contestant(SBC, note="SBC(2): 1% of the update of a round"),
    "stc up": Contestant(STC),
    "stc up+down": Contestant(STC, download="stc:p=0.02"),
    "adaquantfl": Contestant("qsgd", rate="adaquantfl"),
}

# The arguments of FederatedSettings that are not the same for all.
SETTINGS: dict[str, dict[str, Any]] = {
    "cifar10-100-iid": {
        "task": "cifar10-small", "clients": 100, "per_round": 10, "rounds": 60, "local_epochs": 2, "batch_size": 50,
        "lr": 0.05, "evaluate_every": 2,
    },
    "cifar10-100-skew": {
        "task": "cifar10-small", "clients": 100, "per_round": 10, "rounds": 60, "local_epochs": 2, "batch_size": 50,
        "lr": 0.05, "evaluate_every": 2, "alpha": SKEW,
    },
    "cifar10-10-iid": {
        "task": "cifar10-small", "clients": 10, "per_round": 10, "rounds": 12, "local_epochs": 1, "batch_size": 50,
        "lr": 0.05, "evaluate_every": 1,
    },
    "fashion-100-skew": {
        "task": "fashion-mnist", "clients": 100, "per_round": 10, "rounds": 60, "local_epochs": 1, "batch_size": 50,
        "lr": 0.05, "evaluate_every": 2, "alpha": SKEW,
    },
    "fashion-10-iid": {
        "task": "fashion-mnist", "clients": 10, "per_round": 10, "rounds": 8, "local_epochs": 1, "batch_size": 50,
        "lr": 0.05, "evaluate_every": 1,
    },
}  # fmt: skip

# Chosen well rather than the full product.
CHOICE: dict[str, tuple[str, ...]] = {
    "cifar10-100-iid": (
        PLAIN,
        "fp16",
        "co3",
        "structured 3%",
        "structured 10%",
        "structured 20%",
        "m22",
        "stc up+down",
        "adaquantfl",
    ),
    "cifar10-100-skew": (PLAIN, "co3", "structured 10%", "structured 20%", "m22", "stc up+down"),
    "cifar10-10-iid": (PLAIN, "ecq 2 bits", "ecq 1.5 bits", "m22"),
    "fashion-100-skew": (PLAIN, "co3 fp8", "co3", "sbc"),
    "fashion-10-iid": (PLAIN, "stc up"),
}


def contestant(name: str, rounds: int) -> Contestant:
    """Of this name, or "CODEC" or "CODEC / DOWNLOAD", to try others, in a training of so many rounds."""
    codec, _, download = (part.strip() for part in name.partition("/"))
    found = CONTESTANTS.get(name, Contestant(codec, download or None))
    return replace(found, codec=found.codec.format(quarter=rounds // 4))


def describe(name: str) -> str:
    """A setting in words."""
    values = SETTINGS[name]
    alpha = values.get("alpha", math.inf)
    data = "IID" if alpha == math.inf else f"Dirichlet α = {alpha}"
    return f"{values['task']}, {values['clients']} clients, {values['per_round']} a round, {data}"


def file_name(setting: str, contestant: str, seed: int) -> str:
    """Such as cifar10-100-iid_stc-up-down_0.json."""
    return f"{setting}_{re.sub(r'[^a-z0-9=.]+', '-', contestant.lower()).strip('-')}_{seed}.json"
