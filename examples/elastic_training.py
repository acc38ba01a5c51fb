"""A training that torchrun starts again when a worker is lost, with everyone's error memory.

torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic_training.py
torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic_training.py --die-at 25      # as if a worker were lost
"""

import argparse
import datetime
import os
import signal
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import gradwire

parser = argparse.ArgumentParser()
parser.add_argument("--spec", default="co3", help="a recipe")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--checkpoint", type=Path, default=Path("elastic-checkpoint.pt"))
parser.add_argument("--die-at", type=int, default=-1, help="kill rank 1 in this step, the first time")
args = parser.parse_args()

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 8), nn.Tanh())
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
handle = gradwire.ddp.attach(model, args.spec, optimizer=optimizer)

first = 0
if args.checkpoint.exists():  # nobody writes yet: the first one is written in a step that all ranks have come to
    saved = torch.load(args.checkpoint, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.load_state_dict(saved["gradwire"])  # each rank its own memory, or the mean on another number of workers
    first = saved["step"]

for step in range(first, args.steps):
    generator = torch.Generator().manual_seed(step * world + rank)
    x = torch.randn(64, 32, generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), teacher(x).detach())
    if step == args.die_at and rank == 1 and restarts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()  # an AggregateError on all others if a worker is lost: it ends them, and torchrun starts all anew
    optimizer.step()
    if (step + 1) % args.save_every == 0:
        memories = handle.all_ranks.state_dict()  # all ranks call it, rank 0 gets them
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            part = args.checkpoint.with_suffix(".part")  # so that half a file is never loaded
            torch.save({"step": step + 1, "gradwire": memories, **state}, part)
            part.replace(args.checkpoint)

checksum = zlib.crc32(parameters_to_vector(model.parameters()).detach().numpy())
print(
    f"rank {rank}: step {first} to {args.steps} after {restarts} restarts, loss {loss:.4f}, "
    f"checksum of the parameters {checksum:08x}"
)
dist.destroy_process_group()
