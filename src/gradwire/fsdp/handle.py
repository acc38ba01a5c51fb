"""Compressed gradients for FSDP2, in one line:

    handle = gradwire.fsdp.attach(fsdp_model, "co3")

Each wrapped module's reduce-scatter goes through frames (`fsdp/shard_exchanges.py` has the steps); on a 2-D mesh
(hybrid sharding) that stays as it is, and the all-reduce between replicas goes through frames instead. The all-gather
of parameters is left alone.

Error memory is provisional until the end of backward. Every message says whether all that its rank sends is finite,
so all ranks of the exchange know it at once; with hybrid sharding the ranks that share a replica tell each other at
the end, one byte each. Then all commit, or all roll back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire import gpu
from gradwire.aggregate.transport.link import Link, reduce_scatter_tensor
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.saved_recipes import KEY, check_saved_recipes
from gradwire.catalogue.spec_by_name import Spec, parse_spec, recipe_of_name
from gradwire.checkpoints.rank_states import AllRanks, own_part
from gradwire.correct.complex_pairs import as_reals
from gradwire.correct.saved_memories import read_memories
from gradwire.engine import auto
from gradwire.engine.options import Scaler
from gradwire.errors import CheckpointError, GradwireError, SpecError, unknown_name
from gradwire.fsdp.part_error_memory import PartErrorMemory
from gradwire.fsdp.shard_exchanges import ReplicaAllReduce, ShardReduceScatter
from gradwire.fsdp.shard_frames import ShardFrames
from gradwire.fsdp.sharded_module import ShardedModule, modules_of, warn_of_unused, weight_of
from gradwire.torch_internals.autograd import call_after_backward

_log = logging.getLogger(__name__)
MEMORIES: dict[str, torch.dtype | None] = {"fp32": torch.float32, "bf16": torch.bfloat16, "none": None}


class FSDPHandle:
    """What `attach` returns: the compressed collectives of all wrapped modules, and what they remember.

    Autograd's thread calls the collectives in backward; everything else is for the training's thread, between steps.
    """

    def __init__(self, modules: list[ShardedModule], spec: Spec, memory: torch.dtype | None, scaler: Scaler | None):
        first = modules[0]
        self._modules = modules
        self._module_of = {name: module for module in modules for name in module.memory_sizes}
        self._scaler = scaler
        sizes = {name: size for module in modules for name, size in module.sizes.items()}
        self.frames = ShardFrames(spec, sizes, None if memory is None else PartErrorMemory(memory))
        self._link = Link(first.shard_group if first.replicas is None else first.replicas)
        self._host = Link(first.shard_group) if first.replicas is not None and first.shards > 1 else None
        facts = {"spec": str(self.frames.recipes), "memory": str(memory).removeprefix("torch.")}
        self._link.agree(facts, {name: str(size) for name, size in sizes.items()})
        self._reduce_scatter = ShardReduceScatter(self.frames, self._link)
        self._all_reduce = ReplicaAllReduce(self.frames, self._link)
        self._alone: Link | None = None  # with a group of this rank, in place of that of the replicas
        self._begun = False  # whether a step is under way
        self._steps_before = 0  # of the run that was loaded: the other figures do not cover them

    def _install(self) -> None:
        if self._modules[0].replicas is None:
            for module in self._modules:
                module.replace_reduce_scatter(partial(self._shards, module))
        else:
            self._alone = Link.alone(self._link)
            for module in self._modules:
                module.replace_all_reduce(partial(self._replicas, module), self._alone.group)

    # ── what FSDP2 calls in backward ──

    def _shards(
        self, module: ShardedModule, out: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> None:
        layout = module.current_layout()
        out, flat = (as_reals(buffer).view(-1) for buffer in (out, flat))
        if flat.numel() != layout.row * layout.ranks or not flat.is_floating_point():
            # FSDP2 leaves out parameters without a gradient, and does not say which ones.
            warn_of_unused(module.name)
            reduce_scatter_tensor(out, flat, op=op, group=group)
            return
        weight = weight_of(op, self._link.world, module.divide_factor)
        self._run(lambda: self._reduce_scatter(module.name, layout, flat.view(layout.ranks, -1), out, weight))

    def _replicas(self, module: ShardedModule, row: torch.Tensor) -> None:
        layout = module.current_layout()
        weight = 1 / self._link.world if module.divide_factor is None else 1.0
        row = as_reals(row).view(-1)
        if len(row) != layout.row or not row.is_floating_point():
            warn_of_unused(module.name)
            dist.all_reduce(row, group=self._link.group)
            row.mul_(weight)
            return
        self._run(lambda: self._all_reduce(module.name, layout, module.shard, row, weight))

    def _run(self, exchange: Callable[[], None]) -> None:
        if self._scaler is not None and self.frames.memory is not None:
            self.frames.memory.rescale(float(self._scaler.get_scale()))
        self._begun = True
        # Each call asks for it, since a backward that failed leaves none behind; only the first has something to do.
        call_after_backward(self._end_step)
        try:
            exchange()
        except BaseException as error:
            self._link.give_up(error)
            self.frames.abandon_step()
            self._begun = False
            raise

    def _end_step(self) -> None:
        if self._begun:
            finite = self.frames.ledger.finite
            if self._host is not None:
                finite = all(flag == b"\1" for flag in self._host.gather_short(bytes([finite])))
            self.frames.end_step(finite)
            self._link.at_step(self.frames.ledger.steps)
            self._begun = False

    # ── what users see ──

    def stats(self) -> dict[str, float]:
        """Return the totals of this rank since it was attached or loaded; `ratio` is fp32 bytes over frame bytes.

        With hybrid sharding only what goes between replicas is counted.
        """
        frames, figures = self.frames, self.frames.ledger.stats()
        return {
            "steps": frames.ledger.steps - self._steps_before,
            **figures,
            "wire_bytes_sent": self._link.bytes_sent,
            "wire_bytes_received": self._link.bytes_received,
            "dense_bytes": frames.dense_bytes,
            "ratio": frames.dense_bytes / figures["frame_bytes"] if figures["frame_bytes"] else 1.0,
        }

    @property
    def memory_bytes(self) -> int:
        """The bytes that error memory takes on this rank: two copies, of which one is provisional."""
        if self.frames.memory is None:
            return 0
        sizes = [size for m in self._modules for name, size in m.memory_sizes.items() if self._remembers(name)]
        return 2 * self.frames.memory.dtype.itemsize * sum(size.numel() for size in sizes)

    @property
    def _codes_on_gpu(self) -> bool:
        """Whether there are kernels for the recipes of all parameters on the GPU where these are."""
        kind = self._modules[0].place[0]
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        codecs = [recipe.codec for recipe in self.frames.recipes.by_pattern.values()]
        return kind == "cuda" and all(gpu.can_encode(codec.converter, torch.float32, device) for codec in codecs)

    def _remembers(self, name: str) -> bool:
        return bool(self.frames.recipes.of(name).decay)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error memory, by parameter name: of whole parameters or, with hybrid sharding, shards."""
        flat = {} if self.frames.memory is None else self.frames.memory.state_dict()
        memory = {name: self._module_of[name].shaped(name, e) for name, e in flat.items()}
        return {"steps": self.frames.ledger.steps, KEY: self.frames.recipes.state_dict(), "memory": memory}

    @property
    def all_ranks(self) -> AllRanks:
        """The state of all ranks at once, for checkpoints that rank 0 writes."""
        return AllRanks(self, together=self._link.together)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` of this rank was, or `all_ranks.state_dict()`, of any number of workers.

        A state that does not fit is a CheckpointError, and changes nothing.
        """
        state = own_part(state)
        memory, recipes = self.frames.memory, self.frames.recipes
        shapes = {name: module.memory_sizes[name] for name, module in self._module_of.items()}
        dtype = torch.float32 if memory is None else memory.dtype
        saved = read_memories(state, self._module_of, shapes, dtype)
        remembered = {name: recipes.sizes[name] for name in saved.remembered}
        check_saved_recipes(state, recipes.by_pattern, remembered, saved.accelerated)
        if saved.shards or "anchor" in state or (memory is None and saved.memory):
            raise CheckpointError(
                "the state has memories that FSDP2 would not send: it is of another wrapper, or of a run with "
                "memory='fp32' or 'bf16', where this one has memory='none'"
            )
        if memory is not None:
            memory.load({name: self._module_of[name].flattened(name, e) for name, e in saved.memory.items()})
        self._steps_before = saved.steps
        self.frames.ledger.resume_at(self._steps_before)

    def detach(self) -> None:
        """Go back to FSDP2's own collectives; the model can be attached again."""
        for module in self._modules:
            module.restore()
        if self._alone is not None:
            self._alone.close()
            self._alone = None


def attach(
    model: nn.Module, spec: Spec = "co3", *, memory: str = "fp32", grad_scaler: Scaler | None = None
) -> FSDPHandle:
    """Compress the gradients of a model to which fully_shard was applied; call it on the outermost module.

    `spec` is a recipe, or a dict from patterns of parameter names to recipes. Error memory covers whole parameters on
    every rank, where gradients are coded: on the GPU, or in host memory where there are no kernels for the recipe or
    the device. `memory` is "fp32", "bf16" or "none". With torch.amp.GradScaler, pass it as
    `grad_scaler`, since the loss scale is in the gradients. A model that is attached already gets the new recipe in
    place of the old one, and an empty error memory.
    """
    if isinstance(spec, str) and auto.parse(spec) is not None:
        raise SpecError("auto measures steps of DDP and DataParallel: with FSDP2 choose a recipe, such as co3")
    recipes = parse_spec(spec)
    for recipe in recipes.values():
        _check_for_shards(recipe)
    if not isinstance(memory, str) or memory not in MEMORIES:
        raise unknown_name("memory", memory, MEMORIES)
    modules = modules_of(model)
    for module in modules:
        for name in module.sizes:
            recipe_of_name(name, recipes)
    if any(module.place != modules[0].place for module in modules):
        raise GradwireError("the modules of this model are sharded over different meshes: one is needed")
    before = getattr(model, "_gradwire_fsdp", None)
    if before is not None:
        before.detach()
        modules = modules_of(model)
    handle = FSDPHandle(modules, spec, MEMORIES[memory], grad_scaler)
    handle._install()
    object.__setattr__(model, "_gradwire_fsdp", handle)  # not a parameter, not a module
    if dist.get_rank() == 0 and handle.memory_bytes:
        advice = " (memory='bf16' halves it, memory='none' does without)" if memory == "fp32" else ""
        where = "GPU" if handle._codes_on_gpu else "host"
        _log.warning("error memory: %.1f MB of %s memory on each rank%s", handle.memory_bytes / 1e6, where, advice)
    return handle


def _check_for_shards(recipe: Recipe) -> None:
    name = recipe.name
    if recipe.delayed:
        raise SpecError(f"{name} {recipe.delayed}: FSDP2 reduces in every step, and each module for itself")
    if recipe.mask:
        raise SpecError(
            f"{name} masks momentum where a rank sends, but with FSDP2 momentum is the owner's alone: switch it off in "
            f"the spec (mask=off)"
        )
    if recipe.in_adam_units:
        raise SpecError(f"{name} needs whole second moments, of which FSDP2 leaves each rank a part: use structured")
    if recipe.clip:
        raise SpecError(f"{name} clips whole gradients, of which FSDP2 sends parts: switch it off (clip_norm=0)")
    if recipe.values.get("k", "none") != "none":
        raise SpecError(f"{name} sends k entries of each tensor, but FSDP2 sends tensors in parts: give the share p")
