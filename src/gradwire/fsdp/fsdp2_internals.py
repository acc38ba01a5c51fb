"""All that gradwire knows of the insides of FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every module to which fully_shard was applied has one group of parameters, which are gathered and reduced together:
1. the gradients are cast to the reduce dtype and laid into a flat buffer (fsdp/shard_layout.py);
2. `reduce_scatter(output, input, group, op)`, ours after `set_custom_reduce_scatter`;
3. with a 2-D mesh, an all-reduce between replicas, unless `set_requires_all_reduce(False)`; then the all-reduce hook.

Nothing but a process group can be put in place of that all-reduce. So it gets one in which this rank is alone, where
it changes nothing, and the hook behind it does the work. All of it is the same in torch 2.11 and 2.13.
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

Reduce = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, Any], None]  # output, input, group, op
TESTED = "2.11 and 2.13"
_NEEDED = {  # of a group of parameters, and of a parameter
    "group": ("fsdp_params", "mesh_info", "gradient_divide_factor", "_reduce_scatter_comm", "_all_reduce_hook"),
    "parameter": ("_orig_size", "fsdp_placement", "sharded_param", "sharded_size", "_module_info"),
}


class ShardedModule:
    """A module to which fully_shard was applied, and which has parameters of its own."""

    def __init__(self, module: Any, name: str, group: Any, names: dict[int, str]):
        self.name = name
        self._module, self._group = module, group
        self._parameters = [(_name_of(parameter, names), parameter) for parameter in group.fsdp_params]
        info = group.mesh_info
        self.shards, self.shard = getattr(info, "shard_mesh_size", 1), getattr(info, "shard_mesh_rank", 0)
        self.shard_group: dist.ProcessGroup | None = getattr(info, "shard_process_group", None)
        self.replicas: dist.ProcessGroup | None = getattr(info, "replicate_process_group", None)
        self.layout = self._make_layout()
        self._before: tuple[Any, Any] | None = None

    @property
    def place(self) -> tuple[str, list[int], list[int]]:
        """Where it is sharded: the device type, and the ranks of the shards and of the replicas.

        Meshes that are equal may have groups of their own: fully_shard makes a mesh for every module if it is given
        none, and beside Gloo, where a GPU is visible, each of them a new group.
        """
        groups = self.shard_group, self.replicas
        shards, replicas = ([] if group is None else dist.get_process_group_ranks(group) for group in groups)
        return self._group.mesh_info.mesh.device_type, shards, replicas

    @property
    def sizes(self) -> dict[str, torch.Size]:
        """The sizes of whole parameters, by name."""
        return {name: p._orig_size for name, p in self._parameters}

    @property
    def divide_factor(self) -> float | None:
        """By what the user has the sum of gradients divided; None for the number of ranks."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    def current_layout(self) -> ShardLayout:
        """Return the layout of the parameters which require gradients now."""
        if list(self.layout.shapes) != [name for name, p in self._parameters if p.sharded_param.requires_grad]:
            self.layout = self._make_layout()
        return self.layout

    def _make_layout(self) -> ShardLayout:
        trained = [name for name, p in self._parameters if p.sharded_param.requires_grad]
        return ShardLayout([self._shape(name) for name in trained], self.shards)

    # ── error memory: flat while training, shaped in checkpoints ──

    @property
    def memory_sizes(self) -> dict[str, torch.Size]:
        """The sizes of what is remembered: whole parameters, or this rank's shards where those are exchanged."""
        if self.replicas is not None:
            return {name: p.sharded_size for name, p in self._parameters if p.sharded_size.numel()}
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
        parameter = dict(self._parameters)[name]
        return ShardedShape(name, tuple(parameter._orig_size), parameter.fsdp_placement.dim)

    # ── in place of FSDP2's own collectives, and back ──

    def replace_reduce_scatter(self, reduce_scatter: Reduce) -> None:
        """Have FSDP2 call this in place of its reduce-scatter."""
        self._before = self._group._reduce_scatter_comm, self._group._all_reduce_hook
        self._module.set_custom_reduce_scatter(_Comm(reduce_scatter))

    def replace_all_reduce(self, all_reduce: Callable[[torch.Tensor], None], alone: dist.ProcessGroup) -> None:
        """Have FSDP2 call this in place of its all-reduce between replicas; `alone` is a group of this rank only."""
        _, users = self._before = self._group._reduce_scatter_comm, self._group._all_reduce_hook

        def hook(row: torch.Tensor) -> None:
            all_reduce(row)
            if users is not None:
                users(row)

        self._group.mesh_info.replicate_process_group = alone
        self._module.set_all_reduce_hook(hook)

    def restore(self) -> None:
        """Give FSDP2 its own collectives back."""
        if self._before is not None:
            self._group._reduce_scatter_comm, self._group._all_reduce_hook = self._before
            if self.replicas is not None:
                self._group.mesh_info.replicate_process_group = self.replicas
            self._before = None


