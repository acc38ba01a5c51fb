"""`gradwire inspect`: what a file of frames holds, or what the tensors of a file would take on the wire."""

from __future__ import annotations

import fnmatch
import json as json_module
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from typer import Option

from gradwire.cli.written_file import write_file
from gradwire.errors import GradwireError
from gradwire.frame import headers
from gradwire.inspection import frames, plot, tables, tensor_files, tensors
from gradwire.small_float_formats import parse_format

BAR_AFTER = 2.0  # seconds until a progress bar is shown
EPILOG = """
Examples:

`gradwire inspect update.gw`: what a frame, or a message of several, says of itself

`gradwire inspect gradients.pt`: the fits of each tensor, and its size in each format

`gradwire inspect model.safetensors --tensor '*.weight' --limit 6 --plot fits.png`

`gradwire inspect gradients.npz --format fp8 --json figures.json`
"""


def inspect(
    file: Annotated[Path, typer.Argument(help="Frames, or tensors: .npy, .npz, .pt, .pth, .safetensors.")],
    *,
    format: Annotated[str, Option(help="Compare code lengths in this one: fp4, fp8, e2m1, e4m3, …")] = "fp4",
    tensor: Annotated[str, Option(help="Only tensors whose name matches, such as '*.weight'.")] = "*",
    limit: Annotated[
        int, Option(help="At most so many tensors, the largest; or frames, the first. 0: all.", min=0)
    ] = 20,
    json: Annotated[Path | None, Option(help="Write all figures to this file.")] = None,
    plot_file: Annotated[
        Path | None, Option("--plot", help="Draw the largest tensors (up to 6): a .png, .pdf or .svg file.")
    ] = None,
) -> None:
    """Look into a frame, or see how tensors are distributed and what they would take on the wire."""
    console = Console()
    if _first_bytes(file) == headers.MAGIC:
        if plot_file is not None:
            raise GradwireError(f"--plot draws tensors; {file} holds frames")
        figures = _inspect_frames(file, limit, console)
    else:
        if plot_file is not None:
            plot.check(plot_file)
        chosen, figures = _inspect_tensors(file, format, tensor, limit, console)
        if plot_file is not None:
            kind = plot_file.suffix.lower().removeprefix(".")
            write_file(plot_file, lambda picture: plot.save(picture, kind, chosen))
    if json is not None:
        text = json_module.dumps({"file": file.name, **figures}, indent=1, ensure_ascii=False) + "\n"
        write_file(json, lambda written: written.write(text.encode()))


inspect.__doc__ = f"{inspect.__doc__}\n{EPILOG}"


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            start = file.read(len(headers.MAGIC))
    except OSError as error:
        raise GradwireError(f"cannot read {path}: {error.strerror}") from None
    if not start:
        raise GradwireError(f"{path} is empty")
    return start


def _inspect_frames(path: Path, limit: int, console: Console) -> dict[str, Any]:
    reports, total = frames.describe_message(path.read_bytes(), limit)
    for table in tables.frame_tables(reports, total):
        console.print(table)
    _remark(console, total - len(reports), "more frames: --limit 0 shows all")
    return {"kind": "frames", "total": total, "frames": [report.as_dict() for report in reports]}


def _inspect_tensors(
    path: Path, fmt: str, pattern: str, limit: int, console: Console
) -> tuple[tensor_files.Named, dict[str, Any]]:
    """Print the tables; return the tensors that can be drawn, and the figures."""
    if not parse_format(fmt).sign:
        raise GradwireError(f"the format {fmt} has no sign bit: it cannot hold gradients")
    fmt = str(parse_format(fmt))
    everything = tensor_files.load(path)
    floats = [(name, t) for name, t in everything if t.is_floating_point()]
    matching = [(name, t) for name, t in floats if fnmatch.fnmatchcase(name, pattern)]
    if not floats:
        raise GradwireError(f"{path} has no float tensors")
    if not matching:
        some = ", ".join(name for name, _ in floats[:8]) + (", …" if len(floats) > 8 else "")
        raise GradwireError(f"no float tensor matches {pattern!r}; there are: {some}")
    chosen = _largest(matching, limit)
    with _progress_if_slow(chosen) as progress:
        reports = [tensors.analyse(name, t, fmt) for name, t in progress]
    for table in tables.tensor_tables(reports, fmt):
        console.print(table)
    _remark(console, len(matching) - len(chosen), "smaller tensors not shown: --limit 0 shows all")
    _remark(console, len(everything) - len(floats), "tensors that are not of a float type left out")
    drawable = [item for item, report in zip(chosen, reports, strict=True) if report.w2]
    listed = [report.as_dict() for report in reports]
    return drawable, {"kind": "tensors", "format": fmt, "total": len(matching), "tensors": listed}


def _largest(named: tensor_files.Named, limit: int) -> tensor_files.Named:
    """Return the `limit` largest (0: all), in the order of the file."""
    by_size = sorted(range(len(named)), key=lambda i: -named[i][1].numel())
    return [named[i] for i in sorted(by_size[: limit or None])]


@contextmanager
def _progress_if_slow(named: tensor_files.Named) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Go through the tensors, with a progress bar once that has taken `BAR_AFTER` seconds."""
    progress = Progress(console=Console(stderr=True), transient=True)
    task = progress.add_task("looking", total=sum(t.numel() for _, t in named))

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        for name, t in named:
            progress.update(task, description=escape(name))
            yield name, t
            progress.advance(task, t.numel())

    timer = Timer(BAR_AFTER, progress.start)
    timer.start()
    try:
        yield each()
    finally:
        timer.cancel()
        timer.join()
        if progress.live.is_started:
            progress.stop()


def _remark(console: Console, count: int, text: str) -> None:
    if count:
        console.print(f"{count} {text}", style="dim", highlight=False)
