"""Speed of a codec on 1, 2, 4, … threads, as far as this machine has cores, beside torch's copy on as many.

    python benchmarks/threads.py [--spec co3] [--entries 16777216] [--rounds 15] [--json]

Each round measures everything once with each number of threads, all into buffers that are used again; the table has
the medians, in milliseconds, and how many times as fast it is as on one thread. Frames are the same with any number of
threads, which is checked on the way. A copy says how much the machine has to give: it reads and writes 8 bytes an
entry, encoding with error feedback 12, and both end where the memory does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

import gradwire
from gradwire import codecs
from machine import gennorm_like, processor


def numbers_of_threads() -> list[int]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [n for n in (1, 2, 4, 8, 16) if n <= cores]


def tasks_of(spec: str, entries: int) -> dict[str, Callable[[], object]]:
    gradient, spare = gennorm_like(entries), torch.zeros(entries)
    codec = gradwire.codec(spec)
    frame = torch.empty(codec.max_frame_bytes(gradient), dtype=torch.uint8)
    before, after = 0.1 * gradient.flip(0), torch.zeros(entries)
    fixed = frame[: codec.encode_into(gradient, frame)].clone()
    header, payload = codecs.open_frame(codecs.as_bytes(fixed))

    def check() -> None:
        length = codec.encode_into(gradient, frame)
        assert torch.equal(frame[:length], fixed)

    def encode_with_memory() -> int:
        return codec.encode_into(gradient, frame, residual=before, residual_out=after, decay=0.9)

    return {
        "copy": lambda: spare.copy_(gradient),
        "encode": lambda: codec.encode_into(gradient, frame),
        "encode, error feedback": encode_with_memory,
        "decode": lambda: codecs.decode(fixed, out=spare),
        "add to a sum": lambda: codecs.decode_payload(header, payload, spare, accumulate=True),
        "check": check,
    }


def measure(tasks: dict[str, Callable[[], object]], threads: list[int], rounds: int) -> dict[str, dict[int, float]]:
    """Return the median of milliseconds of every task, by the number of threads."""
    taken: dict[tuple[str, int], list[float]] = {(name, n): [] for name in tasks for n in threads}
    for round_number in range(rounds + 1):
        for n in threads:
            torch.set_num_threads(n)
            for name, task in tasks.items():
                time.sleep(0.01)  # torch's threads look out for more work for a while, on cores that others could use
                start = time.perf_counter()
                task()
                if round_number:  # the first touches memory for the first time
                    taken[name, n].append(1e3 * (time.perf_counter() - start))
    return {name: {n: statistics.median(taken[name, n]) for n in threads} for name in tasks if name != "check"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="co3")
    parser.add_argument("--entries", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    threads = numbers_of_threads()
    results = measure(tasks_of(options.spec, options.entries), threads, options.rounds)
    if options.json:
        about = {"machine": processor(), "torch": torch.__version__, "spec": options.spec, "entries": options.entries}
        print(json.dumps({**about, "milliseconds": results}, indent=1))
        return
    print(f"{options.spec}, {options.entries / 1e6:.1f} M entries, {processor()}; ms, and × the speed of one thread")
    print(f"{'threads':24s}" + "".join(f"{n:>16d}" for n in threads))
    for name, of in results.items():
        print(f"{name:24s}" + "".join(f"{of[n]:9.2f} {of[1] / of[n]:5.2f}×" for n in threads))


if __name__ == "__main__":
    main()
