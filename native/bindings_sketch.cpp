// Argument checks of the kernels of count-sketches.
#include "bindings.h"
#include "sketch.h"

namespace gradwire {

void bind_sketch(nb::module_& m) {
    m.def("sketch_estimates", [](Bytes cells, bool half, int rows, size_t columns, uint64_t seed, uint64_t first,
                                 FloatsOut out, int threads) {
        require(rows >= 1 && rows <= kMostSketchRows && rows % 2 == 1, "rows must be 1, 3, 5 or 7");
        require(columns >= 1 && columns <= size_t(1) << 23, "columns must be from 1 to 2^23");
        require(cells.size() == size_t(rows) * columns * (half ? 2 : 4), "cells have the wrong size");
        nb::gil_scoped_release release;
        sketch_estimates({cells.data(), half, rows, uint32_t(columns), seed}, first, out.size(), out.data(), threads);
    });
}

}  // namespace gradwire
