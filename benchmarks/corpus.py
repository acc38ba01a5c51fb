"""How close frames come to the entropy of their symbols, layer by layer, over a folder of recorded gradients.

    python benchmarks/corpus.py FOLDER [--json FILE] [--markdown FILE]

FOLDER holds .npz files, one per network: every fp32 array in one is a flat gradient, and an array `layers`,
if there is one, gives the lengths of the layers that stand in it one after the other. Everything is in fp4,
per layer, in bits per entry, all bytes counted. Needs zstandard.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard

import gradwire
from gradwire import kernels
from gradwire.inspection import code_lengths, frames, goodness
from gradwire.models import gennorm_cells, gennorm_moments
from gradwire.small_float_formats import PRESETS, Format

FORMAT = PRESETS["fp4"]
LARGE = 50_000  # layers from this size on are held to the entropy
SHOWN = 8  # of the worst layers
FAMILIES = ("normal", "laplace", "gennorm")


@dataclass
class Layer:
    """Figures of one layer; sizes in bits per entry."""

    network: str
    gradient: str
    number: int
    entries: int
    zeros: float
    beta: float
    entropy: float
    rans: float
    huffman: float
    zstd: dict[str, float]
    lz78: float
    model_bits: dict[str, float]  # an ideal coder under each model
    model_huffman: dict[str, float]
    w2: dict[str, float]
    ks: dict[str, float]
    nmse: float
    best_nmse: float  # at the best of all steps
    sections: dict[str, int]  # bytes of the rANS frame
    coding: str

    @property
    def name(self) -> str:
        return f"{self.network} {self.gradient} layer {self.number}"

    @property
    def excess(self) -> float:
        """How far the frame is above the entropy of its symbols."""
        return self.rans / self.entropy - 1

    @property
    def nmse_ratio(self) -> float:
        return self.nmse / self.best_nmse


def layers_of(path: Path) -> Iterator[tuple[str, int, np.ndarray]]:
    with np.load(path, allow_pickle=False) as arrays:
        lengths = arrays["layers"] if "layers" in arrays.files else None
        for name in arrays.files:
            array = arrays[name]
            if array.dtype != np.float32:
                continue
            pieces = [array.ravel()] if lengths is None else np.split(array.ravel(), np.cumsum(lengths)[:-1])
            for number, piece in enumerate(pieces):
                yield name, number, piece


def measure(network: str, gradient: str, number: int, x: np.ndarray) -> Layer | None:
    """None for a layer that is not quantized: a handful of entries, or all of them equal."""
    tensor = torch.from_numpy(x)
    frame = gradwire.codec(f"co3:format={FORMAT},coder=rans").encode(tensor)
    report = frames.describe(frame)
    ordered = goodness.standardise(goodness.even_sample(x[x != 0]))
    if not report.steps or ordered is None:
        return None
    step = report.steps[0]
    symbols = kernels.to_symbols(tensor, step, FORMAT)
    counts = kernels.histogram(symbols, FORMAT.symbols)
    exact, nonzero = x.astype(np.float64), x[x != 0]
    under = {
        name: code_lengths.bits_per_entry(counts, frequencies, own)
        for name, (frequencies, own) in code_lengths.models(FORMAT, exact, step, counts).items()
    }
    fitted = goodness.fit(*goodness.moments(ordered))

    def bits(length: int) -> float:
        return 8 * length / len(x)

    return Layer(
        network=network, gradient=gradient, number=number, entries=len(x),
        zeros=1 - len(nonzero) / len(x),
        beta=gennorm_moments.fit(*goodness.moments(nonzero))[0],
        entropy=code_lengths.entropy(counts),
        rans=bits(len(frame)),
        huffman=bits(len(gradwire.codec(f"co3:format={FORMAT},coder=huffman").encode(tensor))),
        zstd={name: bits(size) for name, size in zstd_sizes(symbols.numpy()).items()},
        lz78=lz78_bits(symbols.numpy(), FORMAT.symbols) / len(x),
        model_bits={name: cost["ideal"] for name, cost in under.items()},
        model_huffman={name: cost["huffman"] for name, cost in under.items()},
        w2={name: goodness.wasserstein2(ordered, fitted[name]) for name in FAMILIES},
        ks={name: goodness.kolmogorov_smirnov(ordered, fitted[name]) for name in FAMILIES},
        nmse=nmse(gradwire.decode(frame).numpy(), exact),
        best_nmse=best_nmse(exact, step),
        sections={
            "header": report.header_bytes, "side": report.side_bytes, "model": report.model_bytes,
            "lanes": report.lane_bytes, "symbols": report.symbol_bytes,
        },
        coding=f"{report.model}, {report.precision} bits, {report.lanes} lanes",
    )  # fmt: skip


# ── peers ─────────────────────────────────────────────────────────────────────────────────────────


def zstd_sizes(symbols: np.ndarray) -> dict[str, int]:
    """Bytes of zstd's frames, the symbols one to a byte and two to a byte."""
    packings = {"bytes": symbols.tobytes(), "nibbles": kernels.pack_bits(symbols, 4)}
    return {
        f"zstd-{level} {packing}": len(zstandard.ZstdCompressor(level=level).compress(data))
        for level in (1, 19)
        for packing, data in packings.items()
    }


