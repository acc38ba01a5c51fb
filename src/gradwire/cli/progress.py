"""How far a run of `gradwire train` is: a bar of its steps on a terminal, a line now and then elsewhere.

Federated runs show their rounds by `federated_progress.py`.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradwire.tasks.training import Training

LINES = 5  # per run, where there is no terminal


class TrainingProgress:
    """Shows the training of rank 0, while it is entered as a context; it is silent on all other workers."""

    def __init__(self, training: Training) -> None:
        self.console = Console(quiet=training.rank != 0)
        self.first, self.last = training.step, training.last_step
        self.name = training.codec
        if training.converted:
            self.name += f", {training.backward} in {plural(len(training.converted), 'layer')}"
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epoch {task.fields[epoch]}  loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=training.rank != 0 or not self.console.is_terminal,
        )

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        self.row = self.bar.add_task(self.name, total=self.last, completed=self.first, epoch="…", loss="…")
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, training: Training, loss: float) -> None:
        """Show that a step is done, and the loss of its batch."""
        epoch = -(-training.step // training.steps_per_epoch)
        self.bar.update(self.row, completed=training.step, epoch=epoch, loss=f"{loss:.4f}")
        done, total = training.step - self.first, self.last - self.first
        if self.bar.disable and done * LINES // total > (done - 1) * LINES // total:
            self.console.print(
                f"{self.name}: step {training.step}/{self.last}, epoch {epoch}, loss {loss:.4f}",
                highlight=False,
            )


def plural(count: int, what: str) -> str:
    """Return "1 worker" or "2 workers"."""
    return f"{count} {what}{'s' if count != 1 else ''}"
