// Rows of a batch with what is remembered of them (kernels/reference/rows.py): their norms, and the choice of some.
//
// Traps:
// - keep·memory and scale·row are rounded to fp32, then their sum, then that times gain: no fused multiply-add, and no
//   factor drawn together with another.
// - Sums of squares are fp64: an fp32 number has a square that fp32 may not have. They are made in sixteen partial sums
//   (column i in the one of i mod 16), which are added pairwise, so that norms have the same bits on every machine.
// - Rows are never divided between threads, for the same reason.
// - Of a NaN only that it is one is promised, not its bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

struct Rows {
    const void* rows;
    void* memory;  // null where nothing is remembered
    bool half_rows, half_memory;  // bf16 rather than fp32
    size_t count, columns;
    float keep, scale;
};

struct RowKernels {
    void (*norms)(const Rows& r, size_t first, size_t last, double* norms);
    // Rows `first` to `last`; those at `chosen`, which is ascending and has only such rows, go to `taken` times gain,
    // in the type of the rows. Without a memory the others are not looked at.
    void (*take)(const Rows& r, size_t first, size_t last, float gain, const int64_t* chosen, size_t n, void* taken);
};

extern const RowKernels portable_rows;
#ifdef GRADWIRE_X86
extern const RowKernels avx2_rows, avx512_rows;
#endif

void row_norms(const Rows& r, double* norms, int threads);
void take_rows(const Rows& r, float gain, const int64_t* chosen, size_t n, void* taken, int threads);

}  // namespace gradwire
