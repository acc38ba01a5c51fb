"""The insides of FSDP2 (`torch.distributed.fsdp.fully_shard`), the same in torch 2.11 to 2.15.

Every module to which fully_shard was applied has one group of parameters, which are gathered and reduced together:
1. the gradients are cast to the reduce dtype and laid into a flat buffer (fsdp/shard_layout.py);
2. `reduce_scatter(output, input, group, op)`, ours after `set_custom_reduce_scatter`;
3. with a 2-D mesh, an all-reduce between replicas, unless `set_requires_all_reduce(False)`; then the all-reduce hook.

Nothing but a process group can be put in place of that all-reduce. So it gets one in which this rank is alone, where
it changes nothing, and the hook behind it does the work.

Older versions do not have all of it. `parameter_groups` looks for every name that is used here, and raises a
GradwireError that says which one is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import GradwireError
from gradwire.torch_internals.versions import gone

OLDEST = "2.11"  # that all tests pass with
Reduce = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, Any], None]  # output, input, group, op
NEEDED = {
    "module": ("set_custom_reduce_scatter", "set_all_reduce_hook", "_get_fsdp_state"),
    "group": ("fsdp_params", "mesh_info", "gradient_divide_factor", "_reduce_scatter_comm", "_all_reduce_hook"),
    "parameter": ("_orig_size", "fsdp_placement", "sharded_param", "sharded_size", "_module_info"),
}


class ShardedParameter:
    """One parameter of a group, by the name that it has in the model.

    Relies on `FSDPParam`: `_module_info`, `_orig_size`, `sharded_size`, `sharded_param` and `fsdp_placement`.
    """

    def __init__(self, parameter: Any, names: dict[int, str]):
        self._parameter = parameter
        info = parameter._module_info
        prefix = names.get(id(info.module), "")
        self.name: str = f"{prefix}.{info.param_name}" if prefix else info.param_name

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained now."""
        return bool(self._parameter.sharded_param.requires_grad)

    @property
    def is_complex(self) -> bool:
        """Whether its entries are complex numbers."""
        return bool(self._parameter.sharded_param.is_complex())

    @property
    def size(self) -> torch.Size:
        """The size of the whole parameter."""
        size: torch.Size = self._parameter._orig_size
        return size

    @property
    def sharded_size(self) -> torch.Size:
        """The size of this rank's shard."""
        size: torch.Size = self._parameter.sharded_size
        return size

    @property
    def dimension(self) -> int:
        """The dimension along which it is cut."""
        return int(self._parameter.fsdp_placement.dim)


class ParameterGroup:
    """The group of parameters of one module, and its collectives.

    Relies on `FSDPParamGroup`: `fsdp_params`, `gradient_divide_factor`, `_reduce_scatter_comm`, `_all_reduce_hook`, and
    `mesh_info`, whose `replicate_process_group` is read when the all-reduce starts.
    """

    def __init__(self, module: Any, name: str, group: Any, names: dict[int, str]):
        self.name = name
        self._module, self._group = module, group
        self.parameters = [ShardedParameter(parameter, names) for parameter in group.fsdp_params]
        info = group.mesh_info
        self.device_type: str = info.mesh.device_type
        self.shards, self.shard = getattr(info, "shard_mesh_size", 1), getattr(info, "shard_mesh_rank", 0)
        self.shard_group: dist.ProcessGroup | None = getattr(info, "shard_process_group", None)
        self.replicas: dist.ProcessGroup | None = getattr(info, "replicate_process_group", None)
        self._before: tuple[Any, Any] | None = None

    @property
    def divide_factor(self) -> float | None:
        """By what the user has the sum of gradients divided; None for the number of ranks."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

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


def parameter_groups(model: Any) -> list[ParameterGroup] | None:
    """Return the groups of all modules of the model that FSDP2 shards; None if there is no such module.

    Relies on `FSDPModule._get_fsdp_state`, and on `_fsdp_param_groups` of that state, or `_fsdp_param_group` in
    versions in which there is one alone.
    """
    from torch.distributed import fsdp  # half a second, which those who do not shard need not wait for

    kind: Any = getattr(fsdp, "FSDPModule", None)
    _check("module", kind, "FSDPModule")
    if not isinstance(model, nn.Module) or not any(isinstance(module, kind) for module in model.modules()):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            state = module._get_fsdp_state()
            single = getattr(state, "_fsdp_param_group", None) if not hasattr(state, "_fsdp_param_groups") else None
            groups = getattr(state, "_fsdp_param_groups", [single] if single is not None else [])
            if len(groups) > 1:
                raise GradwireError(f"parameters of {name!r} are on several meshes (shard_placement_fn): one is needed")
            for group in groups:
                _check("group", group, type(group).__name__)
                for parameter in group.fsdp_params:
                    _check("parameter", parameter, type(parameter).__name__)
                found.append(ParameterGroup(module, name, group, names))
    return found


def _check(kind: str, thing: Any, called: str) -> None:
    for attribute in NEEDED[kind]:
        if not hasattr(thing, attribute):
            raise gone(f"{called}.{attribute}, which gradwire.fsdp needs,", OLDEST)
