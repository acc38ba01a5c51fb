"""Starts the workers of `gradwire train` on this machine, and makes sure that none outlives the command.

Workers get the environment that torchrun gives (RANK, WORLD_SIZE, MASTER_ADDR, …), so they are the same
program either way. torchrun itself is not used: it reports a failed worker with a page of tracebacks, and
leaves its workers running when it is killed.
1. The store that workers meet at lives in this process, on a port that the system chose: no race for it.
2. A worker's standard input is a pipe from this process: when it closes, this process is gone.
3. A worker that fails writes why to a file; the first to fail is the one to report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from gradwire.errors import GradwireError
from gradwire.tasks.settings import Settings

POLL = 0.05  # seconds
GRACE = 2.0  # seconds that the other workers have to report, or to stop


class WorkerError(GradwireError):
    """A worker failed or was killed."""


def launch(settings: Settings, workers: int) -> None:
    """Run the training on `workers` new processes; return when all are done, raise WorkerError when one fails."""
    if workers > cores():  # each of them imports torch before the first line of the training appears
        print(f"starting {workers} workers on {cores()} cores: this takes a while", file=sys.stderr, flush=True)
    settings = dataclasses.replace(settings, threads=settings.threads or max(1, cores() // workers))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[bytes]] = []
    # So that a plain `kill` runs the clean-up below, too.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
            try:
                for rank in range(workers):
                    processes.append(_start(settings, rank, workers, store.port, _report_path(folder, rank)))
                _wait(processes, folder)
            finally:
                _stop(processes)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, previous)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _report_path(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank}.json")


def _start(settings: Settings, rank: int, workers: int, port: int, report: Path) -> subprocess.Popen[bytes]:
    environment = {
        # What this process imports it has warned about already.
        "PYTHONWARNINGS": "ignore",
        # A lost connection is reported by this process, in one line.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not open a store of its own
    }
    command = [sys.executable, "-m", "gradwire.cli.worker", settings.to_json(), str(report)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)


def _wait(processes: list[subprocess.Popen[bytes]], folder: str) -> None:
    """Wait until all workers are done; WorkerError if one has failed."""
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break
        time.sleep(POLL)
    if not any(process.returncode for process in processes):
        return
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL)  # the others notice, and one of them may be the one that failed first
    raise WorkerError(_reason(processes, folder))


def _reason(processes: list[subprocess.Popen[bytes]], folder: str) -> str:
    """Return why the first worker failed: the others lost it as a peer, and their errors say nothing new."""
    for rank, process in enumerate(processes):
        if process.returncode is not None and process.returncode < 0:
            number = -process.returncode
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"worker {rank} of {len(processes)} was killed ({name}): is there enough memory?"
    reports = []
    for rank in range(len(processes)):
        with contextlib.suppress(OSError, ValueError):
            reports.append({"rank": rank, **json.loads(_report_path(folder, rank).read_text())})
    if not reports:
        rank, process = next((i, p) for i, p in enumerate(processes) if p.returncode)
        return f"worker {rank} of {len(processes)} ended with exit code {process.returncode} and no word"
    first = min(reports, key=lambda report: report["time"])
    if first["traceback"]:
        print(first["traceback"], file=sys.stderr)
    return str(first["message"]) if first["on_purpose"] else f"worker {first['rank']} failed: {first['message']}"


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill the workers that are still running, and wait for all."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin:
            process.stdin.close()
    if running:
        Console().show_cursor()  # the progress bar of a killed worker could not
