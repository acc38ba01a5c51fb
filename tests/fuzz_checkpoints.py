"""Damages saved states in every way it can think of and loads them: they are refused as a whole, or load as a whole.

    python tests/fuzz_checkpoints.py --files 50000 --seed 0 [--kind TEXT]

A state that is refused must raise a GradwireError and leave the memories as they were. One that is loaded must leave
them finite, and the training able to take a step. Nothing in a file may be run. One state in ten goes through a file,
whose bytes are damaged too. State i depends on --seed and i alone: --start goes straight to it. What fails is saved.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import hashlib
import io
import math
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.catalogue.spec_by_name import parse_spec
from gradwire.checkpoints import run_file, whole_file
from gradwire.cli.options import is_of_a_run
from gradwire.flower.client.client_memory import ClientMemory, usable
from gradwire.flower.client.folder_store import FolderStore
from gradwire.flower.shared import update
from support.torch_versions import HAS_FSDP2

CORPUS = Path(__file__).parent / "checkpoints/corpus"
ran: list[str] = []  # what a hostile file has run


def run_by_a_file() -> None:
    ran.append("run")


class Hostile:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return run_by_a_file, ()


# ── what states are loaded into ───────────────────────────────────────────────────────────────────


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3))


class Handle:
    """A model whose memories are loaded: `state` is a good one, `load` takes another, `step` goes on from it."""

    def __init__(self, wrapper: str, spec: Any, **options: Any):
        self.model, self.wrapper = module(), wrapper
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parallel: nn.Module = self.model
        if wrapper == "ddp":
            self.parallel = DistributedDataParallel(self.model)
            self.handle: Any = gradwire.ddp.attach(self.parallel, spec, optimizer=self.optimizer, **options)
        elif wrapper == "data_parallel":
            self.parallel = gradwire.DataParallel(self.model, spec, optimizer=self.optimizer, **options)
            self.handle = self.parallel.gradwire
        elif wrapper == "fsdp":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (1,)))
            self.handle = gradwire.fsdp.attach(self.model, spec, **options)
        else:
            self.handle = gradwire.LocalSGD(self.model, self.optimizer, spec, **options)
        self.weights = copy.deepcopy(self.model.state_dict()) if wrapper != "fsdp" else {}
        for _ in range(3):
            self.step()
        self.state = self.handle.state_dict()
        if wrapper == "fsdp":  # which sends nothing to itself
            self.state["memory"] = {"0.weight": torch.randn(6, 7), "3.bias": torch.randn(3)}
        self.handle.load_state_dict(self.state)

    def load(self, state: Any) -> None:
        self.handle.load_state_dict(state)

    def step(self) -> None:
        if self.wrapper == "local_sgd":
            with self.handle:
                self._step()
        elif self.wrapper != "fsdp":
            self._step()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.parallel(torch.randn(5, 7)).square().mean().backward()
        self.optimizer.step()

    def present(self) -> Any:
        return self.handle.state_dict()

    def reset(self) -> None:
        if self.weights:
            self.model.load_state_dict(self.weights)
        self.optimizer.state.clear()
        self.load(self.state)


class Streaming(Handle):
    """A state with an exchange under way, saved in the block."""

    def __init__(self) -> None:
        super().__init__("local_sgd", "co3", sync_every=4, parts=2, overlap=2, outer="nesterov")
        self.handle.__enter__()
        for _ in range(3):
            self._step()
        self.state = self.handle.state_dict()
        self.handle.__exit__(KeyError, KeyError(), None)
        assert self.state["under_way"]["start"]
        self.handle.load_state_dict(self.state)


class ManyRanks(Handle):
    """States of three ranks in one, of which a single process gets the mean; or of one."""

    def __init__(self) -> None:
        super().__init__("ddp", "topk:small=same")
        one = self.handle.all_ranks.state_dict()
        self.state = {**one, "ranks": [copy.deepcopy(one["ranks"][0]) for _ in range(3)]}


class FlowerClient:
    """The memory of a client of Flower, which never raises but for another recipe: what cannot be used is dropped."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="gradwire-fuzz-")
        self.store = FolderStore(Path(self.folder.name), b"training", "client")
        self.recipes = parse_spec(update.full_spec("stc:small=same", [f"{i}.weight" for i in range(3)]))
        generator = torch.Generator().manual_seed(0)
        self.memory = {f"{i}.weight": torch.randn(6, 7, generator=generator) for i in range(3)}
        self.differences = {name: torch.randn(6, 7, generator=generator) for name in self.memory}
        ClientMemory(self.store).propose(b"1", self.memory, self.recipes)
        self.state: Any = self.store.read("pending")
        self.reset()

    def load(self, state: Any) -> None:
        whole_file.write_whole(self.store._path("pending"), state)
        self.load_file()

    def load_file(self) -> None:
        left_out = usable(ClientMemory(self.store).settle([b"1"], self.recipes), self.differences)
        self.loaded = update.encode(self.differences, {}, list(self.differences), "stc:small=same", left_out).memory

    def step(self) -> None:
        pass

    def present(self) -> Any:
        return {"memory": {name: e for name, e in self.loaded.items() if name in self.differences}}

    def reset(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        for name in ("pending", "settled"):
            self.store.drop(name)


class RunFile:
    """A checkpoint of `gradwire train`, up to what its workers load: that is a handle again."""

    def __init__(self, handle: Handle):
        self.handle = handle
        workers = [handle.state, handle.state]
        settings = {
            "task": "digits", "codecs": ("topk:small=same",), "seed": 3, "batch_size": 8, "lr": 0.1, "epochs": 2,
            "steps": None, "sync_every": None, "aggregate": "all_gather", "backward": ("none",),
        }  # fmt: skip
        checkpoint = run_file.Checkpoint(
            settings, 12, 1, 2, dict(handle.model.state_dict()), handle.optimizer.state_dict(),
            [torch.get_rng_state()[:40].clone()] * 2, workers, [{}, {}],
        )  # fmt: skip
        self.state: Any = {"format": run_file.FORMAT, **vars(checkpoint)}
        self.folder = tempfile.TemporaryDirectory(prefix="gradwire-fuzz-")
        self.path = Path(self.folder.name) / "run.pt"

    def load(self, state: Any) -> None:
        whole_file.write_whole(self.path, state)
        self.load_file()

    def load_file(self) -> None:
        loaded = run_file.load(self.path)
        if not is_of_a_run(loaded.settings):
            raise gradwire.CheckpointError("settings of another kind")
        self.handle.load(loaded.error_memory_for(0, 1))

    def step(self) -> None:
        self.handle.step()

    def present(self) -> Any:
        return self.handle.present()

    def reset(self) -> None:
        self.handle.reset()


class Dcp(Handle):
    """The parts of gradwire in a checkpoint of torch.distributed.checkpoint; its own list of contents is torch's."""

    def __init__(self) -> None:
        super().__init__("ddp", "topk:small=same")
        self.folder = tempfile.TemporaryDirectory(prefix="gradwire-fuzz-")
        self.sound = self.state
        self.state = gradwire.dcp.shard(self.handle)

    def load(self, state: Any) -> None:
        with warnings.catch_warnings(action="ignore"):
            try:
                torch_dcp.save({"gradwire": state}, checkpoint_id=self.folder.name)
            except BaseException as error:  # what DCP itself does not take is no checkpoint
                raise gradwire.CheckpointError("not saved") from error
            gradwire.dcp.load(self.handle, self.folder.name)

    def reset(self) -> None:
        self.model.load_state_dict(self.weights)
        self.optimizer.state.clear()
        self.handle.load_state_dict(self.sound)


def subjects() -> dict[str, Any]:
    """Everything that loads states, by name."""
    made: dict[str, Any] = {
        "co3": Handle("ddp", "co3"),
        "stc": Handle("ddp", "stc:small=same"),
        "scatter_reduce": Handle("ddp", "co3", aggregate="scatter_reduce"),
        "homomorphic": Handle("ddp", "homomorphic:p=all"),
        "bf16": Handle("ddp", "co3", memory="bf16"),
        "dict": Handle("data_parallel", {"0.*": "dgc:warmup=0,small=same", "2.*": "none", "*": "ecq"}),
        **({"fsdp": Handle("fsdp", "co3")} if HAS_FSDP2 else {}),
        "local_sgd": Handle("local_sgd", "stc:small=same,ahead=0.5"),
        "diloco": Handle("local_sgd", "diloco:sync_every=1"),
        "streaming": Streaming(),
        "all_ranks": ManyRanks(),
        "flower": FlowerClient(),
        "train": RunFile(Handle("ddp", "topk:small=same")),
        "dcp": Dcp(),
    }
    return made


SELDOM = {"dcp": 0.1, "flower": 0.3, "train": 0.5}  # of each of the others: these go through files


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All paths in nested dicts and lists, the tree itself left out."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in items:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def damaged_tensor(tensor: torch.Tensor, rng: random.Random) -> Any:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() > 2**20 or tensor.is_complex():
        return junk(rng)  # it was damaged before
    flat = tensor.detach().clone().reshape(-1)
    entry = rng.randrange(max(1, flat.numel()))
    if flat.numel() and flat.is_floating_point() and rng.random() < 0.5:
        flat[entry] = rng.choice((math.nan, math.inf, -math.inf, 3e38, 1e-45, -0.0))
        return flat.reshape(tensor.shape)
    ways: list[Callable[[], Any]] = [
        lambda: tensor.to(rng.choice((torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool))),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.double() * 1e200,
        lambda: flat,
        lambda: flat[:-1],
        lambda: flat[:0],
        lambda: tensor.t().contiguous().t() if tensor.dim() == 2 else flat.flip(0),
        lambda: torch.zeros((), dtype=torch.float32).expand(
            rng.choice(((2**40,), (2**20, 2**20), tuple(tensor.shape)))
        ),
        tensor.to_sparse,
        lambda: tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor,
        lambda: nn.Parameter(tensor.clone(), requires_grad=False),
        lambda: tensor.unsqueeze(0),
        tensor.tolist,
        lambda: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
    ]
    return rng.choice(ways)()


def junk(rng: random.Random) -> Any:
    return rng.choice(
        (None, True, -1, 0, 2**70, 1.5, math.nan, "", "co3", "stc:p=0.1", b"\0", [], {}, [1], {"a": 1}, {1: 2}, (1, 2),
         torch.ones(3), torch.tensor(7), {"*": "co3"}, {"*": "nothing"}, set())
    )  # fmt: skip


def mutate(tree: Any, others: list[Any], rng: random.Random) -> Any:
    """One change of the structure: a value, a key, a tensor, or a part of another state."""
    paths = places(tree)
    if not paths or rng.random() < 0.01:
        return junk(rng)
    path = rng.choice(paths)
    parent, key = at(tree, path[:-1]), path[-1]
    way = rng.randrange(8)
    if way <= 2 and isinstance(parent[key], torch.Tensor):
        parent[key] = damaged_tensor(parent[key], rng)
    elif way == 3:
        del parent[key]
    elif way == 4:
        parent[key] = junk(rng)
    elif way == 5 and isinstance(parent, dict):
        parent[rng.choice(("x", 3, "memory", "0.weight", "recipes", f"{key}.", None))] = parent.pop(key)
    elif way == 6:
        other = copy.deepcopy(rng.choice(others))
        found = [p for p in places(other) if p[-1] == key] or places(other)
        parent[key] = at(other, rng.choice(found))
    elif isinstance(parent, list):
        parent.append(parent[key])
    else:
        parent[key] = copy.deepcopy(at(tree, rng.choice(paths)))
    return tree


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    way = rng.randrange(4)
    out = bytearray(data)
    if way == 0:
        return bytes(out[: rng.randrange(len(out))])
    if way == 1:
        for _ in range(rng.choice((1, 1, 8))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif way == 2:
        at_byte = rng.randrange(len(out))
        out[at_byte : at_byte + rng.choice((0, 1, 100))] = rng.randbytes(rng.choice((1, 9)))
    else:
        buffer = io.BytesIO()
        torch.save({"memory": Hostile(), "format": run_file.FORMAT, "token": b"1"}, buffer)
        return buffer.getvalue()
    return bytes(out)


# ── what comes of it ──────────────────────────────────────────────────────────────────────────────


def fingerprint(tree: Any) -> str:
    sha = hashlib.sha256()
    for path in places(tree):
        leaf = at(tree, path)
        if isinstance(leaf, torch.Tensor):
            sha.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode())
            sha.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif not isinstance(leaf, dict | list):
            sha.update(f"{path} {leaf!r}".encode())
    return sha.hexdigest()


def check_sound(state: Any, kinds: tuple[str, ...] = ("memory", "velocity", "shards")) -> None:
    for kind in kinds:
        for name, tensor in state.get(kind, {}).items():
            assert isinstance(tensor, torch.Tensor) and bool(tensor.isfinite().all()), f"{kind} of {name} is poisoned"


def outcome(subject: Any, load: Callable[[], None]) -> str:
    """What came of loading, in words; an AssertionError or any other exception is a finding."""
    before = fingerprint(subject.present())
    try:
        load()
    except gradwire.GradwireError as error:
        assert fingerprint(subject.present()) == before, "a state that was refused has changed something"
        return "refused: " + re.sub(r"'[^']*'|\d+|/\S+", "#", str(error)).split(":")[0][:70]
    finally:
        assert not ran, "something in the file was run"
    check_sound(subject.present(), ("memory", "velocity", "shards", "anchor"))  # one of 3e38 may overflow in a step
    with contextlib.suppress(gradwire.GradwireError):  # a training may diverge from 3e38
        subject.step()
    check_sound(subject.present())
    subject.reset()
    return "loaded"


def damage(kind: str, subject: Any, all_states: list[Any], rng: random.Random) -> tuple[Any, bytes | None]:
    """A state, and the bytes of its file where it goes through one."""
    state = copy.deepcopy(subject.state)
    through_file = hasattr(subject, "load_file") and rng.random() < 0.5
    if not through_file or rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            state = mutate(state, all_states, rng) if isinstance(state, dict) else state
    if not through_file:
        return state, None
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return state, damaged_bytes(buffer.getvalue(), rng)


def load_bytes(subject: Any, data: bytes) -> None:
    path = subject.path if hasattr(subject, "path") else subject.store._path("pending")
    path.write_bytes(data)
    subject.load_file()


def replay(subject: Any, path: Path) -> str:
    """What comes of a file of the corpus: its bytes, or for what is loaded from memory what torch reads of it."""
    if hasattr(subject, "load_file"):
        return outcome(subject, lambda: load_bytes(subject, path.read_bytes()))
    return outcome(subject, lambda: subject.load(whole_file.read_whole(path)))


def start() -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return subjects()


def run(options: argparse.Namespace) -> int:
    found = {kind: s for kind, s in start().items() if options.kind in kind}
    if not found:
        print(f"no kind of state has {options.kind!r} in its name")
        return 2
    kinds, states = list(found), [s.state for s in found.values()]
    weights = [SELDOM.get(kind, 1.0) for kind in kinds]
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
    reasons: collections.Counter[str] = collections.Counter()
    failures, began = 0, time.perf_counter()
    for i in range(options.start, options.start + options.files):
        rng = random.Random(f"{options.seed} {i}")
        torch.manual_seed(i)
        kind = rng.choices(kinds, weights)[0]
        subject = found[kind]
        state, data = damage(kind, subject, states, rng)
        try:
            what = outcome(subject, lambda s=subject, t=state, d=data: s.load(t) if d is None else load_bytes(s, d))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failures += 1
            what = f"FAILURE: {type(error).__name__}: {error}"[:150]
            path = options.save / f"failure-{kind}-{options.seed}-{i}.pt"
            path.write_bytes(data) if data is not None else torch.save(state, path)
            print(f"state {i} ({kind}): {type(error).__name__}: {error}; saved as {path}")
            found[kind] = subjects()[kind]
        counts[kind][what.split(":")[0]] += 1
        reasons[what] += 1
        if (i + 1) % 100 == 0 and sys.stderr.isatty():
            print(f"\r{i + 1 - options.start} states, {failures} findings", end="", file=sys.stderr)
    seconds = time.perf_counter() - began
    for what, count in reasons.most_common(40):
        print(f"{count:10d}  {what}")
    print(f"\n{'state of':16s}{'loaded':>10s}{'refused':>10s}{'findings':>10s}")
    for kind, of in counts.items():
        print(f"{kind:16s}{of['loaded']:10d}{of['refused']:10d}{of['FAILURE']:10d}")
    print(f"{options.files} states, {failures} findings, {options.files / max(seconds, 1e-9):.0f} states/s")
    return 1 if failures else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=5_000, help="how many states to damage and load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first state")
    parser.add_argument("--kind", default="", help="of the kinds of states, those whose names contain this")
    parser.add_argument("--save", type=Path, default=Path(), help="folder for states that fail")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = run(parse())
    sys.stdout.flush()
    os._exit(code)  # without waiting for models that still hold the process group