class _Comm:
    """The object that set_custom_reduce_scatter asks for."""

    def __init__(self, reduce_scatter: Reduce):
        self._reduce_scatter = reduce_scatter

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        self._reduce_scatter(output_tensor, input_tensor, group, op)


def weight_of(op: Any, ranks: int, divide_factor: float | None) -> float:
    """Return the factor by which a reduction multiplies each rank's tensor."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.AVG:
        return 1 / ranks
    if kind == dist.ReduceOp.PREMUL_SUM and divide_factor is not None:
        return 1 / divide_factor
    if kind != dist.ReduceOp.SUM:
        raise GradwireError(f"cannot reduce with {op}: FSDP2 of torch {TESTED} asks for a mean or a sum")
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
    kind = _fsdp_module()
    if not isinstance(model, nn.Module) or not any(isinstance(m, kind) for m in model.modules()):
        raise GradwireError(
            f"attach needs a model to which torch.distributed.fsdp.fully_shard was applied, got "
            f"{type(model).__name__}: shard it first (for DistributedDataParallel there is gradwire.ddp.attach)"
        )
    names = {id(m): name for name, m in model.named_modules()}
    modules = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            state = module._get_fsdp_state()
            single = getattr(state, "_fsdp_param_group", None) if not hasattr(state, "_fsdp_param_groups") else None
            groups = getattr(state, "_fsdp_param_groups", [single] if single is not None else [])
            if len(groups) > 1:
                raise GradwireError(f"parameters of {name!r} are on several meshes (shard_placement_fn): one is needed")
            modules += [ShardedModule(module, name, _checked(group), names) for group in groups]
    if not modules:
        raise GradwireError("fully_shard found no parameters in this model: there are no gradients to compress")
    return modules


def _fsdp_module() -> Any:
    from torch.distributed import fsdp  # half a second, which those who do not shard need not wait for

    kind: Any = getattr(fsdp, "FSDPModule", None)
    for method in ("set_custom_reduce_scatter", "set_all_reduce_hook", "_get_fsdp_state"):
        if not hasattr(kind, method):
            raise _too_different(f"FSDPModule.{method}")
    return kind


def _checked(group: Any) -> Any:
    parameters = [("parameter", p) for p in group.fsdp_params] if hasattr(group, "fsdp_params") else []
    for kind, thing in [("group", group), *parameters]:
        for attribute in _NEEDED[kind]:
            if not hasattr(thing, attribute):
                raise _too_different(f"{type(thing).__name__}.{attribute}")
    return group


def _too_different(missing: str) -> GradwireError:
    return GradwireError(
        f"gradwire.fsdp works with torch {TESTED}; this is torch {torch.__version__}, which has no {missing}"
    )


def _name_of(parameter: Any, names: dict[int, str]) -> str:
    """Return the name that the parameter has in model.named_parameters()."""
    info = parameter._module_info
    prefix = names.get(id(info.module), "")
    return f"{prefix}.{info.param_name}" if prefix else info.param_name
