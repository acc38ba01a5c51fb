"""What the symbols of a quantized tensor cost under each probability model, with each coder.

The symbols are the same for all models: only the lengths of their codes differ. Symbols are signed, so sign
bits are counted; so are the bytes that a model sends of itself. Models without a point mass at zero are
fitted to all entries, `gennorm+zeros` to those that are not zero, with the share of exact zeros beside it.
"""

from __future__ import annotations

import numpy as np

from gradwire import compress
from gradwire.compress import huffman
from gradwire.inspection import goodness
from gradwire.models import gennorm_cells, histogram
from gradwire.models.integer_frequencies import bits_per_symbol, normalize
from gradwire.small_float_formats import Format

MASS = 1 << 40  # masses become integer counts before the coder's own normalization


def entropy(counts: np.ndarray) -> float:
    """Bits per symbol that no memoryless code can beat."""
    p = counts[counts > 0] / counts.sum()
    return float(abs(p @ np.log2(p)))


def symbol_masses(fmt: Format, model: goodness.CentredGenNorm, step: float) -> np.ndarray:
    """The probability of each symbol of a signed format at this step."""
    magnitudes = gennorm_cells.cell_masses(fmt, model.beta, step / model.alpha)
    side = magnitudes[1:] / 2
    return np.concatenate([side[::-1], magnitudes[:1], side])


def frequencies(masses: np.ndarray) -> np.ndarray:
    """As the coders take them: integers of as many bits as this alphabet gets, none of them zero."""
    precision = compress.finest_precision(len(masses))
    counts = np.maximum(1, np.rint(masses * (MASS >> precision))).astype(np.int64)
    return normalize(counts, precision)


def models(fmt: Format, x: np.ndarray, step: float, counts: np.ndarray) -> dict[str, tuple[np.ndarray, int]]:
    """Each model's frequencies, and the bytes that it sends of itself; `x`: the entries, not all zero."""
    nonzero = x[x != 0]
    table = {
        name: (frequencies(symbol_masses(fmt, model, step)), 1 if name == "gennorm" else 0)
        for name, model in goodness.fit(*goodness.moments(x)).items()
    }
    zeros = 1 - len(nonzero) / len(x)
    masses = symbol_masses(fmt, goodness.fit(*goodness.moments(nonzero))["gennorm"], step) * (1 - zeros)
    masses[fmt.zero_symbol] += zeros
    table["gennorm+zeros"] = (frequencies(masses), 2)
    own = normalize(counts, compress.finest_precision(fmt.symbols))
    table["histogram"] = (own, histogram.packed_length(own, fmt.zero_symbol))
    return table


def bits_per_entry(counts: np.ndarray, frequencies: np.ndarray, own_bytes: int) -> dict[str, float]:
    """{"huffman", "ideal"}: with whole bits per symbol, and with none wasted (what rANS comes close to)."""
    used, total = counts > 0, counts.sum()
    own = 8 * own_bytes / total
    ideal = counts[used] @ bits_per_symbol(frequencies, compress.finest_precision(len(frequencies)))[used] / total
    several = np.count_nonzero(frequencies) > 1  # else there is nothing to code
    coded = counts @ huffman.code_lengths(frequencies) / total if several else 0.0
    return {"huffman": float(coded + own), "ideal": float(ideal + own)}
