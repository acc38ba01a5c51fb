"""The command line: `gradwire train`, `gradwire inspect`, …

A command is a plain function in a file of its own, named in COMMANDS. All errors that gradwire raises on purpose end
here, as one line without a traceback. Beside the commands, `options.py` and `federated.py` turn the options of `train`
into settings, `launch_workers.py` and `worker.py` are the two ends of a run, `progress.py` and `federated_progress.py`
show how far it is, and `report.py` and `federated_report.py` what came out.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gradwire._version import __version__
from gradwire.errors import GradwireError

COMMANDS = ("train", "inspect", "recipes", "aggregator")


def build_app() -> typer.Typer:
    """Return the application with all commands.

    They are imported here, and not with this package, which every worker imports.
    """
    app = typer.Typer(
        name="gradwire",
        help="Communication-efficient distributed training for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(_options)
    for name in COMMANDS:
        app.command(name)(getattr(importlib.import_module(f"{__name__}.{name}"), name))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process: with 0, or with 1 and one line that says what to do."""
    try:
        build_app()(arguments)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os._exit(1)
    except (GradwireError, OSError, UnicodeError) as error:
        sys.exit(f"error: {one_line(error)}")


def one_line(error: BaseException | str) -> str:
    """Return the text of an error without line breaks."""
    return " ".join(str(error).split())
