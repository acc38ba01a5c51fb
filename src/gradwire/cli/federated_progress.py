"""The progress of federated runs: a bar for each run on a terminal, single lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gradwire.cli.progress import LINES

OnRound = Callable[[dict[str, float]], None]
OnFailure = Callable[[int, int, str], None]
STARTING = "starting Flower and its clients"
BYTES = ("upload_bytes", "download_bytes")


class Rounds:
    """One progress bar for each run, from its first round on; replies that could not be used are printed above.

    It is a context manager. The callbacks are called in the thread of the server app, one run after the other.
    """

    def __init__(self, rounds: int) -> None:
        self.console, self.total = Console(), rounds
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Rounds:
        self.bars.start()
        self.starting: TaskID | None = self.bars.add_task("", total=None, figures=STARTING)
        if self.bars.disable:
            self._print(STARTING)
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def callbacks(self, codec: str) -> tuple[OnRound, OnFailure]:
        """Return the functions to call after each round of a run, and for each reply that could not be used."""
        row: TaskID | None = None

        def on_round(figures: dict[str, float]) -> None:
            nonlocal row
            if self.starting is not None:
                self.bars.remove_task(self.starting)
                self.starting = None
            if row is None:
                row = self.bars.add_task(escape(codec), total=self.total, figures="")
            done, text = int(figures["round"]), self._text(figures)
            self.bars.update(row, completed=done, figures=text)
            if self.bars.disable and done and done * LINES // self.total > (done - 1) * LINES // self.total:
                self._print(f"{codec}: round {done}/{self.total}, {text}")

        def on_failure(server_round: int, client: int, reason: str) -> None:
            self._print(f"warning: {codec}: round {server_round} goes on without client {client}: {reason}")

        return on_round, on_failure

    def _text(self, figures: dict[str, float]) -> str:
        name = next(key for key in figures if key != "round")  # the task's main metric is the first one
        up, down = (decimal(figures[key]) for key in BYTES)
        return f"{name.replace('_', ' ')} {figures[name]:.4f}, {up} up, {down} down"

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def decimal(count: float) -> str:
    """Return a number of bytes as text with three digits and a unit, such as "12.3 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
