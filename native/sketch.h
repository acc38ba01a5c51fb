// Cells of a count-sketch, and estimates from them (docs/wire-format.md, codec 6).
#pragma once

#include "kernels.h"

namespace gradwire {

constexpr int kMostSketchRows = 7;

// The cells as they stand in a frame: at any address, fp32 or fp16, row by row.
struct SketchTable {
    const uint8_t* cells;
    bool half;
    int rows;  // 1, 3, 5 or 7
    uint32_t columns;  // up to 2^23
    uint64_t seed;
};

struct SketchKernels {
    // Adds the entries first … first + n - 1, each with its sign, to the cells of a row with this seed.
    void (*add)(const float* u, uint64_t first, size_t n, uint64_t seed, uint32_t columns, double* cells);
    // Writes the estimates of these entries.
    void (*estimates)(const SketchTable& table, uint64_t first, size_t n, float* out);
};

extern const SketchKernels portable_sketch;
#ifdef GRADWIRE_X86
extern const SketchKernels avx2_sketch, avx512_sketch;
#endif
#ifdef GRADWIRE_NEON  // which has no gather, and is what the compiler vectorises the plain loops for
inline constexpr const SketchKernels& neon_sketch = portable_sketch;
#endif

// The sums of each part of so many entries are made by themselves and then added up.
constexpr size_t kSketchPart = 1 << 20;

void sketch_cells(const float* u, size_t n, int rows, uint32_t columns, uint64_t seed, double* cells, int threads);
void sketch_estimates(const SketchTable& table, uint64_t first, size_t n, float* out, int threads);

}  // namespace gradwire
