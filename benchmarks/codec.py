"""Speed of CO3 and ecq on one core, beside what a user would take instead, in one run.

    python benchmarks/codec.py [--entries 16777216] [--save]

Everything is a multiple of torch's own copy of the same fp32 tensor, measured in the same loop: shared machines are
noisy, ratios less so. Each round measures every contestant once, all into buffers that
are used again; the table has the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import constriction
import numpy as np
import torch
import zstandard

import gradwire
from gradwire import codecs, compress, kernels
from gradwire.compress import rans
from gradwire.convert import minifloat
from gradwire.kernels import cpu
from gradwire.models.symbol_statistics import GenNormFit, SymbolStatistics
from gradwire.small_float_formats import PRESETS
from machine import BETA, gennorm_like, processor


class Symbols:
    """fp4 symbols of a tensor, and the coding that the codec chooses for them."""

    def __init__(self, gradient: torch.Tensor):
        fmt = PRESETS["fp4"]
        fit = minifloat.fit(fmt, kernels.sample(gradient, None, 0))
        assert fit is not None
        self.format, self.count = fmt, gradient.numel()
        self.symbols = kernels.to_symbols(gradient, fit.step, fmt)
        self.counts = kernels.histogram(self.symbols, fmt.symbols)
        fitted = GenNormFit(fit.beta_index, fit.zero_mass)
        self.coding = compress.choose(SymbolStatistics(fmt, self.counts, self.count, fitted), compress.RANS)
        self.array = self.symbols.numpy()
        self.coded = np.empty(rans.room(self.count, 1 + self.count // 4096), dtype=np.uint8)
        self.decoded = np.empty_like(self.array)

    @property
    def entropy(self) -> float:
        p = self.counts[self.counts > 0] / self.count
        return float(-(p * np.log2(p)).sum())

    def rans_encode(self) -> np.ndarray:
        c = self.coding
        return rans.encode(self.array, c.frequencies, c.precision, c.expected_bits, self.coded)

    def rans_decode(self, data: np.ndarray) -> np.ndarray:
        c = self.coding
        return rans.decode(memoryview(data), self.count, c.frequencies, c.precision, self.decoded)


def contestants(n: int) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Name → what to time, and name → bits per entry."""
    gradient, spare = gennorm_like(n), torch.empty(n)
    half = torch.empty(n, dtype=torch.float16)
    codec = gradwire.codec("co3")
    frame = torch.empty(codec.max_frame_bytes(gradient), dtype=torch.uint8)
    memory = torch.zeros(n)
    length = codec.encode_into(gradient, frame)
    fixed = frame[:length].clone()
    ecq, ecq_memory = gradwire.codec("ecq"), torch.zeros(n)
    ecq_length = ecq.encode_into(gradient, frame)
    ecq_fixed = frame[:ecq_length].clone()

    s = Symbols(gradient)
    coded = s.rans_encode()
    assert (s.rans_decode(coded) == s.array).all()
    coded = coded.copy()
    zstd, unzstd = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    raw = s.array.tobytes()
    zipped = zstd.compress(raw)
    zipped_again, unzipped = bytearray(len(zipped) + 4096), bytearray(n)
    model = constriction.stream.model.Categorical((s.counts / n).astype(np.float32), perfect=False)
    wide = s.array.astype(np.int32)

    def ans_encode() -> np.ndarray:
        coder = constriction.stream.stack.AnsCoder()
        coder.encode_reverse(wide, model)
        return coder.get_compressed()

    words = ans_encode()
    bits = {
        "co3 encode_into, error feedback": 8 * length / n,
        "ecq encode_into, error feedback": 8 * ecq_length / n,
        "rANS alone, encode": 8 * len(coded) / n,
        "zstd-1, encode": 8 * len(zipped) / n,
        "constriction ANS, encode": 32 * len(words) / n,
        "entropy": s.entropy,
    }
    return {
        "torch copy": lambda: spare.copy_(gradient),
        "torch cast to fp16": lambda: half.copy_(gradient),
        "co3 encode_into, error feedback": lambda: codec.encode_into(gradient, frame, residual=memory, decay=0.9),
        "co3 encode_into, no memory": lambda: codec.encode_into(gradient, frame),
        "co3 decode(out=)": lambda: codecs.decode(fixed, out=spare),
        "ecq encode_into, error feedback": lambda: ecq.encode_into(gradient, frame, residual=ecq_memory, decay=0.9),
        "ecq encode_into, no memory": lambda: ecq.encode_into(gradient, frame),
        "ecq decode(out=)": lambda: codecs.decode(ecq_fixed, out=spare),
        "rANS alone, encode": s.rans_encode,
        "rANS alone, decode": lambda: s.rans_decode(coded),
        "zstd-1, encode": lambda: zstd.stream_reader(raw, size=n).readinto(zipped_again),
        "zstd-1, decode": lambda: unzstd.stream_reader(zipped).readinto(unzipped),
        "constriction ANS, encode": ans_encode,
        "constriction ANS, decode": lambda: constriction.stream.stack.AnsCoder(words).decode(model, n),
    }, bits


def measure(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for round_number in range(rounds + 1):
        for name, task in tasks.items():
            if "constriction" in name and round_number > 3:
                continue  # slow and steady
            start = time.perf_counter()
            task()
            if round_number:  # the first touches memory for the first time
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/codec.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks, bits = contestants(options.entries)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name in reversed(cpu.instruction_sets()):
        cpu.use(name)
        chosen = tasks if name == cpu.instruction_sets()[-1] else _ours(tasks)
        seconds = measure(chosen, options.rounds if name == cpu.instruction_sets()[-1] else 3)
        result[name] = _report(name, seconds, bits, options.entries)
    if options.save:
        machine = {"machine": processor(), "torch": torch.__version__, "entries": options.entries}
        path = Path(__file__).parent / "results" / "codec.json"
        path.write_text(json.dumps({"command": "make bench", **machine, "results": result}, indent=1) + "\n")


def _ours(tasks: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    return {n: t for n, t in tasks.items() if n.startswith(("torch copy", "co3", "ecq", "rANS"))}


def _report(name: str, seconds: dict[str, float], bits: dict[str, float], n: int) -> dict[str, dict[str, float]]:
    copy = seconds["torch copy"]
    entropy = bits["entropy"]
    print(f"\n{name}, one core, {n / 1e6:.1f} M entries, β = {BETA}, entropy of the fp4 symbols {entropy:.3f} bits")
    print(f"{'':34s}{'ms':>9s}{'GB/s of fp32':>14s}{'× copy':>9s}{'bits/entry':>12s}")
    table = {}
    for task, t in seconds.items():
        row = {"ms": t * 1e3, "gb_per_s": 4e-9 * n / t, "times_copy": copy / t}
        if task in bits:
            row["bits_per_entry"] = bits[task]
        table[task] = row
        size = f"{bits[task]:12.3f}" if task in bits else ""
        print(f"{task:34s}{row['ms']:9.2f}{row['gb_per_s']:14.2f}{row['times_copy']:9.2f}{size}")
    if "zstd-1, encode" in seconds:
        for way in ("encode", "decode"):
            times = seconds[f"zstd-1, {way}"] / seconds[f"rANS alone, {way}"]
            print(f"rANS {way}s {times:.1f} × as fast as zstd-1")
            table[f"rANS over zstd-1, {way}"] = {"times": times}
    return table


if __name__ == "__main__":
    main()
