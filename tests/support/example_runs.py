"""Runs scripts of examples/ on two ranks each, forked from one process that has imported their frameworks.

A program: each line of its input is a script, a folder and two ports; the answer is a line with the ranks' exit codes.
Importing Lightning or Transformers takes far longer than the scripts do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
import traceback
from pathlib import Path

IMPORTED = ("torch._dynamo", "torch.utils.data", "lightning.pytorch", "accelerate", "transformers.trainer", "gradwire")
WORLD = 2


def main() -> None:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        script, folder, ports, *arguments = line.rstrip("\n").split("\t")
        children = [fork(rank, script, Path(folder), ports.split(","), arguments) for rank in range(WORLD)]
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)


def fork(rank: int, script: str, folder: Path, ports: list[str], arguments: list[str]) -> int:
    """A process that runs the script twice, the second time resuming; the process id of it."""
    child = os.fork()
    if child:
        return child
    code = 1
    with contextlib.suppress(BaseException):
        output = os.open(folder / f"output {rank}", os.O_WRONLY | os.O_CREAT)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.chdir(folder)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        try:
            for port, more in zip(ports, ([], ["--resume"]), strict=True):
                os.environ["MASTER_PORT"] = port
                sys.argv = [script, *arguments, *more]
                runpy.run_path(script, run_name="__main__")
                if "accelerate" in sys.modules:  # which is made for one run in a process
                    sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
