// Argument checks of the grid kernels.
#include <algorithm>
#include <memory>
#include <vector>

#include "bindings.h"
#include "chunks.h"
#include "grid.h"

namespace gradwire {
namespace {

using Ints32Out = Written<int32_t>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Grid make_grid(float decay, float step, float shift, const float* values, size_t width, std::optional<uint64_t> seed) {
    require(width % 2 == 1 && width >= 3 && width <= 255, "values do not fit a grid");
    require(step > 0 && shift >= 0 && shift <= 1, "bad step or shift");
    return {decay, 1.0f / step, shift, int(width / 2), values, seed.value_or(0), seed.has_value(), false, step, 0.0f};
}

Outliers make_outliers(IntsOut& positions, Ints32Out& multiples) {
    require(multiples.size() == positions.size(), "arrays of outliers differ in size");
    return {positions.data(), multiples.data(), 0, positions.size()};
}

// Returns the number of outliers.
size_t quantize(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out, float decay,
                float step, float shift, Floats values, std::optional<uint64_t> seed, BytesOut symbols,
                IntsOut positions, Ints32Out multiples) {
    const Grid g = make_grid(decay, step, shift, values.data(), values.size(), seed);
    const Stream s = make_stream(gradient, memory, memory_out);
    Outliers outliers = make_outliers(positions, multiples);
    require(symbols.size() == s.count, "symbols has the wrong size");
    nb::gil_scoped_release release;
    grid_kernels().quantize(g, s, symbols.data(), outliers);
    return outliers.count;
}

// The same for tensors that lie end to end, with a step and a row of values for each; a segment may have as many outliers
// as it has sixteenths.
size_t quantize_segments(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out,
                         float decay, Ints lengths, Floats steps, float shift, Floats values, BytesOut symbols,
                         IntsOut positions, Ints32Out multiples) {
    const Stream s = make_stream(gradient, memory, memory_out);
    require_segments(lengths, s.count);
    const size_t n = lengths.size(), width = n ? values.size() / n : 0;
    require(n && steps.size() == n && values.size() == n * width && symbols.size() == s.count, "wrong size");
    Outliers outliers = make_outliers(positions, multiples);
    const size_t room = outliers.capacity;
    std::vector<Grid> grids;
    for (size_t i = 0; i < n; i++)
        grids.push_back(make_grid(decay, steps.data()[i], shift, values.data() + i * width, width, std::nullopt));
    nb::gil_scoped_release release;
    size_t start = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t length = size_t(lengths.data()[i]), before = outliers.count;
        outliers.capacity = std::min(room, before + length / 16);
        Stream part = s.part(start, length);
        part.far = false;
        grid_kernels().quantize(grids[i], part, symbols.data() + start, outliers);
        start += length;
    }
    return outliers.count;
}

// The outliers of each chunk in a list of its own, twice as long as it should be, until all chunks are coded.
class ListsOfChunks {
  public:
    ListsOfChunks(size_t chunks, size_t chunk)
        : room_(chunk / 8 + 16), positions_(new int64_t[chunks * room_]), multiples_(new int32_t[chunks * room_]),
          counts_(chunks) {}

    Outliers of(size_t i) { return {positions_.get() + i * room_, multiples_.get() + i * room_, 0, room_}; }
    void close(size_t i, const Outliers& o) { counts_[i] = o.count; }
    bool is_full(size_t i) const { return counts_[i] == room_; }

    // False, with nothing written, if there is no room for those of the first chunks, or their lists had none.
    bool join(size_t chunks, Outliers& all) const {
        size_t total = 0;
        for (size_t i = 0; i < chunks; i++) {
            if (is_full(i)) return false;
            total += counts_[i];
        }
        if (total > all.capacity) return false;
        for (size_t i = 0; i < chunks; all.count += counts_[i++]) {
            std::copy_n(positions_.get() + i * room_, counts_[i], all.positions + all.count);
            std::copy_n(multiples_.get() + i * room_, counts_[i], all.multiples + all.count);
        }
        return true;
    }

