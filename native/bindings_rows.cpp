// Argument checks of the kernels of rows.
#include "bindings.h"
#include "rows.h"

namespace gradwire {
namespace {

// fp32, or the bits of bf16 as uint16.
using Matrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using DoublesOut = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Array>
bool is_half(const Array& matrix) {
    require(matrix.dtype() == nb::dtype<float>() || matrix.dtype() == nb::dtype<uint16_t>(), "neither fp32 nor bf16");
    return matrix.dtype() == nb::dtype<uint16_t>();
}

Rows make_rows(const Matrix& rows, const std::optional<MatrixOut>& memory, double keep, double scale) {
    const size_t count = rows.shape(0), columns = rows.shape(1);
    require(!memory || (memory->shape(0) == count && memory->shape(1) == columns), "memory has another shape");
    return {rows.data(), memory ? memory->data() : nullptr, is_half(rows), memory && is_half(*memory), count, columns,
            float(keep), float(scale)};
}

void norms(Matrix rows, std::optional<MatrixOut> memory, double keep, double scale, int threads, DoublesOut out) {
    const Rows r = make_rows(rows, memory, keep, scale);
    require(out.size() == r.count, "as many norms as rows");
    nb::gil_scoped_release release;
    row_norms(r, out.data(), threads);
}

void take(Matrix rows, std::optional<MatrixOut> memory, double keep, double scale, double gain, Ints chosen,
          int threads, MatrixOut taken) {
    const Rows r = make_rows(rows, memory, keep, scale);
    const size_t n = chosen.size();
    const int64_t* c = chosen.data();
    require(taken.shape(0) == n && taken.shape(1) == r.columns, "taken has another shape");
    require(is_half(taken) == r.half_rows, "taken has another type");
    bool good = !n || (c[0] >= 0 && uint64_t(c[n - 1]) < r.count);
    for (size_t i = 1; i < n; i++) good &= c[i] > c[i - 1];
    require(good, "chosen rows must be ascending, and inside");
    nb::gil_scoped_release release;
    take_rows(r, float(gain), c, n, taken.data(), threads);
}

}  // namespace

void bind_rows(nb::module_& m) {
    m.def("row_norms", norms, nb::arg("rows"), nb::arg("memory").none(), nb::arg("keep"), nb::arg("scale"),
          nb::arg("threads"), nb::arg("out"));
    m.def("take_rows", take, nb::arg("rows"), nb::arg("memory").none(), nb::arg("keep"), nb::arg("scale"),
          nb::arg("gain"), nb::arg("chosen"), nb::arg("threads"), nb::arg("taken"));
}

}  // namespace gradwire
