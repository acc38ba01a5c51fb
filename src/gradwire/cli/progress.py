"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from gradwire.tasks.training import Training

LINES = 5  # per run, where there is no terminal


class Progress:
    """Shows the training of rank 0; silent on all other workers."""

    def __init__(self, training: Training) -> None:
        self.console = Console(quiet=training.rank != 0)
        self.first, self.last = training.step, training.last_step
        self.name = training.codec
        if training.converted:
            self.name += f", {training.backward} in {plural(len(training.converted), 'layer')}"
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epoch {task.fields[epoch]}  loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=training.rank != 0 or not self.console.is_terminal,
        )

    def __enter__(self) -> Progress:
        self.bar.start()
        self.row = self.bar.add_task(self.name, total=self.last, completed=self.first, epoch="…", loss="…")
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, training: Training, loss: float) -> None:
        epoch = -(-training.step // training.steps_per_epoch)
        self.bar.update(self.row, completed=training.step, epoch=epoch, loss=f"{loss:.4f}")
        done, total = training.step - self.first, self.last - self.first
        if self.bar.disable and done * LINES // total > (done - 1) * LINES // total:
            self.console.print(
                f"{self.name}: step {training.step}/{self.last}, epoch {epoch}, loss {loss:.4f}",
                highlight=False,
            )


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
