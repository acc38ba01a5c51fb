// Argument checks of the homomorphic code.
#include "bindings.h"
#include "bindings_pool.h"
#include "homomorphic.h"
#include "homomorphic_loops.h"

namespace gradwire {
namespace {

using Words = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WordsOut = Written<int32_t>;

const uint32_t* bits(const Words& words) { return reinterpret_cast<const uint32_t*>(words.data()); }
uint32_t* bits(const WordsOut& words) { return reinterpret_cast<uint32_t*>(words.data()); }

int log_of(int lanes) {
    require(lanes == 1 || lanes == 4 || lanes == 16, "a block has 1, 4 or 16 words");
    return lanes == 1 ? 0 : lanes == 4 ? 2 : 4;
}

SketchShape shape_of(int lanes, uint32_t segments, int log, uint32_t seed, size_t words) {
    log_of(lanes);
    require(log >= 0 && log <= 16 && segments >= 4 && !((uint64_t(segments) << log) >> 32), "bad segments");
    require((uint64_t(segments) << log) * uint64_t(lanes) == words, "sketch has the wrong size");
    return SketchShape(segments, log, lanes, seed);
}

void require_positions(Ints positions, int64_t limit) {
    require(are_ascending(positions.data(), positions.size(), limit), "positions must be ascending, and inside");
}

FixedGrid grid_of(float decay, float step, int64_t most, int bits, std::optional<uint64_t> seed) {
    require(bits == 4 || bits == 8 || bits == 16 || bits == 32, "bits must be 4, 8, 16 or 32");
    require(step >= 0x1p-126f && step <= FLT_MAX && most >= 0 && most < int64_t(1) << (bits - 1), "bad grid");
    float limit = float(most);
    if (double(limit) > double(most)) limit = std::nextafter(limit, 0.0f);
    return {decay, step, limit, bits, seed.has_value(), seed.value_or(0)};
}

// How many words are not zero, bit patterns of the largest |g| and |u|, and the sum of squares.
nb::tuple fixed_all(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out, float decay,
                    float step, int64_t most, int bits, std::optional<uint64_t> seed, IntsOut positions,
                    WordsOut values) {
    Stream s = make_stream(gradient, memory, memory_out);
    const FixedGrid g = grid_of(decay, step, most, bits, seed);
    const size_t fields = size_t(32 / bits), words = (s.count + fields - 1) / fields;
    require(positions.size() >= words + kSpare && values.size() >= words + kSpare, "no room for the words");
    FixedResult result;
    {
        nb::gil_scoped_release release;
        homomorphic_kernels().quantize(g, s, positions.data(), values.data(), result);
    }
    double squares = 0;
    for (double sum : result.squares) squares += sum;
    return nb::make_tuple(result.words, result.largest_g, result.largest_u, squares);
}

void fixed_values(Floats values, float step, int64_t most, std::optional<uint64_t> seed, WordsOut q, FloatsOut sent) {
    const FixedGrid g = grid_of(0, step, most, 32, seed);
    const size_t n = values.size();
    require(q.size() == n && sent.size() == n, "out has the wrong size");
    nb::gil_scoped_release release;
    for (size_t i = 0; i < n; i++) {
        const float y = g.stochastic ? on_grid<true>(g, values.data()[i], i) : on_grid<false>(g, values.data()[i], i);
        q.data()[i] = int32_t(y);
        sent.data()[i] = y * g.step;
    }
}

nb::tuple peel_sketch(Words bitmap, Words sketch, size_t words, int lanes, uint32_t segments, int log, uint32_t seed) {
    const SketchShape shape = shape_of(lanes, segments, log, seed, sketch.size());
    const size_t blocks = (words + size_t(lanes) - 1) / size_t(lanes);
    require(words <= kMostWords && bitmap.size() == (blocks + 31) / 32, "index has the wrong size");
    Peeled& peeled = peel_scratch();
    {
        nb::gil_scoped_release release;
        peel(shape, bits(bitmap), bits(sketch), words, peeled);
    }
    auto [positions, position] = array<int64_t>(peeled.nonzero);
    auto [values, value] = array<int32_t>(peeled.nonzero);
    auto [left, left_at] = array<int64_t>(peeled.left);
    {
        nb::gil_scoped_release release;
        list_peeled(peeled, lanes, words, position, value, left_at);
        peeled.trim();
    }
    return nb::make_tuple(positions, values, left, peeled.consistent);
}

nb::tuple align_message(Words bitmap, size_t words, int lanes, Ints own, Words own_values) {
    const int log = log_of(lanes);
    const size_t blocks = (words + size_t(lanes) - 1) >> log;
    require(words <= kMostWords && bitmap.size() == (blocks + 31) / 32, "index has the wrong size");
    require(own.size() == own_values.size(), "as many values as positions");
    size_t room = count_bits(bits(bitmap), bitmap.size());
    if (blocks % 32 && bitmap.size()) {  // marks beyond the last block are nobody's
        const uint32_t beyond = bits(bitmap)[bitmap.size() - 1] & (~0u << (blocks % 32));
        room -= count_bits(&beyond, 1);
    }
    room <<= log;
    const size_t rest = words & (size_t(lanes) - 1);
    if (rest && (bits(bitmap)[(blocks - 1) / 32] >> ((blocks - 1) % 32) & 1)) room -= size_t(lanes) - rest;
    auto [positions, position] = array<int64_t>(room);
    auto [values, value] = array<int32_t>(room);
    size_t met;
    {
        nb::gil_scoped_release release;
        met = align_words(bits(bitmap), words, log, own.data(), own_values.data(), own.size(), position, value);
    }
    return nb::make_tuple(positions, values, met);
}

}  // namespace

void bind_homomorphic(nb::module_& m) {
    m.def("fixed_all", fixed_all, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("memory_out").none(),
          nb::arg("decay"), nb::arg("step"), nb::arg("most"), nb::arg("bits"), nb::arg("seed").none(),
          nb::arg("positions"), nb::arg("values"));
    m.def("fixed_values", fixed_values, nb::arg("values"), nb::arg("step"), nb::arg("most"), nb::arg("seed").none(),
          nb::arg("q"), nb::arg("sent"));
    m.def("put_words", [](FloatsOut out, Ints positions, Words words, int bits, double factor) {
        require(bits == 4 || bits == 8 || bits == 16 || bits == 32, "bits must be 4, 8, 16 or 32");
        require(positions.size() == words.size(), "as many words as positions");
        require_positions(positions, int64_t((out.size() + size_t(32 / bits) - 1) / size_t(32 / bits)));
        nb::gil_scoped_release release;
        put_words(out.data(), out.size(), positions.data(), words.data(), words.size(), bits, factor);
    });
    m.def("are_ascending", [](Ints positions, int64_t limit) {
        nb::gil_scoped_release release;
        return are_ascending(positions.data(), positions.size(), limit);
    });
    m.def("count_bits", [](Words words) {
        nb::gil_scoped_release release;
        return count_bits(bits(words), words.size());
    });
    m.def("count_blocks", [](Ints positions, int lanes) {
        const int log = log_of(lanes);
        nb::gil_scoped_release release;
        return count_blocks(positions.data(), positions.size(), log);
    });
    m.def("index_bitmap", [](Ints positions, int lanes, size_t blocks, WordsOut bitmap) {
        const int log = log_of(lanes);
        require(blocks <= kMostWords && bitmap.size() == (blocks + 31) / 32, "bitmap has the wrong size");
        require_positions(positions, int64_t(blocks) << log);
        nb::gil_scoped_release release;
        index_bitmap(positions.data(), positions.size(), log, bits(bitmap));
    });
    m.def("bloom_build", [](Words bitmap, int probes, uint32_t seed, WordsOut index) {
        require(index.size() >= 1 && index.size() <= kMostWords && probes >= 1, "bad filter");
        nb::gil_scoped_release release;
        bloom_build(bits(bitmap), bitmap.size(), bits(index), uint32_t(index.size()), probes, seed);
    });
    m.def("bloom_query", [](Words index, int probes, uint32_t seed, WordsOut bitmap) {
        require(index.size() >= 1 && index.size() <= kMostWords && probes >= 1, "bad filter");
        nb::gil_scoped_release release;
        homomorphic_kernels().bloom_query(bits(index), uint32_t(index.size()), probes, seed, bitmap.size(),
                                          bits(bitmap));
    });
    m.def("sketch_words",
          [](Ints positions, Words values, int lanes, uint32_t segments, int log, uint32_t seed, WordsOut sketch) {
        const SketchShape shape = shape_of(lanes, segments, log, seed, sketch.size());
        require(positions.size() == values.size(), "as many values as positions");
        require_positions(positions, int64_t(kMostWords));
        nb::gil_scoped_release release;
        sketch_words(shape, positions.data(), values.data(), positions.size(), bits(sketch));
    });
    m.def("align_words", align_message);
    m.def("peel", peel_sketch);
}

}  // namespace gradwire
