"""Flower's simulation engine for `gradwire train --federated`: quiet, and gone when the command is.

`run_simulation` has the engine in the main thread and the server app in another one; clients are actors of a Ray that
it starts and stops. Whatever ends the engine, Ctrl-C too, has to end that thread, or the process would wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import GradwireError
from ..tasks.federated.settings import FederatedSettings
from .launch import cores

if TYPE_CHECKING:
    from ..tasks.federated.run import FederatedRun

LONGEST_PATH = 107  # of a socket; Ray's are that of the folder and this much
RAY_SOCKET = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")


def check_installed() -> None:
    if not all(importlib.util.find_spec(name) for name in ("flwr", "ray")):
        raise GradwireError("--federated needs Flower and its simulation engine: pip install 'gradwire[flower]'")


def prepare() -> None:
    """Before Flower and Ray are imported: neither reports to its makers unless the user has asked for it."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its new way; the old one warns


def actors(settings: FederatedSettings) -> int:
    """How many clients run at a time."""
    return max(1, min(settings.per_round, cores() // (settings.threads or 1)))


def simulate(run: FederatedRun) -> None:
    """Run the apps to their end; raises what the server app raised."""
    from flwr.simulation import run_simulation

    count = actors(run.settings)
    gpus = _gpus() if run.settings.device == "cuda" else 0
    try:
        with _quiet(), _ray_folder() as folder:
            resources: dict[str, Any] = {
                "init_args": {
                    "address": "local",  # never somebody else's Ray
                    "num_cpus": count,
                    "num_gpus": gpus,
                    "logging_level": "ERROR",
                    "log_to_driver": False,
                    **folder,
                },
                "client_resources": {"num_cpus": 1, "num_gpus": gpus / count},
            }
            client_app: Any = EndsWithRay(run.client_app)
            run_simulation(run.server_app, client_app, run.settings.clients, backend_config=resources)
    except RuntimeError as error:
        raise GradwireError(f"Flower's simulation engine failed: {_first_cause(error)}") from error
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        run.stop.set()
        _shut_ray_down()


class EndsWithRay:
    """A client app whose process ends with the one that started it: left to itself, it stays for a minute."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, message: Any, context: Any) -> Any:
        _watch_parent()
        return self.app(message, context)


@functools.cache
def _watch_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Replies that cannot be used are shown by the command itself; failures are raised."""
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
    """Ray leaves its logs behind: in a folder that goes with the run, if its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="gw-", ignore_cleanup_errors=True) as folder:
        yield {"_temp_dir": folder} if len(folder) + RAY_SOCKET <= LONGEST_PATH else {}


def _shut_ray_down() -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()
