"""Codecs on a GPU: checked against the reference on fresh random data, then timed beside their peers.

python benchmarks/gpu.py                      all recipes, 67 M entries
python benchmarks/gpu.py --entries 4194304    a smaller tensor
python benchmarks/gpu.py --only co3 --json benchmarks/results/gpu.json

Times are medians of CUDA events around whole calls, launches included; GB/s are of fp32 gradient in (encoding) or out
(decoding). Outputs are filled with NaN or 0xAA before every check, so that nothing that was there before can pass.
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
from gradwire import codecs
from gradwire.frame import headers
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder, can_encode
from gradwire.gpu.families import FrameTask, TensorTask

DEVICE = torch.device("cuda")
SPECS = ["co3", "co3:format=fp8", "ecq", "sbc", "sbc:p=0.001", "topk", "topk:p=0.001", "stc", "orq", "bingrad", "qsgd",
         "terngrad", "signsgd"]  # fmt: skip


def gradient(count: int, seed: int) -> torch.Tensor:
    """Return numbers with heavier tails than a Normal, as gradients have."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(count, device=DEVICE, generator=generator)
    return x * x.abs().sqrt() * 1e-3


def milliseconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median time of a call on the GPU."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


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

    def decode_ms(self, ranks: int) -> float:
        length = self.encode()
        message = self.out[:length]
        present = [[True] * len(self.sizes)] * ranks
        return milliseconds(lambda: self.decoder.average(self.targets, [message] * ranks, present, 1 / ranks))


def peers(count: int) -> dict[str, float]:
    """Return the times of what one would use without gradwire."""
    x = gradient(count, 1)
    out = torch.empty_like(x)

    def eager_qsgd() -> torch.Tensor:
        y = (x.abs() * (4 / x.abs().max()) + torch.rand_like(x)).floor()
        return (y * x.sign()).to(torch.int8)

    memory, after = gradient(count, 2), torch.empty_like(x)

    def rounded() -> torch.Tensor:
        u = x + 0.9 * memory
        symbols = (u * 1e3).round().clamp(-7, 7)
        after.copy_(u - symbols * 1e-3)
        return symbols.to(torch.int8)

    compiled = torch.compile(rounded)
    return {
        "compiled rounding": milliseconds(compiled),
        "copy": milliseconds(lambda: out.copy_(x)),
        "torch.topk 1%": milliseconds(lambda: torch.topk(x.abs(), count // 100), 5),
        "eager QSGD": milliseconds(eager_qsgd, 5),
        "cast to fp16": milliseconds(x.half),
    }


def measure(specs: list[str], entries: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    gigabytes = entries * 4 / 1e9
    for spec in specs:
        if not can_encode(gradwire.recipe(spec).codec.converter, torch.float32, DEVICE):
            print(f"{spec:18} has no kernels here", flush=True)
            continue
        start = time.time()
        row: dict[str, Any] = {}
        for sizes in ([1, 33, 4096, 70001, 1 << 20], [200003] * 3):
            found = Contestant(spec, sizes, seed=len(sizes)).check()
            row["check"] = found
            if "error" in found:
                print(f"{spec:18} {sizes}: {found['error']}", flush=True)
                break
        big = Contestant(spec, [entries])
        length = big.encode()
        if length is None:
            print(f"{spec:18} was left to the host", flush=True)
            continue
        row |= {"bits": 8 * length / entries, "encode_ms": big.encode_ms(), "decode_ms": big.decode_ms(1)}
        row["decode_8_ms"] = big.decode_ms(8)
        row |= {"encode_GBs": gigabytes / row["encode_ms"] * 1e3, "decode_GBs": gigabytes / row["decode_ms"] * 1e3}
        del big
        small = Contestant(spec, [1 << 20])
        row["encode_1M_us"] = 1e3 * small.encode_ms()
        bucket = Contestant(spec, [1 << 18] * 16)
        row["encode_16x256k_us"], row["decode_16x256k_us"] = 1e3 * bucket.encode_ms(), 1e3 * bucket.decode_ms(2)
        results[spec] = row
        print(
            f"{spec:18} {row['bits']:6.3f} bits  encode {row['encode_ms']:8.3f} ms {row['encode_GBs']:7.0f} GB/s  "
            f"decode {row['decode_ms']:8.3f} ms {row['decode_GBs']:7.0f} GB/s  8 frames {row['decode_8_ms']:8.3f} ms  "
            f"1M {row['encode_1M_us']:6.0f} us  16x256k {row['encode_16x256k_us']:6.0f}/"
            f"{row['decode_16x256k_us']:6.0f} us  "
            f"{row['check']}  ({time.time() - start:.0f} s)", flush=True,
        )  # fmt: skip
    return results


def kernels_of(spec: str, entries: int) -> dict[str, float]:
    """Return the time of each kernel in microseconds, by torch's profiler."""
    big = Contestant(spec, [entries])
    big.encode()
    big.decode_ms(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        big.encode()
        message = big.out[: big.encode()]
        big.decoder.average(big.targets, [message] * 2, [[True]] * 2, 0.5).wait()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / event.count for event in profile.key_averages()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1 << 26)
    parser.add_argument("--only", nargs="*", default=SPECS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="list the time of each kernel")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    results = {"device": torch.cuda.get_device_name(), "entries": options.entries}
    results["peers_ms"] = peers(options.entries)
    for name, ms in results["peers_ms"].items():
        print(f"{name:18} {ms:8.3f} ms {options.entries * 4e-6 / ms:7.0f} GB/s", flush=True)
    results["codecs"] = measure(options.only, options.entries)
    if options.profile:
        for spec in options.only:
            print(spec, flush=True)
            for name, us in kernels_of(spec, options.entries).items():
                print(f"    {name[:60]:60} {us:9.1f} us", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