  private:
    size_t room_;
    std::unique_ptr<int64_t[]> positions_;
    std::unique_ptr<int32_t[]> multiples_;
    std::vector<size_t> counts_;
};

// Whether an outlier finds room depends on all before it. So threads go ahead as if there were room for all; if there
// is not, which is rare, all is done again by one, as if nothing had been: the memory must not be changed in place.
bool encode_on_threads(const Cut& cut, const Grid& g, const Stream& s, const RansTable& table, uint8_t* out,
                       Outliers& outliers, Encoded& all) {
    ListsOfChunks lists(cut.chunks(), cut.chunk);
    const auto encode = [&](size_t i, uint8_t* to, uint8_t* scratch) -> Coded {
        Outliers some = lists.of(i);
        const Stream part = s.part(cut.start(i), cut.entries(i));
        const Coded coded = grid_kernels().quantize_rans(g, part, table, cut.lanes, to, scratch, some);
        lists.close(i, some);
        return coded;
    };
    all = encode_chunks(cut, encode, nullptr, out);
    return lists.join(all.lengths.size(), outliers);
}

// Chunks one after the other into `out`: their lengths, how many entries they hold (less than all if it stopped before
// a NaN or an infinity) and how many outliers there were.
nb::tuple rans(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out, float decay,
               float step, float shift, Floats values, std::optional<float> offset, Ints frequencies, int precision,
               int lanes, size_t chunk, BytesOut out, IntsOut positions, Ints32Out multiples, int threads) {
    Grid g = make_grid(decay, step, shift, values.data(), values.size(), std::nullopt);
    g.settle = offset.has_value();
    g.offset = offset.value_or(0);
    const Stream s = make_stream(gradient, memory, memory_out);
    Outliers outliers = make_outliers(positions, multiples);
    auto table = make_table(frequencies, precision);
    require_lanes(lanes);
    require(chunk > 0 && s.count > 0, "empty");
    require(table->symbols == 2 * g.largest + 1, "frequencies do not fit the grid");
    Cut cut{s.count, std::min(chunk, s.count), lanes, threads, s.entry_bytes()};
    require(out.size() >= rans_bound(s.count, lanes, cut.chunks()), "out is too small");
    Encoded all{{}, 0};
    {
        nb::gil_scoped_release release;
        if (s.in_place() || cut.threads_of_use() == 1 ||
            !encode_on_threads(cut, g, s, *table, out.data(), outliers, all)) {
            cut.threads = 1;
            const auto encode = [&](size_t i, uint8_t* to, uint8_t* scratch) {
                const Stream part = s.part(cut.start(i), cut.entries(i));
                return grid_kernels().quantize_rans(g, part, *table, lanes, to, scratch, outliers);
            };
            all = encode_chunks(cut, encode, nullptr, out.data());
        }
    }
    return nb::make_tuple(all.lengths, all.entries, outliers.count);
}

}  // namespace

