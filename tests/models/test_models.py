"""A probability model is one object in one list: coders, choice and frames take any of them."""

import numpy as np
import pytest

from gradwire import compress, models
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader
from gradwire.models.integer_frequencies import normalize
from gradwire.models.probability_model import ProbabilityModel
from gradwire.models.symbol_statistics import Alphabet, GenNormFit, SymbolStatistics
from gradwire.small_float_formats import parse_format


class Geometric(ProbabilityModel):
    """Symbols become rarer by the factor r/16 with each step away from the symbol of zero; r is one byte."""

    name = "geometric"
    wire_number = 3

    def supports(self, alphabet):
        return alphabet.symbols <= 32

    def fit(self, statistics, precision):
        return self._frequencies(self._ratio(statistics), statistics.alphabet, precision)

    def packed_length(self, frequencies, statistics):
        return 1

    def pack(self, frequencies, statistics):
        return bytes([self._ratio(statistics)])

    def read(self, reader, alphabet, precision):
        ratio = reader.byte()
        if not 1 <= ratio <= 15:
            raise FrameError("invalid ratio")
        return self._frequencies(ratio, alphabet, precision)

    def _ratio(self, statistics):
        zero = statistics.alphabet.zero_symbol
        distance = np.abs(np.arange(statistics.alphabet.symbols) - zero)
        mean = statistics.counts @ distance / statistics.counts.sum()
        # The mean distance of a two-sided geometric distribution is 2r / (1 − r²).
        return int(np.clip(round(16 * (np.sqrt(1 + mean**2) - 1) / max(mean, 1e-9)), 1, 15))

    def _frequencies(self, ratio, alphabet, precision):
        distance = np.abs(np.arange(alphabet.symbols) - alphabet.zero_symbol)
        return normalize(np.array([ratio**d * 16 ** (10 - d) if d < 10 else 1 for d in distance.tolist()]), precision)


@pytest.fixture
def third_model(monkeypatch):
    toy = Geometric()
    monkeypatch.setattr(models, "MODELS", models.numbered([*models.MODELS.values(), toy]))
    return toy


def geometric_symbols(alphabet, count):
    weights = 0.5 ** np.abs(np.arange(alphabet.symbols) - alphabet.zero_symbol)
    return np.random.default_rng(1).choice(alphabet.symbols, count, p=weights / weights.sum()).astype(np.uint8)


@pytest.mark.parametrize("coder", ["rans", "huffman"])
@pytest.mark.parametrize("count", [300, 5000])
def test_a_third_model_is_chosen_and_read_back(third_model, coder, count):
    alphabet = Alphabet(15, 7)
    symbols = geometric_symbols(alphabet, count)
    statistics = SymbolStatistics(alphabet, np.bincount(symbols, minlength=15), count)
    coding = compress.choose(statistics, compress.CODERS[coder])
    assert coding.model is third_model  # one byte is shorter than a histogram
    reader = Reader(memoryview(compress.encode(symbols, alphabet, coding)))
    head = compress.read_head(reader, alphabet)
    assert head.model is third_model and np.array_equal(head.table, coding.table)
    assert np.array_equal(compress.decode(reader, alphabet, count, head), symbols)


def test_a_third_model_has_a_name_in_specs(third_model):
    assert models.names() == ["auto", "gennorm", "histogram", "geometric"]
    assert models.by_name("geometric") == (third_model,) and len(models.by_name("auto")) == 3


def test_a_model_that_is_not_listed_is_no_model():
    alphabet = Alphabet(15, 7)
    symbols = geometric_symbols(alphabet, 300)
    statistics = SymbolStatistics(alphabet, np.bincount(symbols, minlength=15), 300)
    data = compress.encode(symbols, alphabet, compress.choose(statistics, compress.RANS, [Geometric()]))
    with pytest.raises(FrameError, match="invalid model"):
        compress.read_head(Reader(memoryview(data)), alphabet)


def test_a_model_that_does_not_support_the_alphabet_is_not_chosen_and_not_read(third_model):
    alphabet = Alphabet(33, 16)
    symbols = geometric_symbols(alphabet, 300)
    counts = np.bincount(symbols, minlength=33)
    coding = compress.choose(SymbolStatistics(alphabet, counts, 300), compress.RANS)
    assert coding.model is not third_model
    with pytest.raises(FrameError, match="invalid model"):
        compress.read_head(Reader(memoryview(bytes([3 | 3 << 2 | 14 << 4, 8]))), alphabet)


def test_without_a_fit_of_the_values_gennorm_is_no_candidate():
    fmt = parse_format("fp4")
    symbols = geometric_symbols(fmt, 4000)
    statistics = SymbolStatistics(fmt, np.bincount(symbols, minlength=fmt.symbols), 4000)
    (gennorm,) = models.by_name("gennorm")
    assert compress.choose(statistics, compress.RANS, [gennorm]).coder is compress.RAW
    fitted = statistics._replace(gennorm=GenNormFit(60, 0))
    assert compress.choose(fitted, compress.RANS, [gennorm]).model is gennorm


def test_wire_numbers_are_checked():
    gennorm, histogram = models.MODELS.values()
    for wrong in ([histogram], [gennorm, gennorm], [histogram, gennorm], [gennorm, Geometric()]):
        with pytest.raises(ValueError, match="wire numbers"):
            models.numbered(wrong)
    same_name = Geometric()
    same_name.name = "auto"
    with pytest.raises(ValueError, match="names"):
        models.numbered([gennorm, histogram, same_name])
