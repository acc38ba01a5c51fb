// The Python module gradwire._native: argument checks and nothing else. kernels/cpu is its only user.
#include "bindings.h"
#include "bindings_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "chunks.h"
#include "passes.h"

using namespace gradwire;

namespace {

// Python's view of a format and step: (min_exponent, mantissa, zero_symbol, top_index, has_sign, largest).
Quantizer make_quantizer(nb::tuple fmt, float decay, float step, const float* values, size_t symbols,
                         std::optional<uint64_t> seed) {
    require(fmt.size() == 6, "a format has six numbers");
    Quantizer q{};
    q.min_exponent = nb::cast<int>(fmt[0]);
    q.mantissa = nb::cast<int>(fmt[1]);
    q.zero_symbol = nb::cast<int>(fmt[2]);
    q.top_index = nb::cast<int>(fmt[3]);
    q.has_sign = nb::cast<bool>(fmt[4]);
    q.largest = nb::cast<float>(fmt[5]);
    q.decay = decay;
    q.inverse = 1.0f / step;
    q.values = values;
    q.symbols = int(symbols);
    q.stochastic = seed.has_value();
    q.seed = seed.value_or(0);
    // Exponents stay in range while a is rounded, and no symbol lies outside the values.
    require(q.mantissa >= 0 && q.mantissa <= 7 && q.min_exponent >= -100 && q.min_exponent <= 100, "bad format");
    require(q.largest >= 0 && q.largest <= 0x1p100f && q.top_index >= 0 && q.zero_symbol >= 0, "bad format");
    require(!q.has_sign || q.zero_symbol >= q.top_index, "bad format");
    require(q.symbols <= kMaxSymbols && q.symbols == q.zero_symbol + q.top_index + 1, "values do not fit the format");
    return q;
}

Quantizer make_quantizer(nb::tuple fmt, float decay, float step, Floats values, std::optional<uint64_t> seed) {
    return make_quantizer(fmt, decay, step, values.data(), values.size(), seed);
}

void quantize_entries(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out, float decay,
                      float step, nb::tuple fmt, Floats values, std::optional<uint64_t> seed, BytesOut symbols,
                      int threads) {
    Quantizer q = make_quantizer(fmt, decay, step, values, seed);
    Stream s = make_stream(gradient, memory, memory_out);
    require(symbols.size() == s.count, "symbols has the wrong size");
    nb::gil_scoped_release release;
    quantize(q, s, symbols.data(), threads);
}

// Chunks one after the other into `out`; returns their lengths, and how many entries they hold: less than all if it
// stopped before a NaN or an infinity.
std::pair<std::vector<size_t>, size_t> quantize_rans(Floats gradient, std::optional<Floats> memory,
                                                     std::optional<FloatsOut> memory_out, float decay, float step,
                                                     nb::tuple fmt, Floats values, Ints frequencies, int precision,
                                                     int lanes, size_t chunk, BytesOut out, int threads) {
    Quantizer q = make_quantizer(fmt, decay, step, values, std::nullopt);
    Stream s = make_stream(gradient, memory, memory_out);
    auto table = make_table(frequencies, precision);
    require_lanes(lanes);
    require(chunk > 0 && s.count > 0, "empty");
    require(table->symbols == q.symbols, "frequencies do not fit the format");
    const Cut cut{s.count, std::min(chunk, s.count), lanes, threads, s.entry_bytes()};
    require(out.size() >= rans_bound(s.count, lanes, cut.chunks()), "out is too small");
    nb::gil_scoped_release release;
    const auto encode = [&](size_t i, uint8_t* to, uint8_t* scratch) {
        const Stream part = s.part(cut.start(i), cut.entries(i));
        return kernels().quantize_rans(q, part, *table, lanes, to, scratch);
    };
    Encoded all = encode_chunks(cut, encode, s.in_place(), out.data());
    return {std::move(all.lengths), all.entries};
}

// Chunks of symbols one after the other into `out`; returns their lengths.
std::vector<size_t> rans_encode(Bytes symbols, Ints frequencies, int precision, int lanes, size_t chunk, BytesOut out,
                                int threads) {
    auto table = make_table(frequencies, precision);
    require_lanes(lanes);
    require(chunk > 0, "empty chunks");
    const size_t n = symbols.size();
    const Cut cut{n, std::min(chunk, std::max<size_t>(n, 1)), lanes, threads, kSymbolBytes};
    require(out.size() >= rans_bound(n, lanes, cut.chunks()), "out is too small");
    std::atomic<bool> good{true};
    nb::gil_scoped_release release;
    const auto encode = [&](size_t i, uint8_t* to, uint8_t*) -> Coded {
        const uint8_t* from = symbols.data() + cut.start(i);
        uint8_t largest = 0;
        for (size_t j = 0; j < cut.entries(i); j++) largest = std::max(largest, from[j]);
        if (largest < table->symbols)
            return {kernels().rans_encode(*table, from, cut.entries(i), lanes, to), cut.entries(i)};
        good = false;
        return {0, 0};
    };
    Encoded all = encode_chunks(cut, encode, nullptr, out.data());
    require(good, "symbol out of range");
    return std::move(all.lengths);
}

// Decodes chunks of `chunk` entries (the last may be shorter); `target` says where entry i goes.
// Chunks are listed some thousands at a time: a hostile frame has one for every 64 entries, and what is listed of a
// chunk takes as much memory as these.
constexpr size_t kListedChunks = 4096;

template <class TargetOf>
bool rans_decode_all(Bytes body, Ints lengths, Ints frequencies, int precision, int lanes, size_t chunk, size_t count,
                     int threads, Sink sink, TargetOf target) {
    auto table = make_table(frequencies, precision);
    require_lanes(lanes);
    require(chunk > 0 && count > 0, "empty");
    const Cut cut{count, std::min(chunk, count), lanes, threads, kSymbolBytes};
    require(lengths.size() == cut.chunks(), "wrong number of chunks");
    size_t total = 0;
    for (size_t i = 0; i < lengths.size(); i++) {
        const int64_t n = lengths.data()[i];
        require(n >= 0 && uint64_t(n) <= body.size() - total, "chunks are longer than the body");
        total += size_t(n);
    }
    require(total == body.size(), "chunks do not fill the body");
    nb::gil_scoped_release release;
    std::vector<Chunk> chunks;
    chunks.reserve(std::min(lengths.size(), kListedChunks));
    const uint8_t* p = body.data();
    for (size_t i = 0; i < lengths.size(); i++) {
        chunks.push_back({p, size_t(lengths.data()[i]), cut.entries(i), target(cut.start(i))});
        p += chunks.back().length;
        if (chunks.size() < kListedChunks && i + 1 < lengths.size()) continue;
        if (!decode_chunks(*table, chunks, cut, sink)) return false;
        chunks.clear();
    }
    return true;
}

bool rans_decode(Bytes body, Ints lengths, Ints frequencies, int precision, int lanes, size_t chunk, BytesOut symbols,
                 int threads) {
    return rans_decode_all(body, lengths, frequencies, precision, lanes, chunk, symbols.size(), threads, Sink::symbols,
                           [&](size_t i) { return Target{symbols.data() + i, nullptr, nullptr, nullptr}; });
}

// The values of all symbols, stored in `out`, alone or added to those in `onto`, which may be the same.
bool rans_dequantize(Bytes body, Ints lengths, Ints frequencies, int precision, int lanes, size_t chunk, Floats values,
                     FloatsOut out, bool accumulate, Floats onto, int threads) {
    require(values.size() == frequencies.size(), "values do not fit the frequencies");
    require(onto.size() == out.size(), "there must be as many entries to add to");
    return rans_decode_all(body, lengths, frequencies, precision, lanes, chunk, out.size(), threads,
                           accumulate ? Sink::add : Sink::store,
                           [&](size_t i) { return Target{nullptr, values.data(), out.data() + i, onto.data() + i}; });
}

std::vector<Quantizer> quantizers_of(const std::vector<float>& steps, nb::tuple fmt, Floats values) {
    std::vector<Quantizer> result;
    for (float step : steps) result.push_back(make_quantizer(fmt, 0, step, values, std::nullopt));
    return result;
}

double squared_error(const Quantizer& q, float step, const float* u, size_t n) {
    return kernels().squared_error(q, u, n) * double(step) * double(step);
}

std::vector<double> squared_errors(Floats u, std::vector<float> steps, nb::tuple fmt, Floats values) {
    const std::vector<Quantizer> quantizers = quantizers_of(steps, fmt, values);
    nb::gil_scoped_release release;
    std::vector<double> errors;
    for (size_t i = 0; i < steps.size(); i++)
        errors.push_back(squared_error(quantizers[i], steps[i], u.data(), u.size()));
    return errors;
}

// Which of the other steps is clearly better for the entries that are not zero, or -1: `scanned` of them propose one.
int better_step(const std::vector<Quantizer>& others, const float* steps, const Quantizer& own, float step,
                const float* u, size_t count, size_t scanned, double clearly, std::vector<float>& entries,
                std::vector<float>& some) {
    entries.resize(count);
    some.clear();
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        entries[n] = u[i];
        n += u[i] != 0;
    }
    const size_t every = std::max<size_t>(1, n / scanned);
    for (size_t i = 0; i < n; i += every) some.push_back(entries[i]);
    size_t best = 0;
    double least = 0;
    for (size_t i = 0; i < others.size(); i++) {
        const double error = squared_error(others[i], steps[i], some.data(), some.size());
        if (!i || error < least) least = error, best = i;
    }
    const double error = squared_error(own, step, entries.data(), n);
    return squared_error(others[best], steps[best], entries.data(), n) < error * clearly ? int(best) : -1;
}