void bind_grid(nb::module_& m) {
    m.def("grid_quantize", quantize, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("memory_out").none(),
          nb::arg("decay"), nb::arg("step"), nb::arg("shift"), nb::arg("values"), nb::arg("seed").none(),
          nb::arg("symbols"), nb::arg("positions"), nb::arg("multiples"));
    m.def("grid_quantize_segments", quantize_segments, nb::arg("gradient"), nb::arg("memory").none(),
          nb::arg("memory_out").none(), nb::arg("decay"), nb::arg("lengths"), nb::arg("steps"), nb::arg("shift"),
          nb::arg("values"), nb::arg("symbols"), nb::arg("positions"), nb::arg("multiples"));
    m.def("grid_rans", rans, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("memory_out").none(),
          nb::arg("decay"), nb::arg("step"), nb::arg("shift"), nb::arg("values"), nb::arg("offset").none(),
          nb::arg("frequencies"), nb::arg("precision"), nb::arg("lanes"), nb::arg("chunk"), nb::arg("out"),
          nb::arg("positions"), nb::arg("multiples"), nb::arg("threads") = 1);
    m.def("grid_measure",
          [](Floats x, Doubles first, Doubles second, int64_t zeros, Doubles logs, float step,
             float shift) -> nb::object {
        const size_t n = x.size();
        require(first.size() == n + 1 && second.size() == n + 1 && n > 0, "sums do not fit the sample");
        require(logs.size() == kLogs + 1 && zeros >= 0 && zeros < int64_t(1) << 48, "bad table or number of zeros");
        require(step > 0 && shift >= 0 && shift <= 1, "bad step or shift");
        Measured found;
        if (!grid_measure(x.data(), first.data(), second.data(), n, zeros, logs.data(), step, shift, found))
            return nb::none();
        return nb::make_tuple(found.bits, found.outlier_bits, found.error, found.largest,
                              nb::make_tuple(found.offsets[0], found.offsets[1]));
    });
    m.def("running_sums", [](Floats x, Written<double> first, Written<double> second) {
        require(first.size() == x.size() + 1 && second.size() == x.size() + 1, "sums do not fit the sample");
        nb::gil_scoped_release release;
        running_sums(x.data(), x.size(), first.data(), second.data());
    });
    m.def("grid_search",
          [](Floats x, Doubles first, Doubles second, int64_t zeros, Doubles logs, double energy,
             double error) -> nb::object {
        require(first.size() == x.size() + 1 && second.size() == x.size() + 1 && x.size() > 0, "sums do not fit");
        require(logs.size() == kLogs + 1 && zeros >= 0 && zeros < int64_t(1) << 48, "bad table or number of zeros");
        const Sample sample{x.data(), first.data(), second.data(), x.size(), zeros, logs.data(), energy};
        float step = 0, shift = 0;
        Measured found;
        bool good;
        {
            nb::gil_scoped_release release;
            good = grid_search(sample, error, step, shift, found);
        }
        if (!good) return nb::none();
        return nb::make_tuple(double(step), double(shift),
                              nb::make_tuple(found.bits, found.outlier_bits, found.error, found.largest,
                                             nb::make_tuple(found.offsets[0], found.offsets[1])));
    });
    m.def("add_at", [](FloatsOut x, Ints positions, Floats values) {
        require(positions.size() == values.size(), "positions and values differ in number");
        for (size_t i = 0; i < positions.size(); i++)
            require(positions.data()[i] >= 0 && size_t(positions.data()[i]) < x.size(), "position out of range");
        nb::gil_scoped_release release;
        add_at(x.data(), positions.data(), values.data(), values.size());
    });
    m.def("pack_outliers", [](Ints gaps, Bytes negative, Ints excesses, int a, int b, BytesOut out) {
        const size_t n = gaps.size();
        require(negative.size() == n && excesses.size() == n && a >= 0 && a <= 48 && b >= 0 && b <= 24, "bad outliers");
        uint64_t bits = 0;
        for (size_t i = 0; i < n; i++) {
            require(gaps.data()[i] >= 0 && gaps.data()[i] < int64_t(1) << 48 && negative.data()[i] < 2,
                    "bad gap or sign");
            require(excesses.data()[i] >= 0 && excesses.data()[i] <= kGridLimit, "bad excess");
            bits += uint64_t(gaps.data()[i] >> a) + uint64_t(a) + 2 + 51 + uint64_t(b);
            require(bits >> 56 == 0, "gaps beyond any tensor");
        }
        require(out.size() >= bits / 8 + 8, "out is too small");
        nb::gil_scoped_release release;
        return pack_outliers(gaps.data(), negative.data(), excesses.data(), n, a, b, out.data());
    });
    m.def("unpack_outliers",
          [](Bytes data, int64_t elements, int largest, int a, int b, IntsOut positions, Ints32Out multiples) {
        require(multiples.size() == positions.size() && a >= 0 && a <= 48 && b >= 0 && b <= 24, "bad outliers");
        require(elements >= 0 && elements < int64_t(1) << 48 && largest >= 1 && largest <= 127, "bad outliers");
        nb::gil_scoped_release release;
        return unpack_outliers(data.data(), data.size(), positions.size(), elements, largest, a, b, positions.data(),
                               multiples.data());
    });
}

}  // namespace gradwire
