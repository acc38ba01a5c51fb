"""Turns the options of `gradwire train` into the settings of a run, and says whatever is wrong with them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire import tasks
from gradwire.checkpoints import run_file
from gradwire.engine.options import AGGREGATIONS
from gradwire.errors import CheckpointError, GradwireError, unknown_name
from gradwire.tasks import backward_option as rows
from gradwire.tasks.settings import SHARED, Settings
from gradwire.tasks.worker_sync import spelled_out, sums

MINIMUM_ONE = ("workers", "sync_every", "epochs", "steps", "batch_size", "save_every", "threads")
MOST_THREADS = 4096
DEVICES = ("cpu", "cuda")
TIMEOUT = 300.0  # seconds


@dataclasses.dataclass
class TrainOptions:
    """The options of `gradwire train` as they were given; None where the user left the choice to us."""

    task: str | None
    codecs: list[str] | None
    workers: int | None
    epochs: int | None
    steps: int | None
    batch_size: int | None
    lr: float | None
    seed: int | None
    data_dir: Path
    json: Path | None
    save: Path | None
    save_every: int | None
    resume: Path | None
    threads: int | None
    timeout: float | None
    sync_every: int | None
    device: str
    aggregate: str | None
    aggregator: str | None
    aggregator_fallback: bool
    backward: list[str] | None


def resolve(options: TrainOptions) -> tuple[Settings, int | None]:
    """Return the settings, and the number of workers of the run that is resumed, if one is.

    What is not given comes from the checkpoint that is resumed, or from the task.
    """
    check_values(options)
    saved = run_file.load(options.resume) if options.resume else None
    before = saved.settings if saved else {}
    if saved and not is_of_a_run(before):
        raise CheckpointError(f"{options.resume} is incomplete or damaged: it was not written by gradwire train")
    task = options.task or before.get("task", "digits")
    defaults = tasks.find(task).defaults
    codecs = tuple(options.codecs or before.get("codecs", ["co3"]))
    for codec in codecs:
        spelled_out(codec)  # a SpecError now, not in every worker
    backward = tuple(options.backward or before.get("backward", [rows.EXACT]))
    for spec in backward:
        rows.parse(spec)
    if options.aggregator and not any(sums(codec) for codec in codecs):
        raise GradwireError("--aggregator adds up integers, which only --codec homomorphic sends: choose that")
    if options.aggregator and (options.sync_every or 1) > 1:
        raise GradwireError("--aggregator sums the gradients of every step: leave out --sync-every")
    if options.aggregator_fallback and not options.aggregator:
        raise GradwireError("--aggregator-fallback needs --aggregator HOST:PORT")
    if options.epochs or options.steps:
        epochs, steps = options.epochs, options.steps
    elif saved:
        epochs, steps = before["epochs"], before["steps"]
    else:
        epochs, steps = defaults.epochs, None
    settings = Settings(
        task=task,
        codecs=codecs,
        seed=options.seed if options.seed is not None else before.get("seed", 0),
        batch_size=options.batch_size or before.get("batch_size", defaults.batch_size),
        lr=options.lr or before.get("lr", defaults.lr),
        epochs=epochs,
        steps=steps,
        data_dir=str(options.data_dir),
        timeout=options.timeout or TIMEOUT,
        sync_every=options.sync_every or before.get("sync_every"),
        device=options.device,
        aggregate=options.aggregate or before.get("aggregate", "all_gather"),
        aggregator=options.aggregator,
        aggregator_fallback=options.aggregator_fallback,
        backward=backward,
        threads=options.threads,
        json=writable(options.json, "--json"),
        save=writable(options.save, "--save"),
        save_every=options.save_every,
        resume=str(options.resume) if options.resume else None,
    )
    if saved:
        _check_same_run(settings, saved, options.resume)
    return settings, saved.workers if saved else None


def check_values(options: TrainOptions) -> None:
    """Raise GradwireError for a value that no run can have, and for options that exclude each other."""
    for name in MINIMUM_ONE:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise GradwireError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.lr is not None and not 0 < options.lr < float("inf"):
        raise GradwireError(f"--lr must be above 0, not {options.lr}")
    if options.aggregate not in (None, *AGGREGATIONS):
        raise unknown_name("--aggregate", str(options.aggregate), AGGREGATIONS)
    if options.device not in DEVICES:
        raise unknown_name("--device", options.device, DEVICES)
    if options.timeout is not None and not 0.01 <= options.timeout < 1e9:
        raise GradwireError(f"--timeout must be 0.01 seconds or more, not {options.timeout}")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise GradwireError(f"--seed must be from 0 to 2^63 − 1, not {options.seed}")
    if options.threads is not None and options.threads > MOST_THREADS:
        raise GradwireError(f"--threads must be at most {MOST_THREADS}, not {options.threads}")
    if options.epochs and options.steps:
        raise GradwireError("give --epochs or --steps, not both")
    if options.save_every and not options.save:
        raise GradwireError("--save-every needs --save FILE")
    if len(options.codecs or []) > 1 and (options.save or options.resume):
        raise GradwireError("a checkpoint holds one run: give one --codec with --save or --resume")
    if len(options.backward or []) > 1 and (options.save or options.resume):
        raise GradwireError("a checkpoint holds one run: give one --backward with --save or --resume")


def writable(path: Path | None, option: str) -> str | None:
    """Return the path as text; GradwireError, which names the option, if no file can be written there."""
    if path is None:
        return None
    target = Path(os.path.realpath(path))  # where links lead to
    try:
        usable = not target.is_dir() and os.access(target.parent, os.W_OK)
    except OSError as error:  # a name that is too long, for instance
        raise GradwireError(f"{option} {path}: {error.strerror}") from error
    if not usable:
        raise GradwireError(f"{option} {path}: give a file in a folder that exists and can be written to")
    if option == "--save" and target.exists() and not target.is_file():
        raise GradwireError(f"{option} {path}: it is no ordinary file, and a checkpoint would take its place")
    return str(path)


def is_of_a_run(settings: Mapping[str, Any]) -> bool:
    """Tell whether these settings of a checkpoint are all there, and of the kinds that a run has."""
    if not set(SHARED) - {"aggregate", "backward"} <= set(settings):  # older checkpoints lack these two
        return False
    texts = [settings["task"], settings.get("aggregate", "auto")]
    lists = [settings["codecs"], settings.get("backward", [rows.EXACT])]
    counts = [settings[name] for name in ("epochs", "steps", "sync_every")]
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(specs, list | tuple) and specs for specs in lists)
        and all(isinstance(spec, str) for specs in lists for spec in specs)
        and all(count is None or _is_count(count) for count in counts)
        and _is_count(settings["batch_size"])
        and isinstance(settings["seed"], int)
        and 0 <= settings["seed"] < 2**63
        and isinstance(settings["lr"], int | float)
        and 0 < settings["lr"] < float("inf")
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63


def _check_same_run(settings: Settings, saved: run_file.Checkpoint, path: Path | None) -> None:
    before = saved.settings
    for name, now, then in (
        ("task", settings.task, before["task"]),
        ("codec", spelled_out(settings.codecs[0]), spelled_out(before["codecs"][0])),
        ("seed", settings.seed, before["seed"]),
        ("backward", *(rows.spelled_out(b[0]) for b in (settings.backward, before.get("backward", [rows.EXACT])))),
    ):
        if now != then:
            raise CheckpointError(
                f"{path} is a run with --{name} {then}, not {now}: leave out --{name} to go on with it"
            )
