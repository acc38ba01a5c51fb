// The loops of count-sketches, compiled once per instruction set and vectorised there.
//
// Traps:
// - Cells may lie at odd addresses: they are copied to a number by memcpy, which costs nothing on these machines.
// - The high word of an entry's index is part of its hash. A block never crosses a multiple of 2^32, so that the keys
//   are the same for all of its entries.
#pragma once

#include <algorithm>

#include "quantize.h"
#include "sketch.h"

namespace gradwire {
namespace {  // one copy per instruction set

constexpr size_t kSketchBlock = 512;

// A finite fp16 number as fp32: its bits in the places that fp32 has for them, times 2^112, also if it is subnormal.
inline float from_half(uint16_t half) {
    const float magnitude = as_float(uint32_t(half & 0x7fff) << 13) * as_float((112u + 127u) << 23);
    return as_float(as_bits(magnitude) | uint32_t(half & 0x8000) << 16);
}

template <bool Half>
inline float cell(const uint8_t* cells, size_t i) {
    if (Half) {
        uint16_t half;
        std::memcpy(&half, cells + 2 * i, 2);
        return from_half(half);
    }
    float x;
    std::memcpy(&x, cells + 4 * i, 4);
    return x;
}

// The hashes of up to kSketchBlock entries in one row.
struct Hashes {
    uint32_t column[kSketchBlock], sign[kSketchBlock];  // the sign as the highest bit

    void make(uint64_t first, size_t n, uint64_t seed, uint32_t columns) {
        const uint32_t key1 = mix(uint32_t(seed) ^ 0x9e3779b9u ^ mix(uint32_t(first >> 32)));
        const uint32_t key2 = mix(key1 ^ uint32_t(seed >> 32)), low = uint32_t(first);
        for (size_t i = 0; i < n; i++) sign[i] = mix(mix((low + uint32_t(i)) ^ key1) + key2) >> 8;
        for (size_t i = 0; i < n; i++) column[i] = uint32_t((uint64_t(sign[i] >> 1) * columns) >> 23);
        for (size_t i = 0; i < n; i++) sign[i] <<= 31;
    }
};

// How many of n entries from `first` on can be hashed at once.
inline size_t hashed_at_once(uint64_t first, size_t n) {
    return size_t(std::min<uint64_t>({n, kSketchBlock, (uint64_t(1) << 32) - uint32_t(first)}));
}

[[maybe_unused]] void sketch_add_any(const float* u, uint64_t first, size_t n, uint64_t seed, uint32_t columns,
                                     double* cells) {
    Hashes hashes;
    float signed_[kSketchBlock];
    for (size_t m; n; first += m, u += m, n -= m) {
        m = hashed_at_once(first, n);
        hashes.make(first, m, seed, columns);
        for (size_t i = 0; i < m; i++) signed_[i] = as_float(as_bits(u[i]) ^ hashes.sign[i]);
        for (size_t i = 0; i < m; i++) cells[hashes.column[i]] += double(signed_[i]);
    }
}

template <bool Half>
inline void row_estimates(const SketchTable& table, int row, uint64_t first, size_t n, float* out) {
    const uint8_t* cells = table.cells + size_t(row) * table.columns * (Half ? 2 : 4);
    Hashes hashes;
    hashes.make(first, n, table.seed + uint64_t(row), table.columns);
    for (size_t i = 0; i < n; i++) out[i] = as_float(as_bits(cell<Half>(cells, hashes.column[i])) ^ hashes.sign[i]);
}

// Sorts the rows entry by entry, neighbours against neighbours, and copies the one in the middle.
inline void median_of_rows(float (*rows)[kSketchBlock], int count, size_t n, float* out) {
    for (int pass = 0; pass < count; pass++)
        for (int a = pass & 1; a + 1 < count; a += 2) {
            float *x = rows[a], *y = rows[a + 1];
            for (size_t i = 0; i < n; i++) {
                const float low = x[i] < y[i] ? x[i] : y[i], high = x[i] < y[i] ? y[i] : x[i];
                x[i] = low;
                y[i] = high;
            }
        }
    std::memcpy(out, rows[count / 2], n * sizeof(float));
}

[[maybe_unused]] void sketch_estimates_any(const SketchTable& table, uint64_t first, size_t n, float* out) {
    float rows[kMostSketchRows][kSketchBlock];
    while (n) {
        const size_t m = hashed_at_once(first, n);
        for (int row = 0; row < table.rows; row++)
            table.half ? row_estimates<true>(table, row, first, m, rows[row])
                       : row_estimates<false>(table, row, first, m, rows[row]);
        median_of_rows(rows, table.rows, m, out);
        first += m;
        out += m;
        n -= m;
    }
}

}  // namespace
}  // namespace gradwire
