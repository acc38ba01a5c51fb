"""Hugging Face Trainer: `trainer.add_callback(Compress(trainer, "co3"))`.

The Trainer does not tell its callbacks which folder it resumes from. So the file with the error memories carries a
checksum of the parameters that it goes with, and is looked for where they come from by default.
"""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradwire import ddp
from gradwire.catalogue.spec_by_name import Spec
from gradwire.checkpoints.whole_file import read_whole, write_whole
from gradwire.engine.handle import Handle
from gradwire.engine.one_process import is_alone
from gradwire.errors import GradwireError

FILE = "gradwire.pt"  # in the Trainer's checkpoint folders


class Compress(TrainerCallback):
    """Compresses gradients while the Trainer trains; its checkpoints get the error memories of all ranks.

    It takes the trainer, since callbacks are shown the model without its DistributedDataParallel. With one process it
    says so and does nothing, so that a script can be tried alone.
    """

    def __init__(self, trainer: Trainer, spec: Spec = "co3"):
        self.trainer, self.spec = trainer, spec
        self.handle: Handle | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model, and restore the error memories if training is resumed."""
        model = self.trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            if is_alone(args.world_size):
                return
            raise GradwireError(
                f"Compress needs DistributedDataParallel, and the Trainer has {type(model).__name__}: "
                f"start the script with torchrun, or leave the callback out"
            )
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)  # out of Accelerate's wrapper
        scaler = self.trainer.accelerator.scaler
        options: dict[str, Any] = {} if scaler is None else {"grad_scaler": scaler}
        self.handle = ddp.attach(model, self.spec, optimizer=optimizer, **options)
        if state.global_step > 0:
            folders = [self._folder(args, state), Path(args.resume_from_checkpoint or "")]
            paths = [path for path in (folder / FILE for folder in folders) if path.exists()]
            saved = [read_whole(path) for path in paths]
            fitting = [s["gradwire"] for s in saved if s.get("parameters") == _checksum(self._model())]
            if fitting:
                self.handle.load_state_dict(fitting[0])
            else:
                warnings.warn(
                    f"no error memory of these parameters in {folders[0]}, so that it starts from zero: to resume from "
                    f"a folder that is not in output_dir, name it in TrainingArguments(resume_from_checkpoint=…) too",
                    stacklevel=2,
                )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the error memories of all ranks beside the Trainer's checkpoint."""
        if self.handle is None or args.save_only_model:
            return
        memories = self.handle.all_ranks.state_dict()
        if memories:
            whole = {"parameters": _checksum(self._model()), "gradwire": memories}
            write_whole(self._folder(args, state) / FILE, whole)

    def _model(self) -> torch.nn.Module:
        model = self.trainer.model
        assert model is not None  # the Trainer has made it by now
        return model

    def _folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _checksum(model: torch.nn.Module) -> int:
    """Return a checksum of a few entries of every parameter, which is enough to tell steps and runs apart."""
    entries = [p.detach().reshape(-1)[:64].float().cpu() for p in model.parameters()]
    return zlib.crc32(torch.cat(entries).numpy().data)
