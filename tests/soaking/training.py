"""The small trainings of the soak: a model, a wrapper of gradwire's, steps that depend on rank and number alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.ranks import SMALL_BUCKETS, Net, cpu_mesh, digest, gathered, loss_of

DDP, DATA_PARALLEL, LOCAL_SGD, FSDP = "ddp", "DataParallel", "LocalSGD", "fsdp"


@dataclass(frozen=True)
class Training:
    """All that the result of a training depends on."""

    wrapper: str
    spec: str
    aggregate: str
    world: int
    steps: int
    sync_every: int = 1  # LocalSGD
    threads: int = 1
    not_finite: tuple[int, int] = (-1, -1)  # rank and step

    def __str__(self) -> str:
        parts = [self.wrapper, self.spec, self.aggregate, f"{self.world} ranks, {self.steps} steps"]
        parts += [f"sync every {self.sync_every}"] * (self.sync_every > 1) + [f"{self.threads} threads"]
        return ", ".join(part for part in parts if part) + ", a NaN" * (self.not_finite[0] >= 0)

    @property
    def conserves(self) -> bool:
        """Whether all that is computed arrives, or is in the error memories, and both can be seen from outside."""
        recipe = gradwire.recipe(self.spec)
        small_ones_decay = "small=ecq" in str(recipe)
        keeps_all = recipe.decay == 1 and "mask=on" not in str(recipe) and not small_ones_decay
        return self.wrapper in (DDP, DATA_PARALLEL) and keeps_all and self.aggregate == "all_gather"


class Trainer:
    """One rank of a training."""

    def __init__(
        self,
        training: Training,
        rank: int,
        timeout: float,
        spec: str = "",
        aggregator: str = "",
        fallback: bool = False,
    ) -> None:
        """`spec` may be another one than the training's, which the others refuse."""
        self.training, self.rank, self.step = training, rank, 0
        torch.manual_seed(0)
        self.module: nn.Module = Net()
        options: dict[str, Any] = {"timeout": timeout, "aggregate": training.aggregate or "all_gather"}
        if aggregator:
            options |= {"aggregator": aggregator, "aggregator_fallback": fallback}
        attach = {DDP: self._ddp, DATA_PARALLEL: self._data_parallel, LOCAL_SGD: self._local_sgd, FSDP: self._fsdp}
        self.model = attach[training.wrapper](spec or training.spec, options)
        self.sums = {
            kind: {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.module.named_parameters()}
            for kind in ("computed", "arrived", "sizes")
            if training.conserves
        }

    def _ddp(self, spec: str, options: dict[str, Any]) -> nn.Module:
        self.optimizer = _sgd(self.module, 0.9)
        model = DistributedDataParallel(self.module, bucket_cap_mb=SMALL_BUCKETS)
        dist.barrier()
        self.handle: Any = gradwire.ddp.attach(model, spec, optimizer=self.optimizer, **options)
        return model

    def _data_parallel(self, spec: str, options: dict[str, Any]) -> nn.Module:
        self.optimizer = _sgd(self.module, 0.9)
        model = gradwire.DataParallel(self.module, spec, optimizer=self.optimizer, **options)
        self.handle = model.gradwire
        return model

    def _local_sgd(self, spec: str, options: dict[str, Any]) -> nn.Module:
        self.optimizer = _sgd(self.module, 0.9)
        _be_impatient(options["timeout"])
        self.handle = gradwire.LocalSGD(self.module, self.optimizer, spec, sync_every=self.training.sync_every)
        return self.module

    def _fsdp(self, spec: str, options: dict[str, Any]) -> nn.Module:
        mesh = cpu_mesh()
        fully_shard(self.module.big, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        dist.barrier()
        _be_impatient(options["timeout"])
        self.handle = gradwire.fsdp.attach(self.module, spec)
        self.optimizer = _sgd(self.module, 0.0)
        return self.module

    def begin(self) -> None:
        """After a state was loaded, if there is one."""
        if self.training.wrapper == LOCAL_SGD:
            self.handle.__enter__()

    def train_step(self) -> None:
        bad = self.training.not_finite == (self.rank, self.step)
        if self.training.conserves and self.training.not_finite[1] != self.step:
            self._add("computed", self._own_gradients())
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.rank, self.step)
        (loss * float("nan") if bad else loss).backward()
        if self.training.wrapper == LOCAL_SGD or self._finite_everywhere():
            if self.training.conserves:
                self._add("arrived", {name: p.grad for name, p in self.module.named_parameters()})
            self.optimizer.step()
        self.step += 1

    def _own_gradients(self) -> dict[str, torch.Tensor]:
        named = dict(self.module.named_parameters())
        gradients = torch.autograd.grad(loss_of(self.module, self.rank, self.step), list(named.values()))
        return dict(zip(named, gradients, strict=True))

    def _add(self, kind: str, gradients: dict[str, torch.Tensor | None]) -> None:
        for name, gradient in gradients.items():
            assert gradient is not None
            self.sums[kind][name] += gradient.double()
            self.sums["sizes"][name] += gradient.double().abs()

    def _finite_everywhere(self) -> bool:
        finite = all(bool(_local(p.grad).isfinite().all()) for p in self.module.parameters())
        if self.training.wrapper == FSDP and self.training.not_finite[0] >= 0:  # as a GradScaler would
            flag = torch.tensor([finite], dtype=torch.int32)
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            return bool(flag)
        return finite

    def digest(self) -> str:
        return digest({name: _local(p) for name, p in self.module.named_parameters()})

    def end(self) -> None:
        """Leave the wrapper; after it, replicas are the same under every one."""
        if self.training.wrapper == LOCAL_SGD:
            self.handle.__exit__(None, None, None)

    def whole_digest(self) -> str:
        """Of the parameters of this rank; under FSDP2 of the shards of all ranks."""
        return " ".join(map(str, gathered(self.digest()))) if self.training.wrapper == FSDP else self.digest()

    def lost(self) -> float:
        """How much is neither in the sums that arrived nor in the memories: over the bound of rounding."""
        memory, worst = self.handle.state_dict()["memory"], 0.0
        for name, computed in self.sums["computed"].items():
            left = memory[name].double().reshape(computed.shape) if name in memory else torch.zeros_like(computed)
            here = torch.stack((computed - left, self.sums["sizes"][name] + left.abs()))
            dist.all_reduce(here)
            gap = (self.training.world * self.sums["arrived"][name] - here[0]).abs()
            worst = max(worst, float((gap / (2.0**-18 * here[1] + 1e-30)).max()))
        return worst

    # ── checkpoints ──

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": {name: _local(p).clone() for name, p in self.module.named_parameters()},
            "optimizer": {} if self.training.wrapper == FSDP else self.optimizer.state_dict(),
            "sums": self.sums,
        }

    def load(self, state: dict[str, Any], memories: dict[str, Any]) -> None:
        self.step, self.sums = state["step"], state["sums"]
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                _local(parameter).copy_(state["model"][name])
        if self.training.wrapper != FSDP:
            self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(memories)


def _sgd(module: nn.Module, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.02, momentum=momentum)


def _local(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _be_impatient(seconds: float) -> None:
    """Wrappers without `timeout=` have the group's. It was longer while ranks met: a busy machine takes its time."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    dist.barrier()
