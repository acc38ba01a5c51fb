"""Makes tests/golden/hostile: the short ones among the frames that cost a decoder the most.

    python scripts/make_hostile.py

Each is made by a function of the same name in tests/support/hostile_frames.py and stands for half a million entries.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402

from support.hostile_frames import MAKERS, make  # noqa: E402

FOLDER = TESTS / "golden/hostile"
ELEMENTS = 1 << 19
LONGEST = 512  # bytes


def main() -> None:
    """Write all frames that are short enough, in fp32 and bf16."""
    FOLDER.mkdir(exist_ok=True)
    for name in MAKERS:
        for dtype in (torch.float32, torch.bfloat16):
            frame = make(name, ELEMENTS, dtype, random.Random(0))
            if len(frame) <= LONGEST:
                (FOLDER / f"{name}-{str(dtype).removeprefix('torch.')}.frame").write_bytes(frame)


if __name__ == "__main__":
    main()
