"""DistributedDataParallel with compressed gradients, and a checkpoint to go on from.

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py --resume      # goes on bit for bit; on 3 processes, from the mean
"""

import argparse
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import gradwire

parser = argparse.ArgumentParser()
parser.add_argument("--spec", default="co3", help="a recipe")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-at", type=int, default=20, help="the step after which a checkpoint is written")
parser.add_argument("--checkpoint", default="ddp-checkpoint.pt")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 8), nn.Tanh())
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
handle = gradwire.ddp.attach(model, args.spec, optimizer=optimizer)  # ← the line

first = 0
if args.resume:
    saved = torch.load(args.checkpoint, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.load_state_dict(saved["gradwire"])  # each rank's own memory, or the mean on another number of workers
    first = saved["step"]

for step in range(first, args.steps):
    generator = torch.Generator().manual_seed(step * world + rank)
    x = torch.randn(64, 32, generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), teacher(x).detach())
    loss.backward()
    optimizer.step()
    if step + 1 == args.save_at:
        memories = handle.all_ranks.state_dict()  # all ranks call it, rank 0 gets them
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": args.save_at, "gradwire": memories, **state}, args.checkpoint)

stats = handle.stats()
checksum = zlib.crc32(parameters_to_vector(model.parameters()).detach().numpy())
print(
    f"rank {rank}: {stats['steps']} steps, loss {loss:.4f}, "
    f"{stats['frame_bytes']} bytes of frames ({stats['ratio']:.1f} times fewer than fp32), "
    f"checksum of the parameters {checksum:08x}"
)
dist.destroy_process_group()
