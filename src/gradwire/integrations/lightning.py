"""PyTorch Lightning: `Trainer(strategy="ddp", callbacks=[Compress("co3")])`.

`DDPStrategy(ddp_comm_hook=…)` is not enough: Lightning registers hooks on GPUs alone, without the model's names and
without the optimizer, and does not save their state.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.nn.parallel import DistributedDataParallel

from gradwire import ddp
from gradwire.catalogue.spec_by_name import Spec
from gradwire.engine.handle import Handle
from gradwire.engine.one_process import is_alone
from gradwire.errors import GradwireError


class Compress(pl.Callback):
    """Compresses gradients from the start of `fit` on; error memories of all ranks are in Lightning's checkpoints.

    With one process it says so and does nothing, so that a script can be tried alone.
    """

    def __init__(self, spec: Spec = "co3"):
        self.spec = spec
        self.handle: Handle | None = None
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the model: the optimizer's state has been restored by now, and the first batch is still to come."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            if is_alone(trainer.world_size):
                return
            raise GradwireError(
                f'Compress needs the strategy "ddp" and has {type(trainer.strategy).__name__}: '
                f'Trainer(strategy="ddp", devices=…), or leave the callback out'
            )
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options: dict[str, Any] = {} if scaler is None else {"grad_scaler": scaler}
        self.handle = ddp.attach(model, self.spec, optimizer=optimizer, **options)
        if self._saved:
            self.handle.load_state_dict(self._saved)
            self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """Return the error memories of all ranks: Lightning asks every rank, and writes what rank 0 returns."""
        return self.handle.all_ranks.state_dict() if self.handle else self._saved or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the error memories until training starts: Lightning restores callbacks before it wraps the model."""
        self._saved = state_dict
