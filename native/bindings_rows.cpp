// Argument checks of the kernels of rows.
#include <nanobind/stl/tuple.h>

#include "bindings.h"
#include "rows.h"

namespace gradwire {
namespace {

// A matrix in rows without gaps: its address, rows, columns, and whether it is bf16 rather than fp32. Small layers call
// these kernels so often that the way of a tensor through numpy and nanobind would take longer than the work.
using Matrix = std::tuple<uintptr_t, size_t, size_t, bool>;
// As in kernels/reference/rows.py; the mean is one row.
using GivenSide = std::tuple<Matrix, std::optional<Matrix>, double, double, double, std::optional<Matrix>>;
using Addresses = std::tuple<uintptr_t, uintptr_t>;

void* data_of(const Matrix& matrix) {
    const auto& [address, rows, columns, half] = matrix;
    require(address || !rows || !columns, "a matrix without data");
    return reinterpret_cast<void*>(address);
}

Side make_side(const GivenSide& given, size_t count) {
    const auto& [rows, memory, scale, gain, most, mean] = given;
    const auto& [address, own_count, columns, half] = rows;
    require(own_count == count, "the sides have different numbers of rows");
    if (memory) require(std::get<1>(*memory) == count && std::get<2>(*memory) == columns, "memory has another shape");
    if (mean) {
        require(std::get<1>(*mean) == 1 && std::get<2>(*mean) == columns, "mean has another shape");
        require(std::get<3>(*mean) == half, "mean has another type than the rows");
    }
    const MemoryKind kind = !memory ? kNoMemory : std::get<3>(*memory) ? kHalfMemory : kFloatMemory;
    return {data_of(rows),
            memory ? data_of(*memory) : nullptr,
            mean ? data_of(*mean) : nullptr,
            half,
            mean.has_value(),
            kind,
            columns,
            float(scale),
            float(gain),
            most};
}

size_t rows_of(const GivenSide& inputs, const GivenSide& outputs) {
    require(std::get<1>(inputs).has_value() == std::get<1>(outputs).has_value(), "memory is of both sides or of none");
    return std::get<1>(std::get<0>(inputs));
}

// `scores` is the address of as many doubles as there are rows.
void join(const GivenSide& inputs, const GivenSide& outputs, double keep, int threads, uintptr_t scores) {
    const size_t count = rows_of(inputs, outputs);
    const Side sides[2] = {make_side(inputs, count), make_side(outputs, count)};
    require(scores || !count, "no place for the scores");
    nb::gil_scoped_release release;
    join_rows(sides, count, float(keep), reinterpret_cast<double*>(scores), threads);
}

// `chosen` is the address of n int64; `taken` are those of n rows of either side, in the types of its rows.
void take(const GivenSide& inputs, const GivenSide& outputs, uintptr_t chosen, size_t n, int threads, Addresses taken) {
    const size_t count = rows_of(inputs, outputs);
    const Side sides[2] = {make_side(inputs, count), make_side(outputs, count)};
    const int64_t* c = reinterpret_cast<const int64_t*>(chosen);
    require(chosen || !n, "no chosen rows");
    require(std::get<0>(taken) || !n || !sides[0].columns, "no place for the inputs");
    require(std::get<1>(taken) || !n || !sides[1].columns, "no place for the outputs");
    bool good = !n || (c[0] >= 0 && uint64_t(c[n - 1]) < count);
    for (size_t i = 1; i < n; i++) good &= c[i] > c[i - 1];
    require(good, "chosen rows must be ascending, and inside");
    void* const to[2] = {reinterpret_cast<void*>(std::get<0>(taken)), reinterpret_cast<void*>(std::get<1>(taken))};
    nb::gil_scoped_release release;
    take_rows(sides, c, n, to, threads);
}

// `keys` is the address of n doubles, `places` that of `count` int64.
void find_largest(uintptr_t keys, size_t n, size_t count, uintptr_t places) {
    require(count <= n, "more wanted than there are");
    require(!count || (keys && places), "no keys, or no room for their places");
    nb::gil_scoped_release release;
    largest(reinterpret_cast<const double*>(keys), n, count, reinterpret_cast<int64_t*>(places));
}

}  // namespace

void bind_rows(nb::module_& m) {
    m.def("join_rows", join, nb::arg("inputs"), nb::arg("outputs"), nb::arg("keep"), nb::arg("threads"),
          nb::arg("scores"));
    m.def("take_rows", take, nb::arg("inputs"), nb::arg("outputs"), nb::arg("chosen"), nb::arg("n"), nb::arg("threads"),
          nb::arg("taken"));
    m.def("largest", find_largest, nb::arg("keys"), nb::arg("n"), nb::arg("count"), nb::arg("places"));
}

}  // namespace gradwire
