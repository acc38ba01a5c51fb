"""The choice of the coder, the model and the precision with which symbols and model parameters take the fewest bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gradwire import models
from gradwire.compress.coders import CONSTANT, RAW
from gradwire.compress.coding import Coder, Coding, EntropyCoder
from gradwire.compress.precision import LARGE, TOLERANCE
from gradwire.compress.raw import raw_width
from gradwire.models.probability_model import ProbabilityModel
from gradwire.models.symbol_statistics import SymbolStatistics


class _Candidate(NamedTuple):
    bits: float  # what all symbols and the model's parameters take
    model: ProbabilityModel
    precision: int
    frequencies: np.ndarray


def choose(
    statistics: SymbolStatistics, coder: Coder, allowed_models: Iterable[ProbabilityModel] | None = None,
    part_of: int = 0,
) -> Coding:  # fmt: skip
    """Return the cheapest coding of symbols with these statistics, by this coder or by packing them as they are.

    All models that are allowed (None: all that there are) are tried at each precision that the coder proposes. Symbols
    that are a part of those of a tensor with `part_of` entries get a table as quick as those of such a tensor.
    """
    size = max(statistics.total, part_of)
    sampled = statistics.sampled
    if not sampled and np.count_nonzero(statistics.counts) == 1:
        return Coding(CONSTANT, parameters=bytes([np.argmax(statistics.counts)]))
    packed = Coding(RAW, expected_bits=float(statistics.total * raw_width(len(statistics.counts))))
    if not isinstance(coder, EntropyCoder):
        return packed
    if sampled:
        statistics = statistics.smoothed()  # a symbol that the sample missed may still come
    models_to_try = models.MODELS.values() if allowed_models is None else allowed_models
    candidates = _candidates(statistics, coder, models_to_try, size)
    if not candidates:
        return packed
    least = min(candidate.bits for candidate in candidates)
    limit = least * TOLERANCE if size >= LARGE else least
    bits, model, precision, frequencies = next(candidate for candidate in candidates if candidate.bits <= limit)
    if bits + coder.fixed_bits >= packed.expected_bits:
        return packed
    return Coding(coder, model, precision, model.pack(frequencies, statistics), frequencies, bits)


def _candidates(
    statistics: SymbolStatistics, coder: EntropyCoder, allowed_models: Iterable[ProbabilityModel], size: int
) -> list[_Candidate]:
    """Return what each model costs at each precision, the fastest precision first."""
    alphabet, counts, total = statistics.alphabet, statistics.counts, statistics.total
    usable = [model for model in allowed_models if model.supports(alphabet)]
    used = counts > 0
    expected_counts = (counts * (total / counts.sum()))[used]
    candidates = []
    for precision in coder.precisions(len(counts), size):
        for model in usable:
            frequencies = model.fit(statistics, precision)
            if frequencies is not None:
                symbol_bits = float(expected_counts @ coder.symbol_bits(frequencies, precision)[used])
                bits = symbol_bits + 8 * model.packed_length(frequencies, statistics)
                candidates.append(_Candidate(bits, model, precision, frequencies))
    return candidates
