"""What each recipe costs in accuracy and bytes: whole trainings with simulated workers, through real frames.

python benchmarks/accuracy.py --task cifar10 --data-dir ~/cifar10 --device cuda --parallel 8
python benchmarks/accuracy.py --task text --runs fp32 local10 diloco10 sbc2
python benchmarks/accuracy.py --device cuda --seeds 0 1 --runs fp32 co3 ecq structured structured:nmse=0.1 powersgd:2

`powersgd:R` is PowerSGD of rank R (benchmarks/powersgd.py), which has no frames: its factors count in fp32.

Each run is a process of its own with four workers as threads (benchmarks/simulated.py), a few runs at a time.
Results go to a file of JSON lines as they come in; a table is printed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import gradwire
from gradwire import tasks
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.local_sgd.sync_round import SyncRound
from gradwire.tasks import example_order
from gradwire.tasks.base import EVALUATION_BATCH, Task, loss_of
from gradwire.tasks.images import ImageTask, LabelledImages
from gradwire.tasks.training import learning_rate_factor
from powersgd import PowerSGD
from simulated import Meeting, ThreadLink, WholeModel, decode_once, run_workers

WORKERS = 4
# name: (spec, local steps between syncs or None for the recipe's own); any other name is a spec itself
RUNS: dict[str, tuple[str, int | None]] = {
    "fp32": ("none", None),  # averaged as it is, without frames
    "co3 γ=0": ("co3:decay=0", None),
    "co3 γ=0.5": ("co3:decay=0.5", None),
    "co3 γ=0.9": ("co3:decay=0.9", None),
    "co3 γ=1": ("co3:decay=1", None),
    "ecq": ("ecq", None),
    "structured": ("structured", None),
    "structured 6%": ("structured:nmse=0.06", None),
    "structured 10%": ("structured:nmse=0.1", None),
    "structured 20%": ("structured:nmse=0.2", None),
    "bingrad-b": ("bingrad", None),
    "orq-3": ("orq:levels=3", None),
    "orq-5": ("orq:levels=5", None),
    "orq-9": ("orq:levels=9", None),
    "qsgd": ("qsgd", None),
    "terngrad": ("terngrad", None),
    "stc": ("stc", None),
    "dgc": ("dgc", None),
    "sbc1": ("sbc1", None),
    "sbc2": ("sbc2", None),
    "sbc3": ("sbc3", None),
    "sbc1-paper": ("sbc1-paper", None),
    "sbc2-paper": ("sbc2-paper", None),
    "sbc3-paper": ("sbc3-paper", None),
    "local10": ("none", 10),
    "local100": ("none", 100),
    "diloco10": ("diloco", 10),
    "stc2": ("stc2", None),
}


POWERSGD = "powersgd:"


def spec_of(name: str) -> tuple[str, int | None]:
    """The recipe of a run and its local steps, if they are not the recipe's own; PowerSGD has no recipe."""
    return RUNS["fp32"] if name.startswith(POWERSGD) else RUNS.get(name, (name, None))


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """With the 3x3 stem that is usual for 32x32 images; 11.2 M parameters."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        sizes = [(1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1)]
        self.blocks = nn.Sequential(*(Residual(a * width, b * width, stride) for a, b, stride in sizes))
        self.classify = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(functional.relu(self.norm(self.conv(x))))
        return self.classify(x.mean((2, 3)))


class Worker:
    """One thread's replica."""

    def __init__(self, options: argparse.Namespace, task: Task, rank: int, meeting: Meeting):
        self.options, self.task, self.rank = options, task, rank
        self.device = torch.device(options.device)
        self.data_device = task.train.pixels.device if isinstance(task, ImageTask) else torch.device("cpu")
        self.batch = options.batch_size or (128 if options.task == "cifar10" else task.defaults.batch_size)
        spec, sync_every = spec_of(options.one)
        with meeting_lock:  # the global generator: one model at a time
            torch.manual_seed(options.seed)
            resnet18 = options.task == "cifar10" and options.model == "resnet18"
            model = ResNet18(10, options.width) if resnet18 else task.build_model()
        self.model = model.to(self.device)
        self.model = self.model.to(memory_format=torch.channels_last)
        self.lr = options.lr or (0.2 if options.task == "cifar10" else task.defaults.lr)
        if options.task == "cifar10":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.model.parameters(), self.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
            )
        else:
            self.optimizer = task.build_optimizer(self.model, self.lr)
        if self.device.type == "cuda":
            self._graph(task, meeting)
        self.meeting, self.plain_bytes = meeting, 0
        self.powersgd = None
        if options.one.startswith(POWERSGD):
            self.powersgd = meeting.share(rank, lambda: PowerSGD(int(options.one.removeprefix(POWERSGD)), WORKERS))
        self.plain = options.one == "fp32" or self.powersgd is not None
        link = ThreadLink(meeting, rank, self.device)
        self.state: gradwire.ddp.State | None = None
        self.local: gradwire.LocalSGD | None = None
        if sync_every or gradwire.recipe(spec).delayed:
            self.local = gradwire.LocalSGD(self.model, self.optimizer, spec, sync_every)
            local = self.local
            coder = MessageCoder(local.recipes, local.memories, local.ledger, rank, link.world)
            local._round = SyncRound(coder, AllGather(link), local._buffers)
            self.local._start_alike = lambda: None  # type: ignore[method-assign]  # their seed makes them alike
        else:
            self.state = gradwire.ddp.State(
                spec, self.model, optimizer=self.optimizer, aggregate="all_gather", memory=options.memory
            )
            self.state.connect(link)
            self.state.exchange._thread.inline = True
            coder = self.state.exchange.coder
        decode_once(coder, meeting, rank)

    def _graph(self, task: Task, meeting: Meeting) -> None:
        """Record forward and backward as CUDA graphs, one thread after the other: nothing else may run meanwhile."""
        inputs = task.train_batch(torch.arange(self.batch, device=self.data_device), torch.Generator())[0]
        inputs = inputs.to(self.device)
        buffers = [b.clone() for b in self.model.buffers()]
        self.replayed = self.model
        for rank in range(WORKERS):
            if rank == self.rank:
                with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                    self.replayed = torch.cuda.make_graphed_callables(self.model, (inputs,))
                torch.cuda.synchronize()
            meeting.barrier.wait()
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def train(self) -> dict[str, Any]:
        self.model.train()
        per_epoch = self.task.train_size // (self.batch * WORKERS)
        last = self.options.steps or per_epoch * self.options.epochs
        step = 0
        with self.local or contextlib.nullcontext():
            while step < last:
                epoch, within = divmod(step, per_epoch)
                if within == 0:
                    shuffled = example_order.epoch_order(self.task.train_size, self.options.seed, epoch)
                indices = example_order.batch_indices(shuffled, within, self.rank, WORKERS, self.batch)
                generator = example_order.augmentation_generator(self.options.seed, epoch, within, self.rank)
                batch = self.task.train_batch(indices.to(self.data_device), generator)
                self._step(*batch, learning_rate_factor(step, last, self.options.lr_warmup))
                step += 1
        stats = (self.local or self.state).stats()  # type: ignore[union-attr]
        if self.plain:
            sent = {"wire_bytes_sent": (WORKERS - 1) * self.plain_bytes}
            dense = 4 * step * sum(p.numel() for p in self.model.parameters())
            stats = {"frame_bytes": self.plain_bytes, "dense_bytes": dense, **sent}
        return {"steps": step, "stats": stats}

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * factor
        self.optimizer.zero_grad()
        loss_of(self._forward(inputs), targets.to(self.device)).backward()
        if self.plain:
            self._average_plainly()
        elif self.state:
            self.state.reduce(WholeModel(list(self.model.parameters())))  # type: ignore[arg-type]
        self.optimizer.step()

    def _average_plainly(self) -> None:
        """Without frames: 4 bytes an entry to every other worker, or what PowerSGD sends."""
        named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.meeting.blocks[self.rank] = named
        self.meeting.barrier.wait()
        if self.powersgd is not None:
            means = self.meeting.share(self.rank, lambda: self.powersgd.average(self.meeting.blocks))
            self.plain_bytes = self.powersgd.bytes // WORKERS
        else:
            means = {name: torch.stack([of[name] for of in self.meeting.blocks]).mean(0) for name in named}
            self.plain_bytes += 4 * sum(g.numel() for g in named.values())
        means = {name: mean.clone() for name, mean in means.items()}  # some are on their way to all workers
        self.meeting.barrier.wait()
        for name, gradient in named.items():
            gradient.copy_(means[name])

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.to(self.device)
        if self.device.type == "cpu":
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.options.bf16):
                return self.model(inputs).float()
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            return (self.replayed if self.model.training else self.model)(inputs).float()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        loss = right = total = 0.0
        for start in range(0, self.task.test_size, EVALUATION_BATCH):
            stop = min(start + EVALUATION_BATCH, self.task.test_size)
            inputs, targets = self.task.test_batch(torch.arange(start, stop, device=self.data_device))
            logits, targets = self._forward(inputs), targets.to(self.device)
            loss += float(loss_of(logits, targets)) * targets.numel()
            right += float((logits.argmax(-1) == targets).sum())
            total += targets.numel()
        return self.task.metrics(loss / total, right / total)


