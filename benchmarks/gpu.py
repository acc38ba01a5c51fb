"""Codecs on a GPU: checked against the reference on fresh random data, then timed beside their peers.

python benchmarks/gpu.py --profile --json benchmarks/results/gpu.json     everything, 67 M entries
python benchmarks/gpu.py --entries 4194304                                a smaller tensor
python benchmarks/gpu.py --only co3 --peers none                          one recipe
ncu -k regex:encode_chunks python benchmarks/gpu.py --only co3 --bare             one kernel, by its counters

Times are medians of CUDA events around whole calls, launches included; GB/s are of fp32 gradient in (encoding) or out
(decoding). Outputs are filled with NaN or 0xAA before every check, so that nothing that was there before can pass.
The file of --json is written after every row, so that a run that was cut short has what it found. nvCOMP is timed if
nvidia-nvcomp is installed, or unpacked where --nvcomp says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradwire
from gpu_peers import DEVICE, gradient, homomorphic, milliseconds, nvcomp_ans, plain, read_compiled, start_compiled
from gpu_programs import architecture, start_compiling
from gradwire import codecs
from gradwire.frame import headers
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder, can_encode
from gradwire.gpu.families import FrameTask, TensorTask

SPECS = ["co3", "co3:format=fp8", "ecq", "sbc", "sbc:p=0.001", "topk", "topk:p=0.001", "stc", "orq", "bingrad", "qsgd",
         "terngrad", "signsgd"]  # fmt: skip


class Contestant:
    """A recipe with its tensors on the device."""

    def __init__(self, spec: str, sizes: list[int], seed: int = 0):
        self.recipe, self.sizes = gradwire.recipe(spec), sizes
        self.codec, self.decay = self.recipe.codec, self.recipe.decay
        self.encoder, self.decoder = MessageEncoder(DEVICE), MessageDecoder(DEVICE)
        self.gradients = [gradient(n, seed + i) for i, n in enumerate(sizes)]
        remembers = self.decay > 0
        self.before = [gradient(n, 1000 + seed + i) / 4 if remembers else None for i, n in enumerate(sizes)]
        self.after = [torch.full((n,), float("nan"), device=DEVICE) if remembers else None for n in sizes]
        self.out = torch.full((sum(sizes) * 5 + 4096 * len(sizes),), 0xAA, dtype=torch.uint8, device=DEVICE)
        self.tasks = [
            FrameTask(self.codec.converter, [TensorTask(g, b, a)], tuple(g.shape), self.decay or 1.0, seed=i)
            for i, (g, b, a) in enumerate(zip(self.gradients, self.before, self.after, strict=True))
        ]
        self.targets = [FrameTarget(self.codec.converter, [torch.full_like(g, float("nan"))]) for g in self.gradients]

    def encode(self) -> int | None:
        return self.encoder.encode(self.tasks, self.out).wait()

    def check(self) -> dict[str, Any]:
        """Compare with the host's decoder and encoder; return what was found."""
        length = self.encode()
        if length is None:
            return {"error": "the message was left to the host"}
        frames = headers.split(memoryview(self.out[:length].cpu().numpy()))
        host = 0
        for frame, task in zip(frames, self.tasks, strict=True):
            decoded = gradwire.decode(bytes(frame))
            tensor = task.tensors[0]
            g = tensor.gradient.cpu()
            if tensor.before is not None and tensor.after is not None:
                u = g + tensor.before.cpu() * torch.tensor(self.decay, dtype=torch.float32)
                if not torch.equal(tensor.after.cpu(), u - decoded):
                    return {"error": "error memory + sent is not what came in"}
            out = torch.empty(self.codec.max_frame_bytes(g), dtype=torch.uint8)
            memory = None if tensor.before is None else tensor.before.cpu()
            host += self.codec.encode_into(g, out, residual=memory, decay=self.decay or 1.0, seed=task.seed)
        message = self.out[:length]
        done = self.decoder.average(self.targets, [message, message], [[True] * len(self.sizes)] * 2, 0.5).wait()
        for frame, target in zip(frames, self.targets, strict=True):
            want = torch.empty_like(target.tensors[0], device="cpu")
            header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
            for again in (False, True):
                codecs.decode_payload(header, payload, want, 0.5, again)
            if done and not torch.equal(want, target.tensors[0].cpu()):
                return {"error": "the mean is not the host's"}
        return {"bytes": length, "host_bytes": host, "decoded_on_device": done}

    def encode_ms(self) -> float:
        return milliseconds(lambda: self.encoder.encode(self.tasks, self.out))

    def encode_host_us(self) -> float:
        """Return the time that the host takes to start an encoding."""
        return host_us(lambda: self.encoder.encode(self.tasks, self.out))

    def decode_host_us(self) -> float:
        """Return the time that the host takes to start a decoding."""
        message, present = self.out[: self.encode()], [[True] * len(self.sizes)]
        return host_us(lambda: self.decoder.average(self.targets, [message], present, 1.0))

    def decode_ms(self, ranks: int) -> float:
        length = self.encode()
        message = self.out[:length]
        present = [[True] * len(self.sizes)] * ranks
        return milliseconds(lambda: self.decoder.average(self.targets, [message] * ranks, present, 1 / ranks))

    def decode_one_by_one_ms(self, ranks: int) -> float:
        """Return the time of decoding messages one after the other, and adding each to a sum."""
        length, present = self.encode(), [[True] * len(self.sizes)]
        message, sums = self.out[:length], [torch.zeros_like(g) for g in self.gradients]

        def call() -> None:
            for _ in range(ranks):
                self.decoder.average(self.targets, [message], present, 1 / ranks)
                for total, target in zip(sums, self.targets, strict=True):
                    total.add_(target.tensors[0])

        return milliseconds(call, 7)

    def kernels_us(self) -> dict[str, float]:
        """Return the time of each kernel of an encoding and a decoding, by torch's profiler."""
        message, repeats = self.out[: self.encode()], 5
        present = [[True] * len(self.sizes)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                self.encoder.encode(self.tasks, self.out).wait()
                self.decoder.average(self.targets, [message], present, 1.0).wait()
            torch.cuda.synchronize()
        return {event.key: round(event.device_time_total / repeats, 1) for event in profile.key_averages()}


def host_us(call: Callable[[], object]) -> float:
    """Return the median time that a call takes on the host, while the GPU has nothing else to do."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


CHECKED = [1, 33, 4096, 70001, 1 << 20], [200003] * 3  # sizes of the tensors of two messages


def checked(spec: str) -> dict[str, Any]:
    """Return what checks have found, of small messages."""
    found: dict[str, Any] = {}
    for sizes in CHECKED:
        found = Contestant(spec, sizes, seed=len(sizes)).check()
        if "error" in found:
            return {"error": f"{sizes}: {found['error']}"}
    return found


def measure(spec: str, entries: int, profiled: bool) -> dict[str, Any]:
    """Check a recipe, and time it."""
    row: dict[str, Any] = {"check": checked(spec)}
    big = Contestant(spec, [entries])
    length = big.encode()
    if length is None:
        return row | {"error": "the message was left to the host"}
    row |= {"bits": 8 * length / entries, "encode_ms": big.encode_ms(), "decode_ms": big.decode_ms(1)}
    row |= {f"{what}_GBs": entries * 4e-6 / row[f"{what}_ms"] for what in ("encode", "decode")}
    row["decode_8_ms"] = big.decode_ms(8)
    row["decode_8_one_by_one_ms"] = big.decode_one_by_one_ms(8)
    if profiled:
        row["kernels_us"] = big.kernels_us()
    del big
    small = Contestant(spec, [1 << 20])
    row["encode_1M_us"], row["encode_1M_host_us"] = 1e3 * small.encode_ms(), small.encode_host_us()
    row["decode_1M_us"], row["decode_1M_host_us"] = 1e3 * small.decode_ms(1), small.decode_host_us()
    if profiled:
        row["kernels_1M_us"] = small.kernels_us()
    bucket = Contestant(spec, [1 << 18] * 16)
    row["encode_16x256k_us"], row["decode_16x256k_us"] = 1e3 * bucket.encode_ms(), 1e3 * bucket.decode_ms(2)
    return row


def show(spec: str, row: dict[str, Any], seconds: float) -> None:
    if "error" in row:
        print(f"{spec:15} {row['error']}", flush=True)
        return
    print(
        f"{spec:15} {row['bits']:6.3f} bits  encode {row['encode_ms']:7.3f} ms {row['encode_GBs']:5.0f} GB/s  "
        f"decode {row['decode_ms']:7.3f} ms {row['decode_GBs']:5.0f} GB/s  "
        f"8 frames {row['decode_8_ms']:6.3f} ms (one by one {row['decode_8_one_by_one_ms']:6.3f})  "
        f"1M {row['encode_1M_us']:4.0f} us (host {row['encode_1M_host_us']:4.0f}) / "
        f"{row['decode_1M_us']:4.0f} ({row['decode_1M_host_us']:4.0f})  "
        f"16x256k {row['encode_16x256k_us']:4.0f} / {row['decode_16x256k_us']:4.0f} us  "
        f"{row['check']}  ({seconds:.0f} s)", flush=True,
    )  # fmt: skip
    for label in ("kernels_us", "kernels_1M_us"):
        if label in row:
            listed = sorted(row[label].items(), key=lambda item: -item[1])
            print(f"    {label}: " + ", ".join(f"{name[:30]} {us}" for name, us in listed if us >= 1), flush=True)


def peers(entries: int, compiled: float | None, nvcomp: Path | None) -> dict[str, Any]:
    """Return the times of peers; what cannot be timed here says why."""
    found: dict[str, Any] = {"ms": plain(entries)}
    if compiled is not None:
        found["ms"]["torch.compile of fp4 + memory"] = compiled
    for name, ms in found["ms"].items():
        print(f"{name:30} {ms:8.3f} ms {entries * 4e-6 / ms:7.0f} GB/s", flush=True)

    def both(label: str, row: dict[str, float]) -> None:
        found[label] = row
        rates = [f"{what} {row[f'{what}_ms']:8.3f} ms {entries * 4e-6 / row[f'{what}_ms']:6.0f} GB/s"
                 for what in ("encode", "decode")]  # fmt: skip
        print(f"{label:30} " + "  ".join(rates) + (f"  {row['bytes']} bytes" if "bytes" in row else ""), flush=True)

    try:
        both("homomorphic, 5%", homomorphic(entries))
    except Exception as error:  # a peer, or what it needs, may not work here: everything else is still worth timing
        print(f"homomorphic: {error!r}", flush=True)
    co3 = Contestant("co3", [entries])
    co3.encode()
    symbols = co3.encoder.workspace.room("symbols", entries)[:entries].clone()
    del co3
    try:
        both("nvCOMP's ANS of co3's symbols", nvcomp_ans(symbols, nvcomp))
        both("the same, two in a byte", nvcomp_ans(symbols[::2] | symbols[1::2] << 4, nvcomp))
    except Exception as error:
        print(f"nvCOMP: {error!r}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1 << 26)
    parser.add_argument("--only", nargs="*", default=SPECS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="list the time of each kernel, too")
    parser.add_argument("--bare", action="store_true", help="encode and decode twice and time nothing, for ncu")
    parser.add_argument("--peers", choices=("all", "none"), default="all")
    parser.add_argument("--nvcomp", type=Path, help="where the wheels of nvidia-nvcomp are unpacked, if not installed")
    parser.add_argument("--compile-limit", type=float, default=60, help="seconds that torch.compile may take")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    if options.bare:
        for spec in options.only:
            bare = Contestant(spec, [options.entries])
            for _ in range(2):
                message = bare.out[: bare.encode()]
                bare.decoder.average(bare.targets, [message], [[True]], 1.0).wait()
        return
    start = time.time()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results |= {"entries": options.entries, "codecs": {}}

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    print(results["device"], torch.__version__, flush=True)
    compiling, compiled = start_compiling(architecture()), None
    if options.peers == "all":
        compiled = read_compiled(start_compiled(options.entries), options.compile_limit)
    if [process for process in compiling if process.wait()]:
        print("some programs were not compiled", flush=True)
    print(f"compiled ({time.time() - start:.0f} s)", flush=True)
    if options.peers == "all":
        results["peers"] = peers(options.entries, compiled, options.nvcomp)
        print(f"peers ({time.time() - start:.0f} s)", flush=True)
        save()
    for spec in options.only:
        if not can_encode(gradwire.recipe(spec).codec.converter, torch.float32, DEVICE):
            print(f"{spec:15} has no kernels here", flush=True)
            continue
        began = time.time()
        try:
            results["codecs"][spec] = measure(spec, options.entries, options.profile)
        except Exception as error:  # one recipe that fails hides no other
            results["codecs"][spec] = {"error": repr(error)}
        show(spec, results["codecs"][spec], time.time() - began)
        save()
    print(f"all of it ({time.time() - start:.0f} s)", flush=True)
    failed = [spec for spec, row in results["codecs"].items() if "error" in row or "error" in row["check"]]
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
