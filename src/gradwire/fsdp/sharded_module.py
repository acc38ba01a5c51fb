"""A module to which fully_shard was applied: where its parameters and their memories lie.

What is known of the insides of FSDP2 is in torch_internals/fully_shard.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import GradwireError
from gradwire.fsdp.shard_layout import ShardedShape, ShardLayout
from gradwire.torch_internals.fully_shard import ParameterGroup, Reduce, ShardedParameter, parameter_groups
from gradwire.torch_internals.versions import NEWEST


class ShardedModule:
    """A module to which fully_shard was applied, and which has parameters of its own."""

    def __init__(self, group: ParameterGroup):
        self._group = group
        self.name = group.name
        self._parameters = {parameter.name: parameter for parameter in group.parameters}
        self.shards, self.shard = group.shards, group.shard
        self.shard_group, self.replicas = group.shard_group, group.replicas
        self.layout = self._make_layout()

    @property
    def place(self) -> tuple[str, list[int], list[int]]:
        """Where it is sharded: the device type, and the ranks of the shards and of the replicas.

        Meshes that are equal may have groups of their own: fully_shard makes a mesh for every module if it is given
        none, and beside Gloo, where a GPU is visible, each of them a new group.
        """
        groups = self.shard_group, self.replicas
        shards, replicas = ([] if group is None else dist.get_process_group_ranks(group) for group in groups)
        return self._group.device_type, shards, replicas

    @property
    def sizes(self) -> dict[str, torch.Size]:
        """The sizes of whole parameters, by name; complex ones are pairs of reals."""
        return {name: _real_size(p, p.size) for name, p in self._parameters.items()}

    @property
    def divide_factor(self) -> float | None:
        """By what the user has the sum of gradients divided; None for the number of ranks."""
        return self._group.divide_factor

    def current_layout(self) -> ShardLayout:
        """Return the layout of the parameters which require gradients now."""
        if list(self.layout.shapes) != self._trained():
            self.layout = self._make_layout()
        return self.layout

    def _trained(self) -> list[str]:
        return [name for name, p in self._parameters.items() if p.requires_grad]

    def _make_layout(self) -> ShardLayout:
        return ShardLayout([self._shape(name) for name in self._trained()], self.shards)

    # ── error memory: flat while training, shaped in checkpoints ──

    @property
    def memory_sizes(self) -> dict[str, torch.Size]:
        """The sizes of what is remembered: whole parameters, or this rank's shards where those are exchanged."""
        if self.replicas is not None:
            parts = {name: (p, p.sharded_size) for name, p in self._parameters.items()}
            return {name: _real_size(p, size) for name, (p, size) in parts.items() if size.numel()}
        return self.sizes

    def shaped(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat error memory in the shape that checkpoints have."""
        size = self.memory_sizes[name]
        return flat.view(size) if self.replicas is not None else self._shape(name).in_own_order(flat, self.shards)

    def flattened(self, name: str, shaped: torch.Tensor) -> torch.Tensor:
        """Return the error memory of a checkpoint as it is kept while training; a GradwireError if it does not fit."""
        if shaped.shape != self.memory_sizes[name]:
            wanted = tuple(self.memory_sizes[name])
            raise GradwireError(f"error memory of {name!r} has shape {tuple(shaped.shape)}, not {wanted}")
        if self.replicas is not None:
            return shaped.reshape(-1)
        return self._shape(name).in_order_of_ranks(shaped, self.shards)

    def _shape(self, name: str) -> ShardedShape:
        parameter = self._parameters[name]
        return ShardedShape(name, _real_size(parameter, parameter.size), parameter.dimension)

    # ── in place of FSDP2's own collectives, and back ──

    def replace_reduce_scatter(self, reduce_scatter: Reduce) -> None:
        """Have FSDP2 call this in place of its reduce-scatter."""
        self._group.replace_reduce_scatter(reduce_scatter)

    def replace_all_reduce(self, all_reduce: Callable[[torch.Tensor], None], alone: dist.ProcessGroup) -> None:
        """Have FSDP2 call this in place of its all-reduce between replicas; `alone` is a group of this rank only."""
        self._group.replace_all_reduce(all_reduce, alone)

    def restore(self) -> None:
        """Give FSDP2 its own collectives back."""
        self._group.restore()


def weight_of(op: Any, ranks: int, divide_factor: float | None) -> float:
    """Return the factor by which a reduction multiplies each rank's tensor."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.AVG:
        return 1 / ranks
    if kind == dist.ReduceOp.PREMUL_SUM and divide_factor is not None:
        return 1 / divide_factor
    if kind != dist.ReduceOp.SUM:
        raise GradwireError(f"cannot reduce with {op}: FSDP2 to torch {NEWEST} asks for a mean or a sum")
    return 1.0


def warn_of_unused(module: str) -> None:
    """Warn that a module's gradients travel uncompressed, because some of its parameters have none."""
    warnings.warn(
        f"module {module!r}: some of its parameters had no gradient in this step, and FSDP2 does not say which; its "
        f"gradients travel uncompressed then (give such parameters a fully_shard of their own, or call "
        f"set_reduce_scatter_unused_params(True) where torch has it)",
        stacklevel=3,
    )


def modules_of(model: nn.Module) -> list[ShardedModule]:
    """Return all modules of the model that FSDP2 shards; raise GradwireError if there are none."""
    groups = parameter_groups(model)
    if groups is None:
        raise GradwireError(
            f"attach needs a model to which torch.distributed.fsdp.fully_shard was applied, got "
            f"{type(model).__name__}: shard it first (for DistributedDataParallel there is gradwire.ddp.attach)"
        )
    if not groups:
        raise GradwireError("fully_shard found no parameters in this model: there are no gradients to compress")
    return [ShardedModule(group) for group in groups]


def _real_size(parameter: ShardedParameter, size: torch.Size) -> torch.Size:
    """Return the size that a parameter's gradient, or a part of it, has as real entries."""
    return torch.Size((*size, 2)) if parameter.is_complex else size
