"""PyTorch Lightning with compressed gradients: one callback.

python examples/lightning_ddp.py                # Lightning starts the second process itself
python examples/lightning_ddp.py --resume
"""

import argparse
import zlib

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrations.lightning import Compress

parser = argparse.ArgumentParser()
parser.add_argument("--spec", default="co3", help="a recipe")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-at", type=int, default=20, help="the step after which a checkpoint is written")
parser.add_argument("--checkpoint", default="lightning-checkpoint")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()


class Student(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


pl.seed_everything(0)
x = torch.randn(args.save_at * 2 * 2 * 16, 32)  # an epoch: Lightning resumes exactly where an epoch ends
y = nn.Sequential(nn.Linear(32, 8), nn.Tanh())(x).detach()
model = Student()
compress = Compress(args.spec)  # ← the line; it goes to the callbacks, and its error memories to the checkpoints
saving = pl.callbacks.ModelCheckpoint(args.checkpoint, "{step}", every_n_train_steps=args.save_at, save_top_k=-1)
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", callbacks=[compress, saving], max_steps=args.steps,
    accumulate_grad_batches=2, log_every_n_steps=1, logger=False, enable_progress_bar=False,
)  # fmt: skip
trainer.fit(
    model,
    DataLoader(TensorDataset(x, y), 16),  # of each process: two batches make a step
    ckpt_path=f"{args.checkpoint}/step={args.save_at}.ckpt" if args.resume else None,
)

stats = compress.handle.stats()
checksum = zlib.crc32(parameters_to_vector(model.parameters()).detach().numpy())
print(
    f"rank {trainer.global_rank}: {stats['steps']} steps, loss {trainer.callback_metrics['loss']:.4f}, "
    f"{stats['frame_bytes']} bytes of frames ({stats['ratio']:.1f} times fewer than fp32), "
    f"checksum of the parameters {checksum:08x}"
)
