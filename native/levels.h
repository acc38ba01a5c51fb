// The kernels of quantizers with a few levels in each bucket: src/gradwire/kernels/reference/levels.py, bit for bit.
//
// Bucket b holds the entries from starts[b] to starts[b + 1]. Every instruction set compiles the same loops
// (levels_loops.h, levels_search.h); levels_portable.cpp chooses between them.
#pragma once

#include "kernels.h"

namespace gradwire {

constexpr int kStats = 5;  // min, max, sum of magnitudes, sum, sum of squares
constexpr int kMaxLevels = 255;

enum class Search { greedy, exact, two, pair };

struct Buckets {
    const int64_t* starts;
    size_t count;
};

struct LevelKernels {
    const char* name;
    void (*stats)(const Stream& s, float decay, Buckets b, double* out);
    // `limits` (one per bucket) may be null; `out` has `levels` numbers for each bucket, one for Search::pair.
    void (*search)(const Stream& s, float decay, Buckets b, const float* limits, int levels, Search method, float* out);
    void (*assign)(const Stream& s, float decay, Buckets b, const float* values, int levels, bool stochastic,
                   uint64_t seed, uint8_t* symbols, int64_t* counts);
    void (*spread)(const uint8_t* symbols, Buckets b, const float* values, int levels, float* out, bool accumulate);
};

extern const LevelKernels portable_levels;
#ifdef GRADWIRE_X86
extern const LevelKernels avx2_levels, avx512_levels;
#endif

const LevelKernels& level_kernels();  // of the instruction set in use

}  // namespace gradwire