def one(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = load(options)
    if options.device != "cpu" and isinstance(task, ImageTask):
        task.train, task.test = (
            LabelledImages(*(t.to(options.device) for t in part)) for part in (task.train, task.test)
        )
    start = time.perf_counter()

    def work(rank: int, meeting: Meeting) -> dict[str, Any]:
        worker = Worker(options, task, rank, meeting)
        result = worker.train()
        digest = gradwire.checkpoints.run_file.digest(worker.model)
        return {**result, "digest": digest, "figures": worker.evaluate() if rank == 0 else {}}

    results = run_workers(WORKERS, work)
    if len({r["digest"] for r in results}) > 1:
        raise SystemExit(f"{options.one}: replicas differ")
    stats = results[0]["stats"]
    return {
        "run": options.one,
        "spec": options.one if options.one.startswith(POWERSGD) else str(gradwire.recipe(spec_of(options.one)[0])),
        "task": options.task,
        "seed": options.seed,
        "memory": options.memory,
        "steps": results[0]["steps"],
        **results[0]["figures"],
        "frame_bytes": sum(r["stats"]["frame_bytes"] for r in results) / WORKERS,
        "wire_bytes_sent": sum(r["stats"]["wire_bytes_sent"] for r in results) / WORKERS,
        "dense_bytes": stats["dense_bytes"],
        "ratio": stats["dense_bytes"] * WORKERS / sum(r["stats"]["frame_bytes"] for r in results),
        "seconds": time.perf_counter() - start,
        "torch": torch.__version__,
    }


def load(options: argparse.Namespace) -> Task:
    """The task; decoded images are kept beside their folder for the other processes."""
    kept = options.data_dir / "accuracy-cache.pt"
    if options.task == "cifar10" and kept.is_file():
        return torch.load(kept, weights_only=False)
    task = tasks.find(options.task)(options.data_dir)
    if options.task == "cifar10":
        torch.save(task, kept)
    return task


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    load(options)
    waiting = [(name, seed) for seed in options.seeds for name in options.runs]
    running: list[tuple[subprocess.Popen[str], str, int]] = []
    results, total, done = [], len(waiting), 0
    deadline = time.monotonic() + options.limit
    while waiting or running:
        while waiting and len(running) < options.parallel:
            name, seed = waiting.pop(0)
            command = [sys.executable, __file__, *sys.argv[1:], "--one", name, "--seed", str(seed)]
            running.append((subprocess.Popen(command, stdout=subprocess.PIPE, text=True), name, seed))
        for entry in list(running):
            process, name, seed = entry
            if process.poll() is None and time.monotonic() < deadline:
                continue
            running.remove(entry)
            process.kill()
            output = process.communicate()[0] if process.stdout else ""
            done += 1
            lines = [line for line in output.splitlines() if line.startswith("{")]
            if lines:
                results.append(json.loads(lines[-1]))
                with options.json.open("a") as file:
                    file.write(lines[-1] + "\n")
            state = f"{results[-1]['seconds']:.0f} s" if lines else "failed"
            print(f"[{done}/{total}] {name}, seed {seed}: {state}", flush=True)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    return results


def show(results: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(r["run"] for r in results))
    metric = next(key for key in results[0] if key in ("accuracy", "bits_per_byte", "loss"))
    print(f"\n{'run':16}{metric:>16}{'seeds':>7}{'frame MB':>12}{'wire MB':>12}{'ratio':>10}")
    for name in names:
        own = [r for r in results if r["run"] == name]
        mean = {
            key: statistics.mean(r[key] for r in own) for key in (metric, "frame_bytes", "wire_bytes_sent", "ratio")
        }
        print(
            f"{name:16}{mean[metric]:16.4f}{len(own):7}{mean['frame_bytes'] / 1e6:12.3f}"
            f"{mean['wire_bytes_sent'] / 1e6:12.3f}{mean['ratio']:10.1f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar10", choices=["cifar10", "text", "digits"])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="fp32", choices=["fp32", "bf16"], help="of errors, without local steps")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), metavar="NAME or SPEC")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--lr-warmup", type=float, default=0.2, help="share of the steps in which it rises")
    parser.add_argument("--bf16", action="store_true", help="forward and backward in bfloat16; on a GPU always")
    parser.add_argument("--model", default="resnet18", choices=["resnet18", "resnet20"], help="for cifar10")
    parser.add_argument("--width", type=int, default=64, help="of the ResNet-18's first stage")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which what still runs is stopped")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/accuracy.jsonl"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    import threading

    import gradwire.checkpoints.run_file

    meeting_lock = threading.Lock()
    arguments = parse()
    if arguments.one:
        print(json.dumps(one(arguments)), flush=True)
    else:
        found = run_all(arguments)
        if found:
            show(found)
