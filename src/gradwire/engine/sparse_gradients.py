"""Gradients in torch's sparse layout, as `nn.Embedding(..., sparse=True)` makes them: averaged as they are.

Which rows they have differs from rank to rank and from step to step, so that no frame and no error memory fits them.
With the recipe `none` they are summed by the process group of the training, as DDP does it without a hook; with any
other recipe they are refused.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.transport.link import Link
from gradwire.errors import GradwireError


class SparseMeans:
    """The sparse gradients of the step under way. The training's thread calls everything."""

    def __init__(self, recipes: ModelRecipes, ledger: StepLedger):
        self._recipes, self._ledger = recipes, ledger
        self._under_way: dict[str, torch.futures.Future[list[torch.Tensor]]] = {}

    def check(self, name: str, momentum_is_taken_over: bool) -> None:
        """Raise GradwireError unless sparse gradients of this parameter can be averaged."""
        if self._recipes.of(name).name != "none":
            raise GradwireError(
                f"{name!r} has sparse gradients, which the recipe {self._recipes.of(name).name} cannot encode: give it "
                f"none, as in {{'{name}': 'none', '*': …}}, or build the embedding with sparse=False"
            )
        if momentum_is_taken_over:
            raise GradwireError(
                f"{name!r} has sparse gradients, and a recipe of this model has taken over the momentum of its "
                f"optimizer: give it an optimizer of its own"
            )

    def start(self, name: str, gradient: torch.Tensor, group: dist.ProcessGroup, link: Link) -> int:
        """Begin to average a sparse gradient over all ranks, and return its bytes; all ranks start the same ones."""
        gradient = (gradient / dist.get_world_size(group)).coalesce()
        size = gradient.values().nbytes + gradient.indices().nbytes
        self._ledger.count_frame_bytes(size)
        link.count_all_reduce(size)
        work = dist.all_reduce(gradient, group=group, async_op=True)
        assert work is not None
        self._under_way[name] = work.get_future()
        return size

    def finish(self, link: Link) -> dict[str, torch.Tensor]:
        """Wait for all means of this step, and return them; the step fails on all ranks if one is not finite."""
        under_way, self._under_way = self._under_way, {}
        link.wait_for(under_way.values())
        means = {name: future.value()[0] for name, future in under_way.items()}
        for mean in means.values():
            self._ledger.note_finite(bool(mean.coalesce().values().isfinite().all()))
        return means

    def abandon(self) -> None:
        """Forget the step under way."""
        self._under_way = {}


def parameters_with_sparse_gradients(model: nn.Module) -> set[int]:
    """Return the ids of parameters whose gradients are sparse, as DDP finds them.

    A weight that another module has, too, gets dense gradients from there.
    """
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    return {
        key
        for key, modules in holders.items()
        if all(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in modules)
    }


def no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient without entries, of a parameter that this rank did not use."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(rows, values, parameter.shape)
