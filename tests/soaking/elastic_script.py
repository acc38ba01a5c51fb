"""What torchrun starts in an episode of the soak: a training that goes on from its last checkpoint.

torchrun … elastic_script.py FOLDER STEPS       rank 1 kills itself once in each of these steps, or soon after
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from soaking import saving
from soaking.training import DDP, Trainer, Training

TRAINING = Training(DDP, "co3", "all_gather", 2, 24)


def main() -> None:
    folder, kills = Path(sys.argv[1]), {int(step) for step in sys.argv[2].split(",") if step}
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends at once; the rank is to say first who is gone
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer = Trainer(TRAINING, rank, 60.0)
    if resume_at := saving.last_common_step(folder, saving.FILE_PER_RANK, 2):
        saving.load(folder, trainer, saving.FILE_PER_RANK, resume_at)
    dist.barrier()  # nobody saves while another one still looks for the last step
    while trainer.step < TRAINING.steps:
        marks = [folder / f"killed.{step}" for step in sorted(kills) if step <= trainer.step]
        due = [mark for mark in marks if not mark.exists()]
        # Not in the second step: DDP makes its buckets anew there, by collectives of torch's, whose errors name nobody.
        if rank == 1 and due and trainer.step >= resume_at + 2:
            due[0].touch()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.train_step()
        if trainer.step % 3 == 0:
            saving.save(folder, trainer, saving.FILE_PER_RANK, trainer.step // 3)
    (folder / f"{rank}.digest").write_text(trainer.whole_digest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
