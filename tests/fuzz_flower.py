"""Damages Flower updates, model copies, notes and whole replies in every way it can think of.

    python tests/fuzz_flower.py --updates 200000 --seed 0 [--start I] [--save FOLDER] [--corpus FOLDER]

Bytes may raise FrameError and nothing else, and never change the model that they are decoded onto. A hostile reply goes
through the server's intake beside honest ones and then to FedAvg: no honest reply may be rejected, and what FedAvg
returns has the names and shapes of the model and finite entries. Case i depends on --seed and i alone: --start goes
straight to it. The case under way is kept in a file, for the case that the process dies. --corpus saves the shortest
input of every outcome, which is how tests/flower/corpus was made.
"""

from __future__ import annotations

import argparse
import collections
import functools
import logging
import mmap
import random
import re
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

import fuzz_decode
from gradwire.errors import FrameError
from gradwire.flower.server.lazy_tensors import LazyTensors
from gradwire.flower.shared import message, model_copy, update
from gradwire.flower.shared.model_copy import ModelCopy
from gradwire.frame import headers
from gradwire.frame.byte_fields import varint
from support import hostile_replies
from support.flower_apps import drift, start_model

LONGEST = 1 << 17
FAMILIES = (
    "none", "fp16", "co3", "ecq", "qsgd", "stc", "sbc", "topk", "m22", "bingrad", "signsgd", "terngrad", "linear",
    "orq", "countsketch", "homomorphic", "gennorm", "tinyscript",
)  # fmt: skip


@functools.cache
def model() -> dict[str, torch.Tensor]:
    return start_model()


@functools.cache
def updates() -> list[bytes]:
    """Valid updates of the model, by all families of recipes, some with values and some with an error memory."""
    result = []
    for n, spec in enumerate(FAMILIES):
        differences = {name: t for name, t in drift(n, 1, model()).items() if name in model()}
        values = {"bn.num_batches_tracked": torch.tensor(n), "mask": torch.tensor([True, True, False])}
        encoded = update.encode(differences, values if n % 2 else {}, list(model()), {"*": spec})
        result.append(encoded.data)
        few = {name: differences[name] for name in list(differences)[: 1 + n % 3]}
        result.append(update.encode(few, {}, list(model()), spec, encoded.memory).data)
    return result


@functools.cache
def downloads() -> list[bytes]:
    """Valid messages from model 1 on, of one to three steps."""
    result = []
    for n in range(len(updates()) - 3):
        copy, steps = model(), []
        for step in updates()[n : n + 1 + n % 3]:
            copy = {**copy, **update.decode(step, copy, new_dtypes=True)}
            steps.append(step)
        data = model_copy.pack_steps(1, 1 + len(steps), model_copy.digest(copy), steps)
        if len(data) < model_copy.whole_bytes(model()):
            result.append(data)
    return result


@functools.cache
def frames() -> list[bytes]:
    """The frames of all valid updates, and others of all kinds and sizes."""
    found = []
    for data in updates():
        _, split = update._table(memoryview(data), list(model()))
        found += [bytes(frame) for frame in split]
    return found + fuzz_decode.valid_frames()[::7]


# ── damage ──


def with_other_frames(data: bytes, rng: random.Random) -> bytes:
    """Change table and frames as a whole: other tensors, frames of others, damaged ones with a right checksum."""
    table, split = update._table(memoryview(data), list(model()))
    numbers = {name: i for i, name in enumerate(model())}
    entries = [[is_value, [numbers[name] for name in group]] for is_value, group in table]
    parts = [bytes(frame) for frame in split]
    for _ in range(rng.choice((1, 1, 2, 4))):
        i = rng.randrange(len(parts)) if parts else 0
        choice = rng.randrange(8)
        if not parts or choice == 0:
            entries.append([rng.random() < 0.5, [rng.randrange(len(numbers)) for _ in range(rng.choice((1, 1, 2)))]])
            parts.append(rng.choice(frames()))
        elif choice == 1:
            parts[i] = fuzz_decode.repaired(fuzz_decode.mutate([parts[i]], rng))
        elif choice == 2:
            parts[i] = rng.choice(frames())
        elif choice == 3:
            entries[i][0] = not entries[i][0]
        elif choice == 4:
            entries[i][1] = [rng.randrange(len(numbers)) for _ in range(rng.choice((1, 1, 2, 9)))]
        elif choice == 5:
            del parts[i], entries[i]
        elif choice == 6:
            parts[i] = with_shape(parts[i], rng)
        else:
            j = rng.randrange(len(parts))
            parts[i], parts[j] = parts[j], parts[i]
    head = varint(len(entries) if rng.random() < 0.95 else rng.choice((0, 1, 2**20, 2**40)))
    lines = [varint(2 * len(group) + is_value) + b"".join(map(varint, group)) for is_value, group in entries]
    return head + b"".join(lines) + b"".join(parts)


