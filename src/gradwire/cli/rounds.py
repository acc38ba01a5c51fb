"""The progress of a federated run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .progress import LINES

BYTES = ("upload_bytes", "download_bytes")


class Rounds:
    """Replies that could not be used are shown above the bar."""

    def __init__(self, codec: str, rounds: int) -> None:
        self.console, self.codec, self.total = Console(), codec, rounds
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Rounds:
        self.bar.start()
        self.row = self.bar.add_task(escape(self.codec), total=self.total, figures="starting clients …")
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_round(self, figures: dict[str, float]) -> None:
        done = int(figures["round"])
        text = self._text(figures)
        self.bar.update(self.row, completed=done, figures=text)
        if self.bar.disable and done and done * LINES // self.total > (done - 1) * LINES // self.total:
            self._print(f"{self.codec}: round {done}/{self.total}, {text}")

    def on_failure(self, server_round: int, client: int, reason: str) -> None:
        self._print(f"warning: {self.codec}: round {server_round} goes on without client {client}: {reason}")

    def _text(self, figures: dict[str, float]) -> str:
        name = next(key for key in figures if key != "round")  # the most telling one is first
        up, down = (decimal(figures[key]) for key in BYTES)
        return f"{name.replace('_', ' ')} {figures[name]:.4f}, {up} up, {down} down"

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def decimal(count: float) -> str:
    """Bytes with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
