// Rows of a batch and what is remembered of them (kernels/reference/rows.py): joined, scored, and some taken out again.
//
// Traps:
// - row − mean is rounded to fp32, so are keep·memory and scale times it, then their sum; a chosen row of the memory
//   times gain is rounded on its own: no fused multiply-add, and no factor drawn together with another.
// - Sums of squares are fp64: an fp32 number has a square that fp32 may not have. They are made in sixteen partial sums
//   (column i in the one of i mod 16), which are added pairwise, so that norms have the same bits on every machine.
// - Norms are those of joined rows before a memory of bf16 rounds them.
// - Rows are never divided between threads, for the same bits on any number of them, and since both sides of a row must
//   be known before either is written.
// - Of a NaN only that it is one is promised, not its bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace gradwire {

enum MemoryKind { kNoMemory, kFloatMemory, kHalfMemory };

struct Side {
    const void* rows;
    void* memory;
    const void* mean;  // of the type of the rows
    bool half_rows;  // bf16 rather than fp32
    bool centred;  // there is a mean
    MemoryKind remembers;
    size_t columns;
    float scale, gain;
    double most;
};

// One row of one side: `row` and `memory` are where it starts.
struct RowLoops {
    double (*norm)(const void* row, const void* mean, const void* memory, size_t columns, float keep, float scale);
    void (*join)(const void* row, const void* mean, void* memory, size_t columns, float keep, float scale);
    bool (*is_zero)(const void* row, const void* mean, size_t columns);  // less the mean
    // From the memory, where zero takes its place, or else the row less the mean.
    void (*take)(const void* row, const void* mean, void* memory, size_t columns, float gain, void* taken);
};

struct RowKernels {
    RowLoops of[2][3][2];  // by half_rows, MemoryKind and centred
};

extern const RowKernels portable_rows;
#ifdef GRADWIRE_X86
extern const RowKernels avx2_rows, avx512_rows;
#endif
#ifdef GRADWIRE_NEON  // whose vectors are those of the portable loops
inline constexpr const RowKernels& neon_rows = portable_rows;
#endif

void join_rows(const Side (&sides)[2], size_t count, float keep, double* scores, int threads);
void take_rows(const Side (&sides)[2], const int64_t* chosen, size_t n, void* const (&taken)[2], int threads);

// Where the `count` largest of n keys are, ascending. A NaN is above all; of equal ones the first are taken.
void largest(const double* keys, size_t n, size_t count, int64_t* places);

}  // namespace gradwire