def lz78_bits(symbols: np.ndarray, alphabet: int) -> int:
    """Textbook LZ78: the k-th phrase is an earlier one (⌈log₂ k⌉ bits say which) and one symbol more."""
    symbol_bits = math.ceil(math.log2(alphabet))
    phrases: dict[tuple[int, int], int] = {}
    prefix, total = 0, 0  # 0: the empty phrase
    for symbol in symbols.tolist():
        longer = phrases.get((prefix, symbol))
        if longer is not None:
            prefix = longer
            continue
        phrases[prefix, symbol] = len(phrases) + 1
        total += (len(phrases) - 1).bit_length() + symbol_bits
        prefix = 0
    return total + (len(phrases).bit_length() if prefix else 0)


# ── the step ──────────────────────────────────────────────────────────────────────────────────────


def nmse(decoded: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(decoded - exact).sum() / np.square(exact).sum())


def best_nmse(exact: np.ndarray, step: float, fmt: Format = FORMAT) -> float:
    """The least NMSE over steps from 1/30 to 30 times this one, 0.3% apart.

    With sorted magnitudes and their prefix sums, the error of a step is a sum over the format's few cells.
    """
    magnitude = np.sort(np.abs(exact))
    first, second = (np.concatenate([[0.0], np.cumsum(magnitude**k)]) for k in (1, 2))
    least = math.inf
    for candidate in step * np.exp(np.arange(-math.log(30), math.log(30), 0.003)):
        edges = gennorm_cells.cell_edges(fmt) * candidate
        at = [*np.searchsorted(magnitude, edges[:-1]), len(magnitude)]
        count, total = np.diff(at), np.diff(first[at])
        values = fmt.magnitudes * candidate
        least = min(least, float(values**2 @ count - 2 * values @ total + second[-1]))
    return least / float(second[-1])


# ── results ───────────────────────────────────────────────────────────────────────────────────────

Columns = dict[str, Callable[[list[Layer]], str]]


def mean(of: Callable[[Layer], float], digits: int = 3) -> Callable[[list[Layer]], str]:
    return lambda layers: f"{sum(map(of, layers)) / len(layers):.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def by_network(layers: list[Layer], columns: Columns) -> str:
    networks: dict[str, list[Layer]] = {}
    for layer in layers:
        networks.setdefault(layer.network, []).append(layer)
    rows = [[name, *(figure(own) for figure in columns.values())] for name, own in networks.items()]
    return table(["network", *columns], rows)


def coder_table(layers: list[Layer]) -> str:
    columns: Columns = {
        "layers": lambda own: str(len(own)),
        "β": lambda own: f"{min(x.beta for x in own):.2f}–{max(x.beta for x in own):.2f}",
        "zeros": mean(lambda x: x.zeros, 2),
        "entropy": mean(lambda x: x.entropy),
        "rANS frame": mean(lambda x: x.rans),
        "Huffman frame": mean(lambda x: x.huffman),
    }
    columns |= {peer: mean(lambda x, peer=peer: x.zstd[peer]) for peer in layers[0].zstd}
    return by_network(layers, columns | {"LZ78": mean(lambda x: x.lz78)})


def model_table(layers: list[Layer], bits: Callable[[Layer], dict[str, float]]) -> str:
    columns: Columns = {"entropy": mean(lambda x: x.entropy)}
    columns |= {name: mean(lambda x, name=name: bits(x)[name]) for name in bits(layers[0])}
    return by_network(layers, columns)


