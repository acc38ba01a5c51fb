// Argument checks of the kernels of count-sketches.
#include "bindings.h"
#include "bindings_pool.h"
#include "sketch.h"
#include "sparse.h"

namespace gradwire {
namespace {

void require_shape(int rows, size_t columns) {
    require(rows >= 1 && rows <= kMostSketchRows && rows % 2 == 1, "rows must be 1, 3, 5 or 7");
    require(columns >= 1 && columns <= size_t(1) << 23, "columns must be from 1 to 2^23");
}

SketchTable table_of(Bytes cells, bool half, int rows, size_t columns, uint64_t seed) {
    require_shape(rows, columns);
    require(cells.size() == size_t(rows) * columns * (half ? 2 : 4), "cells have the wrong size");
    return {cells.data(), half, rows, uint32_t(columns), seed};
}

void cells(Floats u, int rows, size_t columns, uint64_t seed, Written<double> cells, int threads) {
    require_shape(rows, columns);
    require(cells.size() == size_t(rows) * columns, "cells have the wrong size");
    nb::gil_scoped_release release;
    sketch_cells(u.data(), u.size(), rows, uint32_t(columns), seed, cells.data(), threads);
}

// Positions and estimates of the largest.
nb::tuple largest(Bytes cells, bool half, int rows, size_t columns, uint64_t seed, size_t count, size_t wanted,
                  int threads) {
    constexpr size_t kTogether = 1 << 17;  // estimates, if they are worth threads
    const SketchTable table = table_of(cells, half, rows, columns, seed);
    require(wanted >= 1, "nothing is wanted");
    Candidates found;
    {
        nb::gil_scoped_release release;
        const auto make = [&](size_t first, size_t n, float* out) { sketch_estimates(table, first, n, out, threads); };
        select_made(count, wanted, threads > 1 ? kTogether : kScanBlock, make, found);
    }
    return nb::make_tuple(array_of(found.position.data(), found.count), array_of(found.value.data(), found.count));
}

}  // namespace

void bind_sketch(nb::module_& m) {
    m.def("sketch_cells", cells);
    m.def("sketch_largest", largest);
    m.def("sketch_estimates", [](Bytes cells, bool half, int rows, size_t columns, uint64_t seed, uint64_t first,
                                 FloatsOut out, int threads) {
        const SketchTable table = table_of(cells, half, rows, columns, seed);
        nb::gil_scoped_release release;
        sketch_estimates(table, first, out.size(), out.data(), threads);
    });
}

}  // namespace gradwire
