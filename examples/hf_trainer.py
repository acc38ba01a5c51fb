"""Hugging Face Trainer with compressed gradients: one callback.

torchrun --nproc-per-node 2 examples/hf_trainer.py
torchrun --nproc-per-node 2 examples/hf_trainer.py --resume
"""

import argparse
import zlib

import torch
from torch.nn.utils import parameters_to_vector
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from gradwire.integrations.transformers import Compress

parser = argparse.ArgumentParser()
parser.add_argument("--spec", default="co3", help="a recipe")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-at", type=int, default=20, help="the step after which a checkpoint is written")
parser.add_argument("--checkpoint", default="trainer-checkpoints", help="a folder")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

set_seed(0)
sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
starts = torch.randint(64, (2048, 1))
texts = (starts + 3 * torch.arange(32)) % 64  # counting in threes
trainer = Trainer(
    model,
    TrainingArguments(
        args.checkpoint, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, learning_rate=3e-3, save_steps=args.save_at, ddp_find_unused_parameters=False,
        disable_tqdm=True, report_to="none",
    ),
    train_dataset=[{"input_ids": text, "labels": text} for text in texts],
)  # fmt: skip
compress = Compress(trainer, args.spec)
trainer.add_callback(compress)  # ← these two lines
result = trainer.train(resume_from_checkpoint=f"{args.checkpoint}/checkpoint-{args.save_at}" if args.resume else None)

stats = compress.handle.stats()
checksum = zlib.crc32(parameters_to_vector(model.parameters()).detach().numpy())
print(
    f"rank {trainer.args.process_index}: {stats['steps']} steps, loss {result.training_loss:.4f}, "
    f"{stats['frame_bytes']} bytes of frames ({stats['ratio']:.1f} times fewer than fp32), "
    f"checksum of the parameters {checksum:08x}"
)
torch.distributed.destroy_process_group()