def with_shape(frame: bytes, rng: random.Random) -> bytes:
    """The frame with the number of entries of some tensor, so that decoders meet a payload of another length."""
    try:
        header = headers.read_header(memoryview(frame))
    except FrameError:
        return frame
    shape = (rng.choice([t.numel() for t in model().values()]),)
    payload = frame[header.length :]
    return fuzz_decode.assemble(payload, shape, header.codec, header.dtype, header.flags)


def damaged(pool: list[bytes], rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return with_other_frames(rng.choice(pool), rng)
    return fuzz_decode.mutate(pool, rng)


# ── cases: each returns a word for what came of it ──


def word(error: Exception) -> str:
    text = re.split(r"[:(']| for ", str(error))[0]
    return f"{type(error).__name__}: " + re.sub(r"0x\w+|-?\d[\d.e+-]*", "#", text).strip()[:70]


def check_model(result: dict[str, torch.Tensor], new_dtypes: bool) -> None:
    for name, tensor in result.items():
        before = model()[name]
        assert tensor.shape == before.shape, f"{name} has another shape"
        assert new_dtypes or tensor.dtype == before.dtype, f"{name} has another dtype"
        assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), f"{name} is not finite"


def of_update(data: bytes) -> str:
    """As a client decodes a step, then as a server does an update, with large tensors decoded later."""
    lazy = LazyTensors()
    try:
        result = update.decode(data, model(), deferred=lazy)
    except FrameError as error:
        return word(error)
    check_model(result, new_dtypes=False)
    for name, make in lazy.makers.items():
        try:
            check_model({name: make()}, new_dtypes=False)
            length = lazy.changes[name].measure()
            assert length <= lazy.changes[name].at_most * 1.0001, "a bound that does not hold"
        except FrameError as error:
            return "later, " + word(error)
    return "decoded"


def of_sealed(data: bytes) -> str:
    arrays = hostile_replies.sent_record()
    try:
        _, body = message.open_update(message.as_bytes_record(data), 1, arrays)
    except FrameError as error:
        return word(error)
    return of_update(bytes(body))


def of_download(data: bytes) -> str:
    try:
        copy = ModelCopy(1, model()).apply(data)
    except FrameError as error:
        return word(error)
    check_model(copy.model, new_dtypes=True)
    return "decoded"


