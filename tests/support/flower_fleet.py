"""A federation of real processes on loopback, started by the very commands of docs/flower-deployment.md."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.helpers import free_ports

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "flower-deployment.md"


def blocks(kind: str = "") -> list[str]:
    """The code blocks of the page, with lines that go on in the next one joined."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [re.sub(r" *\\\n *", " ", block) for language, block in found if language == kind]


def commands(start: str) -> list[str]:
    return [line for block in blocks() for line in block.splitlines() if line.startswith(start)]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


class Fleet:
    """Processes in a copy of examples/flower, with ports and a Flower home of their own; all gone on exit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app = folder / "app"
        shutil.copytree(ROOT / "examples" / "flower", self.app, ignore=shutil.ignore_patterns("__pycache__"))
        self.ports = dict(zip(("8000", "9094", "9095", "9096"), free_ports(4), strict=True))  # of the page, and ours
        self.home = folder / "flower home"
        self.home.mkdir()
        self.state = folder / "state"  # where gradwire keeps error memories
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}",
            "FLWR_HOME": str(self.home),
            "XDG_STATE_HOME": str(self.state),
            **dict(
                zip(("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT"), free_ports(2), strict=True)
            ),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; 1 by default
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        """A SuperLink's helper is in a session of its own, so that process groups do not find all of them."""
        deadline = time.monotonic() + 10
        while pids := list(self.processes()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} do not end")
            time.sleep(0.1)
        for child in self.children.values():
            child.wait()

    def kill_with_children(self, process: subprocess.Popen[bytes]) -> None:
        """As when its machine loses power: the process, then all that it and its children have started."""
        doomed = {process.pid}
        while more := {pid for pid in self.processes() if pid not in doomed and parent(pid) in doomed}:
            doomed |= more
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def processes(self) -> Iterator[int]:
        """All that were started with our Flower home, by us or by others of them."""
        mark = f"FLWR_HOME={self.home}\0".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in entry.read_bytes():
                    yield int(entry.parent.name)
            except OSError:  # it has ended, or is not ours
                continue

    def ours(self, text: str) -> str:
        """What the page says, on our ports and in our folder."""
        return re.sub("|".join(self.ports), lambda port: self.ports[port[0]], text.replace("/path/to", str(self.app)))

    def start_all(self, nodes: list[str]) -> None:
        """Certificates, a SuperLink, these SuperNodes, and the SuperLink's name in Flower's configuration."""
        self.run("certificates", commands("sh certificates.sh")[0], 20)
        (config,) = (block for block in blocks("toml") if "superlink" in block)
        (self.home / "config.toml").write_text(self.ours(config))
        self.start("superlink", commands("flower-superlink")[0])
        for number, command in enumerate(nodes):
            self.start(f"node {number}", command)
        for number in range(len(nodes)):
            self.wait_for(f"node {number}", "SuperNode ID", 60)

    def start(self, name: str, command: str) -> subprocess.Popen[bytes]:
        with self.log_file(name).open("ab") as log:
            arguments = shlex.split(self.ours(command))
            child = subprocess.Popen(arguments, cwd=self.app, env=self.environment, stdout=log, stderr=log)
        self.children[name] = child
        return child

    def run(self, name: str, command: str, seconds: float) -> str:
        """What it printed; an error with all logs unless it ends well and in time."""
        process = self.start(name, command)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if process.returncode != 0:
            raise RuntimeError(f"{command}: status {process.returncode} after {seconds} s\n{self.logs()}")
        return self.log(name)

    def wait_for(self, name: str, text: str, seconds: float) -> None:
        self.wait_until(lambda: text in self.log(name), f"{text!r} in the log of {name}", seconds)

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds} s: {what}\n{self.logs()}")
            time.sleep(0.1)

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"--- {path.stem}\n{path.read_text(errors='replace')}" for path in self.folder.glob("*.log"))
