"""Flower's simulation engine for `gradwire train --federated`: without its logs, and nothing of it is left running.

`run_simulation` runs the engine in the main thread and the server app in another one; clients are actors of a Ray that
it starts and stops. Whatever ends the engine, Ctrl-C too, has to end that thread, or the process would wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from gradwire.cli.launch_workers import cores
from gradwire.errors import GradwireError
from gradwire.tasks.federated.settings import FederatedSettings

if TYPE_CHECKING:
    from gradwire.tasks.federated.run import FederatedRun

PR_SET_PDEATHSIG = 1
LONGEST_PATH = 107  # bytes that the path of a socket may have
RAY_SOCKET = len(  # what Ray appends to its folder
    "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
)


def check_installed() -> None:
    """Raise a GradwireError that names the fix if Flower or Ray is not installed."""
    if not all(importlib.util.find_spec(name) for name in ("flwr", "ray")):
        raise GradwireError("--federated needs Flower and its simulation engine: pip install 'gradwire[flower]'")


def prepare() -> None:
    """Set the environment of Flower and Ray; call it before they are imported.

    Neither of them reports usage to its makers unless the user has asked for it.
    """
    for name in (
        "FLWR_TELEMETRY_ENABLED",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",  # the new behaviour; the old one prints a warning
        "RAY_enable_worker_prestart",  # no processes in advance, which nobody would use
        "RAY_prestart_worker_first_driver",
    ):
        os.environ.setdefault(name, "0")
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # otherwise a plain `kill` prints a stack trace


def actors(settings: FederatedSettings) -> int:
    """Return how many clients run at the same time."""
    return max(1, min(settings.per_round, cores() // (settings.threads or 1)))


def simulate(runs: Sequence[FederatedRun]) -> None:
    """Do all runs, one after the other. Raises what the server app raised.

    After an interrupt, threads of the engine still wait for a Ray that is gone: the process has to end by `leave`.
    """
    from flwr.simulation import run_simulation

    from gradwire.tasks.federated.apps import apps

    settings, stop = runs[0].settings, threading.Event()
    server_app, client_app = apps(runs, stop)
    count, gpus = actors(settings), _gpus() if settings.device == "cuda" else 0
    try:
        with _quiet(), _ray_folder() as folder:
            backend: dict[str, Any] = {
                "init_args": {
                    "address": "local",  # never somebody else's Ray
                    "num_cpus": count,
                    "num_gpus": gpus,
                    "logging_level": "ERROR",
                    "log_to_driver": False,
                    **folder,
                },
                "client_resources": {"num_cpus": 1, "num_gpus": _share(gpus, count)},
            }
            ending: Any = EndsWithRay(client_app)
            try:
                run_simulation(server_app, ending, settings.clients, backend_config=backend)
            finally:
                stop.set()
                _shut_ray_down()
    except GradwireError:  # raised by the server app
        raise
    except RuntimeError as error:
        raise GradwireError(f"Flower's simulation engine failed: {_first_cause(error)}") from error


def leave(interrupt: BaseException) -> NoReturn:
    """End the process now, without waiting for threads.

    Ray turns a plain `kill` into a SystemExit; the exit code tells the two interrupts apart.
    """
    print("stopped", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(128 + (signal.SIGINT if isinstance(interrupt, KeyboardInterrupt) else signal.SIGTERM))


class EndsWithRay:
    """A client app whose process ends together with its parent, Ray's: by itself it could stay for a minute."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, message: Any, context: Any) -> Any:
        """Handle a message as the app does."""
        _end_with_parent()
        return self.app(message, context)


@functools.cache
def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends: Python's threads do not run while Ray shuts down."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _share(gpus: int, count: int) -> float:
    """Return the share of a GPU for each client: at most one, in thousandths, which Ray can count."""
    return min(1.0, gpus * 1000 // count / 1000)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Flower's log: the command itself shows replies that cannot be used, and failures are raised."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _ray_folder() -> Iterator[dict[str, str]]:
    """Give Ray a folder for its logs that is deleted after the run, if its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="gw-", ignore_cleanup_errors=True) as folder:
        yield {"_temp_dir": folder} if len(folder) + RAY_SOCKET <= LONGEST_PATH else {}


def _shut_ray_down() -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()