// u at the sampled entries of each segment, one segment after the other; at all entries of those that have no more.
void sample_segments(Floats gradient, std::optional<Floats> memory, float decay, Ints lengths, size_t runs,
                     size_t length, FloatsOut out) {
    std::optional<FloatsOut> none;
    const Stream s = make_stream(gradient, memory, none);
    require_segments(lengths, s.count);
    require(runs && length, "nothing to sample");
    const size_t most = runs * length;
    const auto sampled = [&](size_t i) { return std::min(size_t(lengths.data()[i]), most); };
    size_t total = 0;
    for (size_t i = 0; i < lengths.size(); i++) total += sampled(i);
    require(out.size() == total, "out has the wrong size");
    nb::gil_scoped_release release;
    const float *g = s.gradient, *e = s.memory;
    float* to = out.data();
    for (size_t i = 0; i < lengths.size(); i++) {
        const size_t n = size_t(lengths.data()[i]);
        sample(g, e, decay, n, runs, length, to);
        g += n;
        e += e ? n : 0;
        to += sampled(i);
    }
}

// `out` has three numbers for each segment: how many entries are not zero, and the sums of magnitudes and squares.
void segment_moments(Floats x, Ints lengths, Written<double> out) {
    require_segments(lengths, x.size());
    require(out.size() == 3 * lengths.size(), "out has the wrong size");
    nb::gil_scoped_release release;
    const float* at = x.data();
    for (size_t i = 0; i < lengths.size(); at += lengths.data()[i++]) {
        int64_t nonzero;
        double* sums = out.data() + 3 * i;
        moments(at, size_t(lengths.data()[i]), nonzero, sums[1], sums[2]);
        sums[0] = double(nonzero);
    }
}

