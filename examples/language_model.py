"""A language model under AdamW over a thin link, on one machine or on two sites.

torchrun --nproc-per-node 2 examples/language_model.py                                     # an exchange in every step
torchrun --nproc-per-node 2 examples/language_model.py --every 30 --spec ecq:rate=2        # DiLoCo: one in thirty steps
torchrun --nproc-per-node 2 examples/language_model.py --every 30 --spec ecq:rate=2 --parts 3 --overlap 5 --mix 0.5
torchrun --nproc-per-node 2 examples/language_model.py --spec none                         # fp32, to compare with

The text is the source of Python's standard library, or --text FILE; a tenth of it is held out.
docs/language-models.md says which line is for which link, and how to start them on two sites.
"""

import argparse
import contextlib
import glob
import sysconfig
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import gradwire

HEAD = 32  # entries of an attention head

parser = argparse.ArgumentParser()
parser.add_argument("--spec", default="adam", help="a recipe")
parser.add_argument("--every", type=int, default=1, help="steps from one exchange to the next; above 1 with LocalSGD")
parser.add_argument("--parts", type=int, default=1, help="parts of the model that take turns (with --every)")
parser.add_argument("--overlap", type=int, default=0, help="steps that go on beside an exchange (with --every)")
parser.add_argument("--mix", type=float, help="how much of its own parameters a worker keeps (with --overlap)")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=8, help="sequences of a worker in a step")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--context", type=int, default=128)
parser.add_argument("--text", type=Path, help="a file to learn from")
args = parser.parse_args()


class Block(nn.Module):
    """Attention and a perceptron, each on what its norm makes of the stream."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (-1, HEAD)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A model of bytes."""

    def __init__(self, width: int, layers: int, context: int):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x) + self.position)))


def loss_of(model: nn.Module, text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator).tolist()
    rows = torch.stack([text[start : start + args.context + 1] for start in starts]).long()
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
sources = [args.text] if args.text else map(Path, sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py")))
data = torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)
text, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

torch.manual_seed(0)
module = GPT(args.width, args.layers, args.context)
local = None
if args.every > 1:  # every worker trains for itself, and they exchange what that has changed
    model: nn.Module = module
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95))
    delay = {"parts": args.parts, "overlap": args.overlap, "mix": args.mix, "outer": "nesterov"}
    local = handle = gradwire.LocalSGD(model, optimizer, args.spec, sync_every=args.every, **delay)
else:
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95))
    handle = gradwire.ddp.attach(model, args.spec, optimizer=optimizer)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)

generator, began = torch.Generator().manual_seed(rank), time.perf_counter()
with local or contextlib.nullcontext():
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, text, generator)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if rank == 0 and (step % 20 == 0 or step == args.steps):
            sent = handle.stats()["wire_bytes_sent"] / 1e6
            each = (time.perf_counter() - began) / step
            print(f"step {step} of {args.steps}: loss {loss:.3f}, {each:.3f} s a step, {sent:.2f} MB sent", flush=True)

seconds, stats = time.perf_counter() - began, handle.stats()
with torch.no_grad():  # the same on all ranks: after the block, too, they have the same parameters
    judge = torch.Generator().manual_seed(0)
    held = sum(loss_of(module, held_out, judge).item() for _ in range(20)) / 20
parameters = sum(p.numel() for p in module.parameters())
checksum = zlib.crc32(parameters_to_vector(module.parameters()).detach().numpy())
if rank == 0:
    bits = 8 * stats["frame_bytes"] / parameters / args.steps
    print(f"{'recipe':24}{'workers':>9}{'parameters':>12}{'held-out loss':>15}{'bits a step':>13}{'s a step':>10}")
    print(f"{args.spec:24}{world:9}{parameters:12,}{held:15.3f}{bits:13.4f}{seconds / args.steps:10.3f}")
print(f"rank {rank}: checksum of the parameters {checksum:08x}")
dist.destroy_process_group()
