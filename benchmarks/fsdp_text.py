"""FSDP2 on four ranks, the text task: uncompressed beside gradwire, the same batches, several seeds.

    python benchmarks/fsdp_text.py [--steps 100] [--seeds 0 1] [--specs co3] [--save]

Reported for each run: the training loss (mean over ranks and tenths of the run), the loss on held-out text, and the
bytes that a rank sends in a step: reduce-scatter and the all-gathers of parameters. Those of torch's own collectives
are what any algorithm has to send, (W−1)/W of the buffer; gradwire's are counted, with padding and prefixes. Ranks
share one machine, so times would say nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.tasks import example_order
from gradwire.tasks.base import evaluation_sums, loss_of
from gradwire.tasks.text import Text
from machine import processor

WORLD = 4
RESULTS = Path(__file__).parent / "results" / "fsdp_text.json"


class Counted:
    """A collective of torch as FSDP2 uses it, and the bytes that this rank has to send for it."""

    def __init__(self, name: str):
        self.bytes_sent = 0
        self._collective = getattr(dist, f"{name}_single", None) or getattr(dist, name + LONG[name])

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> Any:
        longer = max(output_tensor.nbytes, input_tensor.nbytes)
        self.bytes_sent += longer * (group.size() - 1) // group.size()
        return self._collective(output_tensor, input_tensor, group=group, **options)


LONG = {"all_gather": "_into_tensor", "reduce_scatter": "_tensor"}  # the names before torch 2.13


def train(task: Text, spec: str, seed: int, steps: int) -> dict[str, Any]:
    """One run of this rank; spec "" for FSDP2 as it is."""
    torch.manual_seed(seed)
    rank, batch = dist.get_rank(), task.defaults.batch_size
    model = task.build_model()
    mesh = init_device_mesh("cpu", (WORLD,))  # where a GPU is visible, fully_shard would take that
    for module in (model.embedding, model.memory, model.predict, model):
        fully_shard(module, mesh=mesh)
    gathers, reduces = Counted("all_gather"), Counted("reduce_scatter")
    for module in (model.embedding, model.memory, model.predict):
        module.set_custom_all_gather(gathers)
        module.set_custom_reduce_scatter(reduces)
    handle = gradwire.fsdp.attach(model, spec) if spec else None
    optimizer = task.build_optimizer(model, task.defaults.lr)
    epoch = example_order.epoch_order(task.train_size, seed, 0)
    losses = []
    for step in range(steps):
        chosen = example_order.batch_indices(epoch, step, rank, WORLD, batch)
        inputs, targets = task.train_batch(chosen, example_order.augmentation_generator(seed, 0, step, rank))
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sent = handle.stats()["wire_bytes_sent"] if handle else reduces.bytes_sent
    gathered = gathers.bytes_sent
    curve = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(curve)
    return {
        "spec": spec or "uncompressed",
        "seed": seed,
        "curve": [round(float(part.mean()) / WORLD, 4) for part in curve.tensor_split(10)],
        "test_loss": round(test_loss(task, model), 4),
        "reduce_scatter_bytes_per_step": round(sent / steps),
        "all_gather_bytes_per_step": round(gathered / steps),
        "frame_ratio": round(handle.stats()["ratio"], 2) if handle else 1.0,
    }


def test_loss(task: Text, model: nn.Module) -> float:
    whole = task.build_model()
    whole.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    sums = evaluation_sums(task, whole, dist.get_rank(), WORLD)
    dist.all_reduce(sums)
    return float(sums[0] / sums[2])


def work(rank: int, folder: Path, options: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=timeout)
    task = Text(Path())
    rows = []
    for seed in options.seeds:
        for spec in ("", *options.specs):
            rows.append(train(task, spec, seed, options.steps))
            if rank == 0:
                print(json.dumps(rows[-1]), flush=True)
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | test loss, by seed | last tenth of training | reduce-scatter, kB a step | × fewer | with all-gathers, kB |"
        " × fewer |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = [row for row in rows if row["spec"] == "uncompressed"]
    first = plain[0]["reduce_scatter_bytes_per_step"], plain[0]["all_gather_bytes_per_step"]
    for spec in dict.fromkeys(row["spec"] for row in rows):
        own = [row for row in rows if row["spec"] == spec]
        sent = statistics.mean(row["reduce_scatter_bytes_per_step"] for row in own)
        total = sent + own[0]["all_gather_bytes_per_step"]
        test = ", ".join(f"{row['test_loss']:.3f}" for row in own)
        last = ", ".join(f"{row['curve'][-1]:.3f}" for row in own)
        lines.append(
            f"| {spec} | {test} | {last} | {sent / 1000:.0f} | {first[0] / sent:.1f} | {total / 1000:.0f} |"
            f" {sum(first) / total:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--specs", nargs="+", default=["co3"])
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, Path(folder), options)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        rows = json.loads((Path(folder) / "rows.json").read_text())
    print(table(rows))
    if options.save:
        command = f"python benchmarks/fsdp_text.py --steps {options.steps} --seeds {' '.join(map(str, options.seeds))}"
        machine = {"processor": processor(), "torch": torch.__version__, "ranks": WORLD}
        RESULTS.write_text(json.dumps({"command": command, "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
