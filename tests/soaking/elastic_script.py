"""What torchrun starts in an episode of the soak: a training that goes on from its last checkpoint.

torchrun … elastic_script.py FOLDER STEPS       rank 1 kills itself once in each of these steps
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
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer = Trainer(TRAINING, rank, 60.0)
    if resume_at := saving.last_common_step(folder, saving.FILE_PER_RANK, 2):
        saving.load(folder, trainer, saving.FILE_PER_RANK, resume_at)
    dist.barrier()  # nobody saves while another one still looks for the last step
    while trainer.step < TRAINING.steps:
        mark = folder / f"killed.{trainer.step}"
        if rank == 1 and trainer.step in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.train_step()
        if trainer.step % 3 == 0:
            saving.save(folder, trainer, saving.FILE_PER_RANK, trainer.step // 3)
    (folder / f"{rank}.digest").write_text(trainer.whole_digest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
