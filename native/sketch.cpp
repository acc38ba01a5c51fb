// Count-sketches: the portable loops, and all rows and many entries on threads.
#include "sketch_loops.h"
#include "threads.h"

namespace gradwire {

const SketchKernels portable_sketch = {sketch_add_any, sketch_estimates_any};

void sketch_cells(const float* u, size_t n, int rows, uint32_t columns, uint64_t seed, double* cells, int threads) {
    const SketchKernels& in_use = GRADWIRE_IN_USE(sketch);
    const auto one_row = [&](int row, double* part) {
        double* const sums = cells + size_t(row) * columns;
        std::fill_n(sums, columns, 0.0);
        for (size_t first = 0; first < n; first += kSketchPart) {
            const size_t many = std::min(kSketchPart, n - first);
            double* const to = first ? part : sums;
            if (first) std::fill_n(part, columns, 0.0);
            in_use.add(u + first, first, many, seed + uint64_t(row), columns, to);
            if (first)
                for (size_t i = 0; i < columns; i++) sums[i] += part[i];
        }
    };
    const size_t useful = std::min(threads_for(32 * size_t(rows) * n, threads), size_t(rows));
    std::vector<double> parts(n > kSketchPart ? useful * columns : 0);
    std::atomic<int> next{0};
    std::atomic<size_t> worker{0};
    on_threads(useful, [&] {
        double* const part = parts.data() + (parts.empty() ? 0 : worker++ * columns);
        for (int row; (row = next++) < rows;) one_row(row, part);
    });
}

void sketch_estimates(const SketchTable& table, uint64_t first, size_t n, float* out, int threads) {
    const SketchKernels& in_use = GRADWIRE_IN_USE(sketch);
    const size_t bytes = 32 * size_t(table.rows);  // hashing an entry takes as long as copying so many
    in_aligned_blocks(n, bytes, threads, [&](size_t start, size_t end) {
        in_use.estimates(table, first + start, end - start, out + start);
    });
}

}  // namespace gradwire