// For each segment the number of the other step (a row of `others`) that is clearly better, or -1.
void better_steps(Floats u, Ints lengths, Floats steps, Floats others, size_t scanned, double clearly, nb::tuple fmt,
                  Floats values, IntsOut best) {
    require_segments(lengths, u.size());
    const size_t n = lengths.size();
    require(n && steps.size() == n && best.size() == n && scanned, "nothing to compare, or the wrong size");
    const size_t width = others.size() / n;
    require(width && others.size() == n * width, "others has the wrong size");
    Quantizer own = make_quantizer(fmt, 0, 1, values, std::nullopt);
    nb::gil_scoped_release release;
    std::vector<Quantizer> quantizers(width, own);
    std::vector<float> entries, some;
    const float* at = u.data();
    for (size_t i = 0; i < n; at += lengths.data()[i++]) {
        const float* row = others.data() + i * width;
        own.inverse = 1.0f / steps.data()[i];
        for (size_t k = 0; k < width; k++) quantizers[k].inverse = 1.0f / row[k];
        best.data()[i] = better_step(quantizers, row, own, steps.data()[i], at, size_t(lengths.data()[i]), scanned,
                                     clearly, entries, some);
    }
}

// Like `quantize`, with a step and a row of values for each segment.
void quantize_segments(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out, float decay,
                       Ints lengths, Floats steps, nb::tuple fmt, Floats values, std::optional<uint64_t> seed,
                       BytesOut symbols) {
    const Stream s = make_stream(gradient, memory, memory_out);
    require_segments(lengths, s.count);
    const size_t n = lengths.size(), width = n ? values.size() / n : 0;
    require(n && steps.size() == n && values.size() == n * width && symbols.size() == s.count, "wrong size");
    Quantizer q = make_quantizer(fmt, decay, 1, values.data(), width, seed);
    nb::gil_scoped_release release;
    size_t start = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t length = size_t(lengths.data()[i]);
        q.inverse = 1.0f / steps.data()[i];
        q.values = values.data() + i * width;
        q.seed = seed.value_or(0) + start;
        Stream part = s.part(start, length);
        part.first = 0;
        part.far = false;
        quantize(q, part, symbols.data() + start, 1);
        start += length;
    }
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("use", [](const std::string& name) { return use_kernels(name.c_str()); });
    m.def("available", [] {
        std::vector<std::string> names;
        for (const char* const* n = available_kernels(); *n; n++) names.emplace_back(*n);
        return names;
    });
    m.def("crc32", [](Bytes data, uint32_t value, int threads) {
        nb::gil_scoped_release release;
        return crc32(data.data(), data.size(), value, threads);
    });
    m.def("absmax", [](Floats x, int threads) {
        nb::gil_scoped_release release;
        uint32_t bits = absmax_bits(x.data(), x.size(), threads);
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }, nb::arg("x"), nb::arg("threads") = 1);
    m.def("histogram", [](Bytes symbols, IntsOut counts, int threads) {
        int64_t found[256];
        nb::gil_scoped_release release;
        histogram(symbols.data(), symbols.size(), threads, found);
        const bool fit = std::all_of(found + std::min<size_t>(counts.size(), 256), found + 256,
                                     [](int64_t n) { return !n; });
        require(fit && counts.size() <= 256, "symbol out of range");
        std::copy_n(found, counts.size(), counts.data());
    });
    m.def("moments", [](Floats x) {
        int64_t nonzero;
        double sum_abs, sum_square;
        {
            nb::gil_scoped_release release;
            moments(x.data(), x.size(), nonzero, sum_abs, sum_square);
        }
        return nb::make_tuple(nonzero, sum_abs, sum_square);
    });
    m.def("sample",
          [](Floats gradient, std::optional<Floats> memory, float decay, size_t runs, size_t length, FloatsOut out) {
        require(!memory || memory->size() == gradient.size(), "memory has the wrong size");
        require(runs && length && out.size() == runs * length && gradient.size() / runs >= length,
                "sample is too large");
        nb::gil_scoped_release release;
        sample(gradient.data(), memory ? memory->data() : nullptr, decay, gradient.size(), runs, length, out.data());
    }, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("decay"), nb::arg("runs"), nb::arg("length"),
          nb::arg("out"));
    m.def("squared_errors", &squared_errors);
    m.def("sample_segments", &sample_segments, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("decay"),
          nb::arg("lengths"), nb::arg("runs"), nb::arg("length"), nb::arg("out"));
    m.def("segment_moments", &segment_moments);
    m.def("better_steps", &better_steps);
    m.def("quantize_segments", &quantize_segments, nb::arg("gradient"), nb::arg("memory").none(),
          nb::arg("memory_out").none(), nb::arg("decay"), nb::arg("lengths"), nb::arg("steps"), nb::arg("fmt"),
          nb::arg("values"), nb::arg("seed").none(), nb::arg("symbols"));
    m.def("quantize", &quantize_entries, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("memory_out").none(),
          nb::arg("decay"), nb::arg("step"), nb::arg("fmt"), nb::arg("values"), nb::arg("seed").none(),
          nb::arg("symbols"), nb::arg("threads") = 1);
    m.def("quantize_rans", &quantize_rans, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("memory_out").none(),
          nb::arg("decay"), nb::arg("step"), nb::arg("fmt"), nb::arg("values"), nb::arg("frequencies"),
          nb::arg("precision"), nb::arg("lanes"), nb::arg("chunk"), nb::arg("out"), nb::arg("threads") = 1);
    m.def("rans_encode", &rans_encode, nb::arg("symbols"), nb::arg("frequencies"), nb::arg("precision"),
          nb::arg("lanes"), nb::arg("chunk"), nb::arg("out"), nb::arg("threads") = 1);
    m.def("rans_decode", &rans_decode, nb::arg("body"), nb::arg("lengths"), nb::arg("frequencies"),
          nb::arg("precision"), nb::arg("lanes"), nb::arg("chunk"), nb::arg("symbols"), nb::arg("threads") = 1);
    m.def("rans_dequantize", &rans_dequantize, nb::arg("body"), nb::arg("lengths"), nb::arg("frequencies"),
          nb::arg("precision"), nb::arg("lanes"), nb::arg("chunk"), nb::arg("values"), nb::arg("out"),
          nb::arg("accumulate"), nb::arg("onto"), nb::arg("threads") = 1);
    m.def("pack_bits", [](Bytes symbols, int width, BytesOut out, int threads) {
        require(width >= 1 && width <= 8 && out.size() == (symbols.size() * width + 7) / 8, "wrong size");
        nb::gil_scoped_release release;
        pack_bits(symbols.data(), symbols.size(), width, out.data(), threads);
    });
    m.def("unpack_bits", [](Bytes data, int width, int limit, BytesOut symbols, int threads) {
        require(width >= 1 && width <= 8 && data.size() == (symbols.size() * width + 7) / 8, "wrong size");
        nb::gil_scoped_release release;
        return unpack_bits(data.data(), symbols.size(), width, limit, symbols.data(), threads);
    });
    m.def("huffman_lengths", [](Ints frequencies, BytesOut lengths) {
        require(lengths.size() == frequencies.size() && lengths.size() <= kMaxSymbols, "wrong size");
        nb::gil_scoped_release release;
        huffman_lengths(frequencies.data(), int(frequencies.size()), lengths.data());
    });
    m.def("huffman_encode", [](Bytes symbols, Bytes lengths, Codes codes) {
        require(lengths.size() == codes.size() && lengths.size() <= kMaxSymbols, "bad code");
        const uint8_t* const all = symbols.data();
        const size_t n = symbols.size();
        uint8_t largest = 0, longest = 0;
        for (size_t i = 0; i < lengths.size(); i++) longest = std::max(longest, lengths.data()[i]);
        require(longest <= 16, "code is too long");
        for (size_t i = 0; i < n; i++) largest = std::max(largest, all[i]);
        require(!n || largest < lengths.size(), "symbol out of range");
        Room<uint8_t> room((n * longest + 7) / 8 + 8);
        size_t coded;
        {
            nb::gil_scoped_release release;
            coded = huffman_encode(all, n, lengths.data(), codes.data(), int(lengths.size()), room.data());
        }
        return room.front(coded);
    });
    m.def("huffman_decode", [](Bytes data, Bytes lengths, Codes codes, BytesOut symbols) {
        require(lengths.size() == codes.size() && lengths.size() <= kMaxSymbols, "bad code");
        nb::gil_scoped_release release;
        return huffman_decode(data.data(), data.size(), symbols.size(), lengths.data(), codes.data(),
                              int(lengths.size()), symbols.data());
    });
    bind_aggregator(m);
    bind_grid(m);
    bind_homomorphic(m);
    bind_levels(m);
    bind_rows(m);
    bind_structure(m);
    bind_streams(m);
    bind_sketch(m);
    bind_sparse(m);
}
