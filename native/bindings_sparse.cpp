// Argument checks of the sparse kernels.
#include <algorithm>

#include "bindings.h"
#include "bindings_pool.h"
#include "sparse.h"

namespace gradwire {
namespace {

// How many entries were written to memory_out, and the chosen ones: positions and values.
nb::tuple select_entries(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out,
                         float decay, std::optional<size_t> wanted, uint32_t low, bool one_sign, int threads) {
    Stream s = make_stream(gradient, memory, memory_out);
    require(low >= 1 && low <= 0x7f800000u, "low is not the bit pattern of a magnitude above 0");
    require(!wanted || *wanted >= 1, "nothing is wanted");
    Candidates* sides = scratch();
    size_t done;
    int winner = 0;
    {
        nb::gil_scoped_release release;
        done = select(s, decay, wanted.value_or(kAll), low, one_sign, sides, threads);
        if (done == s.count && one_sign) winner = sides[0].mean() < sides[1].mean();
    }
    const Candidates& chosen = sides[winner];
    const size_t n = done == s.count ? chosen.count : 0;
    return nb::make_tuple(done, array_of(chosen.position.data(), n), array_of(chosen.value.data(), n));
}

void require_places(Ints positions, Floats values, size_t entries) {
    const size_t n = positions.size();
    require(values.size() == 1 || values.size() == n, "as many values as positions, or one");
    const int64_t* p = positions.data();
    bool good = !n || (p[0] >= 0 && uint64_t(p[n - 1]) < entries);
    for (size_t i = 1; i < n; i++) good &= p[i] > p[i - 1];
    require(good, "positions must be ascending, and inside");
}

void scatter(FloatsOut out, Ints positions, Floats values, bool accumulate, int threads) {
    require_places(positions, values, out.size());
    const size_t n = positions.size(), stride = values.size() == 1 ? 0 : 1;
    nb::gil_scoped_release release;
    if (accumulate)
        scatter_add(out.data(), positions.data(), n, values.data(), stride, threads);
    else
        scatter_store(out.data(), out.size(), positions.data(), n, values.data(), stride, threads);
}

void replace(FloatsOut out, Ints positions, Floats values, int threads) {
    require_places(positions, values, out.size());
    nb::gil_scoped_release release;
    scatter_over(out.data(), positions.data(), positions.size(), values.data(), values.size() == 1 ? 0 : 1, threads);
}

void require_gaps(Ints gaps) {
    constexpr size_t kBlock = 1 << 14;  // gaps, of which the sum cannot overflow if none is too large
    const size_t n = gaps.size();
    uint64_t sum = 0;
    for (size_t start = 0; start < n; start += kBlock) {
        uint64_t all = 0, part = 0;
        for (size_t i = start; i < std::min(n, start + kBlock); i++) {
            all |= uint64_t(gaps.data()[i]);
            part += uint64_t(gaps.data()[i]);
        }
        sum += part;
        require(!((all | sum) >> kMaxGapBits), "gaps must be from 0 on, and all together below 2^48");
    }
}

}  // namespace

void bind_sparse(nb::module_& m) {
    m.def("select", select_entries, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("memory_out").none(),
          nb::arg("decay"), nb::arg("wanted").none(), nb::arg("low"), nb::arg("one_sign"), nb::arg("threads"));
    m.def("sum_magnitudes", [](Floats values) {
        nb::gil_scoped_release release;
        return sum_magnitudes(values.data(), values.size());
    });
    m.def("scatter", scatter);
    m.def("replace", replace);
    m.def("split_gaps", [](Ints positions) {
        auto [gaps, data] = array<int64_t>(positions.size());
        int64_t before = -1;
        for (size_t i = 0; i < positions.size(); before = positions.data()[i++])
            data[i] = int64_t(uint64_t(positions.data()[i]) - uint64_t(before) - 1);
        return gaps;
    });
    m.def("golomb_quotients", [](Ints gaps, int b) {
        require(b >= 0 && b < kMaxGapBits, "b must be from 0 to 47");
        require_gaps(gaps);
        nb::gil_scoped_release release;
        return golomb_quotients(gaps.data(), gaps.size(), b);
    });
    m.def("golomb_encode", [](Ints gaps, int b, BytesOut out) {
        require(b >= 0 && b < kMaxGapBits, "b must be from 0 to 47");
        require_gaps(gaps);
        const uint64_t bits = gaps.size() * uint64_t(b + 1) + golomb_quotients(gaps.data(), gaps.size(), b);
        require(out.size() >= bits / 8 + 9, "out is too small");
        nb::gil_scoped_release release;
        return golomb_encode(gaps.data(), gaps.size(), b, out.data());
    });
    m.def("golomb_positions", [](Bytes data, uint64_t at, int b, int64_t limit, int64_t before, IntsOut positions) {
        require(b >= 0 && b < kMaxGapBits && limit >= 0 && limit <= int64_t(1) << kMaxGapBits, "bad parameters");
        require(at <= 8 * uint64_t(data.size()) && before >= -1 && before < std::max<int64_t>(limit, 0), "bad place");
        nb::gil_scoped_release release;
        return golomb_positions(data.data(), data.size(), at, positions.size(), b, limit, before, positions.data());
    });
    m.def("gap_counts", [](Ints gaps, int m, IntsOut counts) {
        require(m >= 0 && m <= 2 && counts.size() == 256, "bad parameters");
        require_gaps(gaps);
        nb::gil_scoped_release release;
        gap_counts(gaps.data(), gaps.size(), m, counts.data());
    });
    m.def("gap_classes", [](Ints gaps, int m, BytesOut classes, BytesOut low) {
        require(m >= 0 && m <= 2, "m must be from 0 to 2");
        require_gaps(gaps);
        require(classes.size() == gaps.size() && low.size() >= 6 * gaps.size() + 8, "out is too small");
        nb::gil_scoped_release release;
        return gap_classes(gaps.data(), gaps.size(), m, classes.data(), low.data());
    });
    m.def("class_positions",
          [](Bytes classes, int m, Bytes data, uint64_t at, int64_t limit, int64_t before, IntsOut positions) {
        require(m >= 0 && m <= 2 && classes.size() == positions.size(), "bad parameters");
        require(limit >= 0 && limit <= int64_t(1) << kMaxGapBits, "bad limit");
        require(at <= 8 * uint64_t(data.size()) && before >= -1 && before < std::max<int64_t>(limit, 0), "bad place");
        uint8_t largest = 0;
        for (size_t i = 0; i < classes.size(); i++) largest = std::max(largest, classes.data()[i]);
        require((largest >> m) <= kMaxGapBits, "class out of range");
        nb::gil_scoped_release release;
        return class_positions(classes.data(), classes.size(), m, data.data(), data.size(), at, limit, before,
                               positions.data());
    });
}

}  // namespace gradwire
