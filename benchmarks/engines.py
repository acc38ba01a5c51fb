"""Starts `gradwire aggregator` on the switch of benchmarks/star.py, with one of its engines."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time

from star import Star, address_of_switch

DEVICES = {"userspace": "eth1", "xdp": "eth2"}
PORT = 9999


class Engines:
    """`addresses` has those that run, `failed` says why the others do not. All workers know the key."""

    def __init__(self, star: Star, wanted: list[str]):
        self.star, self.wanted = star, wanted
        self.addresses: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._programs: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Engines:
        os.environ["GRADWIRE_KEY"] = secrets.token_hex(16)
        for engine in self.wanted:
            self._start(engine)
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs:
            program.terminate()
        for program in self._programs:
            try:
                program.wait(5)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

    def _start(self, engine: str) -> None:
        device = DEVICES[engine]
        address = f"{address_of_switch(device)}:{PORT}"
        command = [sys.executable, "-m", "gradwire.cli", "aggregator", "--bind", address, "--engine", engine]
        if engine == "xdp":
            command += [part for port in self.star.ports(device) for part in ("--interface", port)]
        with tempfile.TemporaryFile("w+") as told:
            with self.star.visit("switch"):
                program = subprocess.Popen(command, stdout=told, stderr=told)
            self._programs.append(program)
            time.sleep(3)  # what cannot start says so by then
            if program.poll() is None:
                self.addresses[engine] = address
                return
            told.seek(0)
            lines = told.read().strip().splitlines()
            self.failed[engine] = lines[-1] if lines else f"exit {program.returncode}"
