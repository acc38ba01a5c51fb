"""Shared by the tests: backends, tensors, frames and checks."""

from __future__ import annotations

import os
import random
import socket
import struct
import zlib
from contextlib import suppress
from types import ModuleType

import numpy as np
import torch

import gradwire
from gradwire import kernels
from support.plain_coders import plain_varint
from support.plain_decoder import DTYPES

FLOATS, INTEGERS = DTYPES[:4], DTYPES[4:]
SPECS = (
    "none", "fp16", "bf16", "co3", "gennorm", "co3:coder=huffman", "co3:coder=raw", "co3:model=histogram",
    "co3:format=fp8", "co3:format=e2m1", "co3:format=e4m3", "co3:format=e4m3b10", "co3:format=e3m0b2",
    "co3:format=e2m3b0f,coder=huffman", "gennorm:model=gennorm", "co3:rounding=stochastic",
    "ecq", "ecq:rate=0.4", "ecq:nmse=0.0004", "ecq:rate=3,rounding=stochastic",
)  # fmt: skip
LEVEL_SPECS = (
    "bingrad", "bingrad:form=pb,precision=fp16", "orq:levels=9,bucket=100", "signsgd",
    "qsgd:levels=33,norm=l2,bucket=70,coder=huffman", "linear:levels=2,bucket=4,precision=fp32",
)  # fmt: skip
SPECS += (
    *LEVEL_SPECS, "countsketch:ratio=2,rows=5,p=0.5,precision=fp16", "homomorphic", "homomorphic:p=all,bits=8",
    "homomorphic:p=all,bits=4,rounding=stochastic",
)  # fmt: skip

# ── backends ──────────────────────────────────────────────────────────────────────────────────────

NO_NATIVE = bool(os.environ.get("GRADWIRE_NO_NATIVE"))
native: ModuleType | None = None
if not NO_NATIVE:
    with suppress(ImportError):  # test_coders.test_native_module_is_here then fails
        from gradwire.kernels import cpu as native  # noqa: F401 (for other tests)
BACKENDS = ["reference", *kernels.instruction_sets()]
use_backend = kernels.use


# ── tensors and frames ────────────────────────────────────────────────────────────────────────────


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements: equal for NaNs with equal bits, different for 0 and −0."""
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def check_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Same shape, dtype and bits."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert bits(a) == bits(b)


def gradient(count: int, seed: int = 0, beta: float = 0.8, scale: float = 1e-3) -> torch.Tensor:
    """GenNorm samples, of the kind that gradients are."""
    rng = np.random.default_rng(seed)
    magnitude = scale * rng.gamma(1 / beta, size=count) ** (1 / beta)
    return torch.from_numpy((magnitude * rng.choice([-1, 1], size=count)).astype(np.float32))


def heavy(count: int, seed: int = 0, beta: float = 0.4) -> torch.Tensor:
    """GenNorm samples of unit scale with heavy tails: many entries lie outside any sensible grid."""
    rng = np.random.default_rng(seed)
    magnitude = rng.gamma(1 / beta, 1, count) ** (1 / beta)
    return torch.from_numpy((magnitude * rng.choice([-1, 1], count)).astype(np.float32))


def encode_into(codec: gradwire.Codec, tensor: torch.Tensor, **options: object) -> bytes:
    room = codec.max_frame_bytes(tensor) + 12 * len(options.get("segments", ()))
    out = torch.full((room,), 0xA5, dtype=torch.uint8)
    return bytes(out[: codec.encode_into(tensor, out, **options)].tolist())


def repair(frame: bytes) -> bytes:
    """The frame with a right checksum."""
    return frame[:5] + struct.pack("<I", zlib.crc32(frame[:5] + frame[9:])) + frame[9:]


def assemble(
    payload: bytes, shape: tuple[int, ...], codec: int, dtype: torch.dtype = torch.float32, flags: int = 0
) -> bytes:
    """A frame with any payload."""
    head = struct.pack("<2sBBBI", b"GW", 1, codec | flags << 4, DTYPES.index(dtype) | len(shape) << 4, 0)
    return repair(head + plain_varint(len(payload)) + b"".join(map(plain_varint, shape)) + payload)


def check_contract_3(
    sent: torch.Tensor, after: torch.Tensor, grad: torch.Tensor, before: torch.Tensor, decay: float
) -> torch.Tensor:
    """ĝ + e′ = g + γe to fp32 rounding: of γe, of the sum and of the difference. Returns the bound."""
    decay = float(np.float32(decay))
    scaled = decay * before.double()
    u = grad.double() + scaled
    bound = 2.0**-24 * (scaled.abs() + u.abs() + after.double().abs()) + 3 * 2.0**-150
    gap = (sent.double() + after.double() - u).abs()
    assert bool((gap <= bound * 1.0001).all()), f"lost {float((gap - bound).max())}"
    return bound


def free_ports(count: int) -> list[str]:
    """Ports below those that the kernel gives to sockets that ask for any: these may be taken before they are used."""
    ports: list[str] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            ports += [] if str(port) in ports else [str(port)]
    return ports
