"""One worker of `gradwire train`: started by `launch_workers`, or by torchrun through the command itself."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire import tasks
from gradwire._version import __version__
from gradwire.checkpoints import run_file
from gradwire.cli import one_line
from gradwire.cli.progress import TrainingProgress
from gradwire.cli.report import show, write_json
from gradwire.errors import AggregateError, GradwireError
from gradwire.tasks.settings import Settings
from gradwire.tasks.training import Training


def run(settings: Settings) -> None:
    """Train once per codec and --backward; rank 0 shows the progress and the figures."""
    # Of convolutions with one input channel; it says itself that it is not an error.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    task = tasks.find(settings.task)(Path(settings.data_dir))
    saved = run_file.load(Path(settings.resume)) if settings.resume else None
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings.timeout))
    _say_if_aggregator_is_lost()
    try:
        resumed = saved.step if saved else None
        _check_agreement({**settings.shared(), "data": task.data_checksum(), "resumed step": resumed})
        combinations = itertools.product(settings.codecs, settings.backward)
        runs = [_train(Training(task, settings, codec, saved, backward)) for codec, backward in combinations]
        if dist.get_rank() == 0:
            _report(settings, runs)
        dist.barrier()  # nobody leaves while another one still needs its connections
    finally:
        # DDP models keep the process group, and with it its threads, which may not outlive Python.
        gc.collect()
        dist.destroy_process_group()


def _say_if_aggregator_is_lost() -> None:
    """Have one worker print the loss of the aggregator in one line, though other warnings are switched off."""
    warnings.filterwarnings("always" if dist.get_rank() == 0 else "ignore", message="going on over the process group")
    show_others = warnings.showwarning

    def show(message: Warning | str, *details: Any, **more: Any) -> None:
        if str(message).startswith("going on over the process group"):
            print(f"warning: {one_line(message)}", file=sys.stderr, flush=True)
        else:
            show_others(message, *details, **more)

    warnings.showwarning = show


def _train(training: Training) -> dict[str, Any]:
    with TrainingProgress(training) as progress:
        return training.run(progress.step)


def _report(settings: Settings, runs: list[dict[str, Any]]) -> None:
    summary = {
        "gradwire": __version__,
        "torch": torch.__version__,
        "workers": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        **settings.shared(),
        "runs": runs,
    }
    show(summary)
    if settings.json:
        write_json(Path(settings.json), summary)


def _check_agreement(facts: dict[str, Any]) -> None:
    """Raise AggregateError if workers differ: under torchrun each has its own command line and its own data."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"gradwire": __version__, **facts})
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise AggregateError(
                    f"workers disagree on {name}: rank 0 has {value!r}, rank {rank} {other[name]!r}; "
                    "start all with the same options, data and version"
                )


def _end_with_parent() -> None:
    """End this process with `launch`, which holds the other end of standard input: reading returns when it is gone."""
    with contextlib.suppress(OSError):
        os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _report_failure(error: BaseException, report: Path) -> None:
    """Tell `launch` why this worker failed, by a file; or the user, where no file can be written."""
    on_purpose = isinstance(error, (GradwireError, OSError))  # a full disk or a closed pipe needs no traceback
    content = {
        "time": time.time(),
        "on_purpose": on_purpose,
        "message": one_line(error),
        "traceback": None if on_purpose else traceback.format_exc(),
    }
    try:
        report.write_text(json.dumps(content))
    except OSError:  # the disk is full, which may be why this worker failed
        print(content["traceback"] or f"worker failed: {content['message']}", file=sys.stderr, flush=True)


def main() -> None:
    """Run a worker that `launch` has started, with the settings and the file to report an error to as arguments."""
    report = Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches `launch` too, which stops us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(Settings.from_json(sys.argv[1]))
        sys.stdout.flush()
    except BaseException as error:
        _report_failure(error, report)
        os._exit(1)  # without the usual clean-up, which may wait for workers that are gone
    os._exit(0)


if __name__ == "__main__":
    main()