def fit_table(layers: list[Layer]) -> str:
    columns: Columns = {f"W2 {name}": mean(lambda x, name=name: x.w2[name]) for name in FAMILIES}
    columns |= {f"K–S {name}": mean(lambda x, name=name: x.ks[name]) for name in FAMILIES}

    def wins(own: list[Layer]) -> str:
        return f"{sum(x.w2['gennorm'] == min(x.w2.values()) for x in own)} of {len(own)}"

    return by_network(layers, columns | {"GenNorm is best": wins})


def step_table(layers: list[Layer]) -> str:
    columns: Columns = {
        "NMSE": mean(lambda x: x.nmse, 4),
        "least NMSE": mean(lambda x: x.best_nmse, 4),
        "worst ratio": lambda own: f"{max(x.nmse_ratio for x in own):.3f}",
    }
    return by_network(layers, columns)


def worst_steps(layers: list[Layer]) -> str:
    worst = sorted(layers, key=lambda x: -x.nmse_ratio)[:SHOWN]
    return table(
        ["layer", "entries", "β", "NMSE", "least NMSE", "ratio"],
        [
            [
                x.name, f"{x.entries:,}", f"{x.beta:.2f}", f"{x.nmse:.4f}", f"{x.best_nmse:.4f}",
                f"{x.nmse_ratio:.3f}",
            ]
            for x in worst
        ],
    )  # fmt: skip


def farthest_from_entropy(large: list[Layer]) -> str:
    farthest = sorted(large, key=lambda x: -x.excess)[:SHOWN]
    sections = [f"{name} bytes" for name in large[0].sections]
    return table(
        ["layer", "entries", "entropy", "frame", "above", "coding", *sections],
        [
            [
                x.name, f"{x.entries:,}", f"{x.entropy:.4f}", f"{x.rans:.4f}", f"{x.excess:+.2%}", x.coding,
                *(f"{count:,}" for count in x.sections.values()),
            ]
            for x in farthest
        ],
    )  # fmt: skip


def verdict(large: list[Layer]) -> str:
    within = sum(x.excess <= 0.01 for x in large)
    worst = max(large, key=lambda x: x.excess)
    return (
        f"Of {len(large)} layers with at least {LARGE:,} entries, {within} have a frame within 1% of the "
        f"entropy of its symbols; the farthest is {worst.excess:+.2%} ({worst.name})."
    )


def markdown(layers: list[Layer]) -> str:
    large = [x for x in layers if x.entries >= LARGE]
    parts = [
        "# Recorded gradients in fp4, layer by layer",
        "Written by `python benchmarks/corpus.py FOLDER`, which says what FOLDER holds. Bits per entry, "
        "averaged over the layers of all gradients of a network.",
        "## Coders on the same symbols",
        "Everything that travels is counted. The entropy is that of the symbols' frequencies: a coder that "
        "looks at what came before, as zstd and LZ78 do, may go below it.",
        coder_table(layers),
        *([verdict(large), farthest_from_entropy(large)] if large else []),
        "## Models, with an ideal coder",
        "The bytes that a model sends of itself are counted, the frame's header is not.",
        model_table(layers, lambda x: x.model_bits),
        "## Models, with a Huffman code",
        model_table(layers, lambda x: x.model_huffman),
        "## Fits",
        "Distances of the standardised entries that are not zero; the last column counts by W2.",
        fit_table(layers),
        "## The step",
        "NMSE at the step that the codec chose, at the best of all steps, and the largest ratio of the two.",
        step_table(layers),
        worst_steps(layers),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="write the figures of every layer to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, print only the verdict")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.npz"))
    if not files:
        parser.error(f"no .npz files in {options.folder}")
    layers = []
    for file in files:
        measured = (measure(file.stem, *layer) for layer in layers_of(file))
        layers += [layer for layer in measured if layer]
    if not layers:
        parser.error(f"no gradients in the files of {options.folder}")
    text = markdown(layers)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    else:
        print(text)
    if options.json:
        options.json.write_text(json.dumps([asdict(x) for x in layers], indent=1) + "\n", encoding="utf-8")
    large = [x for x in layers if x.entries >= LARGE]
    if large:
        print(verdict(large))


if __name__ == "__main__":
    main()
