// The kernels of quantizers with a few levels in each bucket: src/gradwire/kernels/reference/levels.py, bit for bit.
//
// Bucket b holds the entries from starts[b] to starts[b + 1]. Every instruction set compiles the same loops
// (levels_loops.h); levels_search.cpp chooses between them, and looks for the best levels with them.
#pragma once

#include "kernels.h"

namespace gradwire {

constexpr int kStats = 5;  // min, max, sum of magnitudes, sum, sum of squares
constexpr int kMaxLevels = 255, kMaxValues = 256;
constexpr int kParts = 8, kFew = 16;  // of kernels that select by rank

struct Buckets {
    const int64_t* starts;
    size_t count;
};

// What one interval of sorted entries costs (`cheapest`): all but `found` are indexed by entry.
struct Costs {
    const double *w, *sums, *squares, *least;
    double* found;
};

// A place where sorted entries are split: how many are on the left, and their sum.
struct SplitPlace {
    size_t count;
    double left;
};

constexpr size_t kSplitLeast = 64, kSplitMost = 512;  // entries of a bucket that is sorted in registers

struct LevelKernels {
    void (*stats)(const Stream& s, float decay, Buckets b, double* out);
    void (*assign)(const Stream& s, float decay, Buckets b, const float* values, int levels, bool stochastic,
                   uint64_t seed, uint8_t* symbols, int64_t* counts);
    void (*spread)(const uint8_t* symbols, Buckets b, const float* values, int levels, float* out, bool accumulate);
    // u = g + decay * memory of entries start .. start + n, magnitudes cut off at `limit`.
    void (*load)(const Stream& s, float decay, size_t start, size_t n, float limit, float* u);
    void (*extremes)(const float* u, size_t n, float& low, float& high);
    // The sum of low <= u < high as `stats` adds them up, and how many they are. They are copied to `out`, which has room
    // for n + kFew entries, unless it is null.
    double (*take_between)(const float* u, size_t n, float low, float high, float* out, size_t& count);
    // How many entries each of kParts parts has: (u - first) * scale, cut off to an integer from 0 on, is a part's
    // number. An instruction set may round as it likes, so long as parts ascend with u and both kernels have the same.
    void (*count_parts)(const float* u, size_t n, float first, float scale, uint32_t* counts);
    size_t (*take_part)(const float* u, size_t n, float first, float scale, int part, float* out);  // `out` may be u
    float (*of_few)(const float* u, size_t n, size_t rank);  // the entry of this rank, of up to kFew
    // The least bit pattern of a magnitude that is not zero, and the largest; returns about the sum of magnitudes.
    float (*magnitudes)(const float* u, size_t n, uint32_t& least, uint32_t& most);
    // (u - first) * scale + 1, cut off to an integer from 0 to `last`.
    void (*bin_numbers)(const float* u, size_t n, float first, float scale, int last, uint8_t* bins);
    // BinGrad-b's splits of a bucket of kSplitLeast to kSplitMost entries: all that might gain most, and the sum of its
    // entries. Sums are made in any order if they are `exact`. `inverses` has 1 / c for each split, in the order of
    // `split_at`, and then 1 / (n - c). Null, if an instruction set has not got this.
    size_t (*splits)(const float* u, size_t n, bool exact, const double* inverses, double& total, SplitPlace* found);
    // The first i from `first` to `end` with the smallest least[i] + cost(i, j), and that sum.
    size_t (*cheapest)(const Costs& c, size_t j, size_t first, size_t end, double& value);
};

// The place of the split after c entries among those of `splits`.
inline size_t split_at(size_t c) { return (c - 1) % 32 * 16 + (c - 1) / 32; }

extern const LevelKernels portable_levels;
#ifdef GRADWIRE_X86
extern const LevelKernels avx2_levels, avx512_levels;
size_t splits_avx512(const float* u, size_t n, bool exact, const double* inverses, double& total, SplitPlace* found);
#endif
#ifdef GRADWIRE_NEON
extern const LevelKernels neon_levels;
#endif

const LevelKernels& level_kernels();  // of the instruction set in use

enum class Search { greedy, polished, exact, two, pair };

// `limits` (one per bucket) may be null; `out` has `levels` numbers for each bucket, one for Search::pair.
void search_levels(const Stream& s, float decay, Buckets b, const float* limits, int levels, Search method, float* out);

}  // namespace gradwire
