// Count-sketches: the portable loops, and the estimates of many entries on threads.
#include "sketch_loops.h"
#include "threads.h"

namespace gradwire {

const SketchKernels portable_sketch = {sketch_estimates_any};

void sketch_estimates(const SketchTable& table, uint64_t first, size_t n, float* out, int threads) {
    const SketchKernels& in_use = GRADWIRE_IN_USE(sketch);
    const size_t bytes = 32 * size_t(table.rows);  // hashing an entry takes as long as copying so many
    in_aligned_blocks(n, bytes, threads, [&](size_t start, size_t end) {
        in_use.estimates(table, first + start, end - start, out + start);
    });
}

}  // namespace gradwire
