"""The name of the processor on which a result is measured."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
