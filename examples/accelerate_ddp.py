"""Hugging Face Accelerate with compressed gradients: attach to the prepared model.

torchrun --nproc-per-node 2 examples/accelerate_ddp.py
torchrun --nproc-per-node 2 examples/accelerate_ddp.py --resume
"""

import argparse
import zlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import gradwire

parser = argparse.ArgumentParser()
parser.add_argument("--spec", default="co3", help="a recipe")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-at", type=int, default=20, help="the step after which a checkpoint is written")
parser.add_argument("--checkpoint", default="accelerate-checkpoint")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x = torch.randn(128 * args.steps * accelerator.num_processes, 32)
y = nn.Sequential(nn.Linear(32, 8), nn.Tanh())(x).detach()
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=64)  # of each process: two batches make a step
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

# ↓ the line; optimizer.optimizer is torch's own, for recipes that take over momentum; the scaler is None but for fp16
handle = gradwire.ddp.attach(model, args.spec, optimizer=optimizer.optimizer, grad_scaler=accelerator.scaler)
accelerator.register_for_checkpointing(handle.all_ranks)  # save_state and load_state then have the error memories

step = 0
if args.resume:
    accelerator.load_state(args.checkpoint)
    step = args.save_at
    loader = accelerator.skip_first_batches(loader, 2 * step)

for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        if step == args.save_at and not args.resume:
            accelerator.save_state(args.checkpoint)

stats = handle.stats()
checksum = zlib.crc32(parameters_to_vector(model.parameters()).detach().numpy())
print(
    f"rank {accelerator.process_index}: {stats['steps']} steps, loss {loss:.4f}, "
    f"{stats['frame_bytes']} bytes of frames ({stats['ratio']:.1f} times fewer than fp32), "
    f"checksum of the parameters {checksum:08x}"
)
accelerator.end_training()