def sealed(data: bytes, rng: random.Random) -> bytes:
    """The bytes behind a head whose checksum is right, or damaged with it."""
    whole = bytearray(message.seal(rng.randbytes(8), 1, hostile_replies.sent_record(), data)["gradwire"].data)
    if rng.random() < 0.5:
        whole[rng.choice((3, 16, 20, rng.randrange(24)))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.5:
            whole[4:8] = struct.pack("<I", zlib.crc32(whole[8:]))
    return bytes(whole)


def download(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        data = bytearray(fuzz_decode.mutate(downloads(), rng))
        if len(data) >= 8:
            data[4:8] = struct.pack("<I", zlib.crc32(data[8:]))
        return bytes(data)
    steps = [damaged(updates(), rng) for _ in range(rng.choice((1, 1, 2)))]
    copy = model()
    try:  # with the right digest, if there is one
        for step in steps:
            copy = {**copy, **update.decode(step, copy, new_dtypes=True)}
    except FrameError:
        pass
    return model_copy.pack_steps(1, 1 + len(steps), model_copy.digest(copy), steps)


def of_note(rng: random.Random) -> str:
    try:
        message.Note.read(hostile_replies.note(rng))
    except FrameError as error:
        return word(error)
    return "read"


BYTES: dict[str, tuple[Callable[[random.Random], bytes], Callable[[bytes], str]]] = {
    "update": (lambda rng: damaged(updates(), rng), of_update),
    "sealed": (lambda rng: sealed(damaged(updates(), rng) if rng.random() < 0.8 else b"", rng), of_sealed),
    "download": (download, of_download),
}
KINDS = ("update",) * 11 + ("sealed",) * 4 + ("download",) * 3 + ("note",) + ("reply",)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Fuzzer:
    """One run: its counts, its failures, and the shortest input of every outcome."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.failures = options, 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.shortest: dict[str, bytes] = {}
        self.digest = model_copy.digest(model())

    def case(self, i: int, note_down: Callable[[bytes], None]) -> None:
        """Make and run the case of this number."""
        rng = random.Random(f"{self.options.seed} {i}")
        kind, data = rng.choice(KINDS), b""
        try:
            if kind in BYTES:
                make, run = BYTES[kind]
                data = make(rng)[:LONGEST]
                note_down(data)
                outcome = run(data)
            else:
                note_down(f"{self.options.seed} {i}".encode())
                outcome = of_note(rng) if kind == "note" else hostile_replies.outcome(rng, updates(), damaged)
            assert model_copy.digest(model()) == self.digest, "the model has changed"
        except Exception as error:  # whatever it is, it is a failure
            self.failures += 1
            outcome = f"FAILURE: {type(error).__name__}: {error}"[:100]
            path = self.options.save / f"failure-{kind}-{self.options.seed}-{i}.bin"
            path.write_bytes(data)
            print(f"case {i} ({kind}): {type(error).__name__}: {error}; its bytes are in {path}")
        self.counts[f"{kind}: {outcome}"] += 1
        before = self.shortest.get(f"{kind}: {outcome}")
        if kind in BYTES and (before is None or len(data) < len(before)):
            self.shortest[f"{kind}: {outcome}"] = data

    def save_corpus(self, folder: Path) -> None:
        """Write the shortest input of every outcome to a file that is named after what it is and what came of it."""
        folder.mkdir(parents=True, exist_ok=True)
        for n, (what, data) in enumerate(sorted(self.shortest.items())):
            kind = what.partition(":")[0]
            (folder / f"{kind}-{n:02d}-{'good' if what.endswith('decoded') else 'bad'}.bin").write_bytes(data)


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.CRITICAL + 1)
    assert all(of_update(data) == "decoded" for data in updates())
    assert all(of_download(data) == "decoded" for data in downloads())
    fuzzer = Fuzzer(options)
    for i in range(200):
        hostile_replies.outcome(random.Random(i), updates(), damaged)  # what is allocated once is there from now on
    start, before = time.perf_counter(), peak_mb()
    with tempfile.NamedTemporaryFile(prefix="gradwire-fuzz-", suffix=".update") as file:
        file.truncate(LONGEST + 64)
        current = mmap.mmap(file.fileno(), 0)

        def note_down(data: bytes) -> None:
            current[: 8 + len(data)] = len(data).to_bytes(8, "little") + data

        print(f"{len(updates())} valid updates, {len(downloads())} downloads; the case under way is in {file.name}")
        for i in range(options.start, options.start + options.updates):
            fuzzer.case(i, note_down)
            done = i + 1 - options.start
            if done % 1000 == 0 and (sys.stderr.isatty() or done % 20_000 == 0):
                end = "" if sys.stderr.isatty() else "\n"
                print(f"\r{done} updates, {fuzzer.failures} failures", end=end, file=sys.stderr, flush=True)
    seconds, growth = time.perf_counter() - start, peak_mb() - before
    for what, count in fuzzer.counts.most_common():
        print(f"{count:10d}  {what}")
    print(
        f"{options.updates} updates, {fuzzer.failures} failures, {options.updates / max(seconds, 1e-9):.0f} updates/s, "
        f"peak memory {peak_mb():.0f} MB, {growth:.0f} MB more than before"
    )
    if options.corpus:
        fuzzer.save_corpus(options.corpus)
    if growth > options.max_growth_mb:
        print(f"FAILURE: memory grew by more than {options.max_growth_mb} MB")
        return 1
    return 1 if fuzzer.failures else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--save", type=Path, default=Path(), help="folder for bytes that fail")
    parser.add_argument("--corpus", type=Path, help="folder for the shortest bytes of every outcome")
    parser.add_argument("--max-growth-mb", type=float, default=100, help="how much the peak memory may grow")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parse()))
