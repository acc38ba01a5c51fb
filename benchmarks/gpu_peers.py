"""What one would use on a GPU without gradwire, and parts of it: timed for benchmarks/gpu.py, in the same run.

python benchmarks/gpu_peers.py compiled ENTRIES     rounding to fp4 with error feedback by torch.compile, alone
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradwire.small_float_formats import PRESETS, Format

DEVICE = torch.device("cuda")


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


def fp4_with_memory(fmt: Format, step: float) -> Callable[..., torch.Tensor]:
    """Return what CO3 does to each entry, in torch: the nearest number of the format, as a byte, and what is left."""
    smallest, up, down = (fmt.min_exponent + 127) << 23, (254 + fmt.mantissa) << 23, fmt.mantissa << 23
    zero, magic = fmt.zero_symbol, 12582912.0

    def rounded(g: torch.Tensor, memory: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        u = g + 0.9 * memory
        a = (u * (1 / step)).abs().clamp(max=fmt.largest)
        exponent = (a.view(torch.int32) & 0x7F800000).clamp(min=smallest)
        whole = a * (up - exponent).view(torch.float32) + magic
        level = (whole - magic) * (exponent - down).view(torch.float32)
        index = ((exponent - smallest) >> (23 - fmt.mantissa)) + (whole.view(torch.int32) & 0xFFFF)
        after.copy_(u - torch.copysign(level * step, u))
        return torch.where(u < 0, zero - index, zero + index).to(torch.uint8)

    return rounded


def check_fp4() -> None:
    """Check that it is the rounding of the format, and that nothing is lost."""
    fmt, g, memory, after = (
        PRESETS["fp4"],
        gradient(1 << 16, 3),
        gradient(1 << 16, 4),
        torch.empty(1 << 16, device=DEVICE),
    )
    symbols = fp4_with_memory(fmt, 1e-3)(g, memory, after)
    levels = torch.tensor(fmt.levels, dtype=torch.float32, device=DEVICE)
    u = g + 0.9 * memory
    nearest = (u[:, None] / 1e-3 - levels).abs().min(1).values
    assert torch.allclose((u / 1e-3 - levels[symbols.long()]).abs(), nearest, atol=1e-5)
    assert torch.allclose(after, u - levels[symbols.long()] * 1e-3, atol=1e-8)


def compiled_ms(count: int) -> float:
    """Return the time of rounding to fp4 with error feedback, one byte for each entry, by torch.compile."""
    check_fp4()
    g, memory = gradient(count, 1), gradient(count, 2)
    after, rounded = torch.empty_like(g), torch.compile(fp4_with_memory(PRESETS["fp4"], 1e-3))
    return milliseconds(lambda: rounded(g, memory, after))


def start_compiled(count: int) -> subprocess.Popen[str]:
    """Start a process that finds out, since nobody knows how long a compiler takes."""
    command = [sys.executable, __file__, "compiled", str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_compiled(process: subprocess.Popen[str], seconds: float) -> float | None:
    """Return what such a process has found, or None, with its last words printed, if it failed or took too long."""
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0] + f"\nno end after {seconds:.0f} s"
    found = [line for line in output.splitlines() if line.startswith("MS ")]
    if not found:
        print("torch.compile: " + " | ".join(output.splitlines()[-3:]), flush=True)
    return float(json.loads(found[0][3:])) if found else None


def plain(count: int) -> dict[str, float]:
    """Return the times of torch's own operations."""
    x = gradient(count, 1)
    out = torch.empty_like(x)

    def eager_qsgd() -> torch.Tensor:
        y = (x.abs() * (4 / x.abs().max()) + torch.rand_like(x)).floor()
        return (y * x.sign()).to(torch.int8)

    magnitudes = x.abs()
    return {
        "copy": milliseconds(lambda: out.copy_(x)),
        "torch.topk 1%": milliseconds(lambda: torch.topk(magnitudes, count // 100), 5),
        "torch.topk 0.1%": milliseconds(lambda: torch.topk(magnitudes, count // 1000), 5),
        "eager QSGD": milliseconds(eager_qsgd, 5),
        "cast to fp16": milliseconds(x.half),
    }


def nvcomp_ans(symbols: torch.Tensor, folder: Path | None) -> dict[str, float]:
    """Return size and times of nvCOMP's ANS on these bytes, checked once; nvidia-nvcomp is installed or unpacked."""
    if folder is not None:
        import nvidia

        nvidia.__path__.append(str(folder / "nvidia"))
    from nvidia import nvcomp

    with torch.cuda.stream(torch.cuda.Stream()):
        stream = torch.cuda.current_stream().cuda_stream
        codec = nvcomp.Codec(algorithm="ANS", data_type="|u1", device_id=0, cuda_stream=stream)
        source = nvcomp.as_array(symbols, stream)
        how = codec.compression_config(len(symbols))  # with these two it neither waits nor reads headers on the host
        back = codec.decompression_config(how)
        encoded = codec.encode(source, compression_config=how)
        decoded = codec.decode(encoded, decompression_config=back)
        torch.cuda.synchronize()
        assert torch.equal(torch.from_dlpack(decoded).flatten(), symbols), "nvCOMP has not given back what went in"
        return {
            "bytes": int(encoded.buffer_size),
            "encode_ms": milliseconds(lambda: codec.encode(source, compression_config=how), 10),
            "decode_ms": milliseconds(lambda: codec.decode(encoded, decompression_config=back), 10),
        }


def homomorphic(count: int, density: float = 0.05) -> dict[str, float]:
    """Return the times of a homomorphic message: gradient to index and sketch, and back to a gradient."""
    from gradwire import kernels
    from gradwire.homomorphic import code
    from gradwire.homomorphic.grid import by_largest
    from gradwire.homomorphic.plan import choose

    dense, memory = gradient(count, 5), gradient(count, 6)
    sparse = torch.where(torch.rand(count, device=DEVICE) < density, dense, 0.0)
    after, out, grid = torch.empty_like(dense), torch.zeros_like(dense), by_largest(129, 32, 4)
    arguments = (sparse, memory, after, 1.0, grid.step, grid.most, 32, None)
    positions, values, _, _ = kernels.quantize_all(*arguments)
    plan = choose(count, code.blocks(positions, count), 1)
    index, sketch = code.encode(plan, positions, values)
    found = code.decode(plan, index, sketch)
    assert torch.equal(found.positions, positions) and torch.equal(found.values, values)

    def encode() -> None:
        at, words, _, _ = kernels.quantize_all(*arguments)
        code.encode(plan, at, words)

    def decode() -> None:
        back = code.decode(plan, index, sketch)
        kernels.put_words(out, back.positions, back.values, 32, grid.step)

    return {"encode_ms": milliseconds(encode, 7), "decode_ms": milliseconds(decode, 7)}


if __name__ == "__main__":
    print("MS " + json.dumps(compiled_ms(int(sys.argv[2]))), flush=True)
