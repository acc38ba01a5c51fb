// What a grid costs: bits of the symbols, of their table and of the outliers, by the counts of its cells.
#pragma once
#include "grid.h"
#include "warp_sums.h"

// As in convert/grid_fit.py: bits of side information that do not depend on the symbols, the least share of the symbols
// of all bits, and by how much more symbols have to be better.
const float kFixed = 72, kLeastShare = 0.75f, kNearly = 1.01f;
const float kLarge = 1 << 20, kTolerance = 1.006f;  // as in compress/precision.py
const float kTooMuch = 1e38f;

struct Measured {
    float bits;    // of symbols and outliers, for all entries of the frame
    float table;   // bits of the table of frequencies
    float cost;    // the bits, and what outliers cost in time
    float number;  // of outliers
};

// Bits of the symbols with a table of so many bits of precision, by a warp. In fp32, and whole numbers where they are:
// sums of fp64 over a warp take longer than all the rest.
__device__ __forceinline__ float coded_bits(const Cells* cells, float zeros, float total, int largest, int precision,
                                            float* table) {
    int lane = threadIdx.x & 31;
    float scale = float(1 << precision) / total, bits = 0;
    u32 sum = 0, code = 0;
    for (int k = lane; k <= 2 * largest; k += 32) {
        float count = k == 2 * largest ? zeros : float(k < largest ? cells[k] : cells[128 + k - largest]);
        float f = count > 0 ? fmaxf(rintf(count * scale), 1.0f) : 0.0f;
        if (count > 0) bits -= count * log2f(f);
        sum += u32(f);
        if (k < 2 * largest) code += 2 * bit_length(u32(f) + 1) - 1;
    }
    *table = float((warp_total(code) + 7) / 8 * 8);
    return warp_sum_float(bits) + total * log2f(float(warp_total(sum)));
}

// Bits that a coder on a GPU spends on its lanes, as write_head of coding.cu has it.
__device__ __forceinline__ float lanes_of(float bits, float count) {
    float lanes = fmaxf(bits, count) / 2048;
    if (lanes >= 64) return 16 * lanes;
    // As many as the power of two below: two thirds of them, in the mean.
    return 16 * fminf(fmaxf(lanes, fminf(count / 384, bits / 512)), 64.0f) * (2.0f / 3);
}

// Rate with symbols up to ±largest, by a warp.
__device__ __noinline__ Measured measure_size(const Cells* cells, float total, float count, int largest) {
    int lane = threadIdx.x & 31;
    u32 within = 0, beyond = 0, over = 0, ends = cells[127];
    for (int k = lane; k < kCells; k += 32) {
        u32 both = cells[k] + cells[128 + k];
        if (k < largest)
            within += both;
        else
            beyond += both, over += both * (k - largest);
    }
    within = warp_total(within);
    beyond = warp_total(beyond) + ends;
    float scale = count / total, excess = float(warp_total(over)) + float(ends) * float(kCells - largest + 32);
    float outside = float(beyond);
    Measured m;
    float zeros = total - float(within), all = total;  // outliers are sent as zeros
    if (zeros < 0) zeros = 0, all = float(within);
    m.number = outside * scale;
    float table;
    if (2 * largest + 1 <= 16) {
        float fine_table, coarse = coded_bits(cells, zeros, all, largest, 8, &table) * scale;
        float fine = coded_bits(cells, zeros, all, largest, 12, &fine_table) * scale;
        if (coarse + table > (fine + fine_table) * (count >= kLarge ? kTolerance : 1.0f))
            coarse = fine, table = fine_table;
        m.bits = coarse;
    } else {
        m.bits = coded_bits(cells, zeros, all, largest, 14, &table) * scale;
    }
    m.table = table + lanes_of(m.bits, count);
    if (beyond) {
        int b = bit_length(u32(excess / outside)) - 1;
        if (b < 0) b = 0;
        u32 codes = 0;
        for (int k = largest + lane; k < kCells; k += 32)
            codes += (cells[k] + cells[128 + k]) * u32(2 * bit_length((u32(k - largest) >> b) + 1) - 1 + b);
        float all_codes = float(warp_total(codes)) +
                          float(ends) * (2 * bit_length((u32(kCells - largest + 32) >> b) + 1) - 1 + b);
        m.bits += (outside * (log2f(total / outside) + 2.5f) + all_codes) * scale;
    }
    m.cost = m.bits + m.table + m.number;
    // There is room for a sixteenth; the sample may have had fewer than there are.
    if (outside > total / 17 + 16) m.cost = kTooMuch;
    return m;
}

// The best number of symbols, and what they take; `largest` is 0 if there are too many outliers for any. By a warp.
__device__ __noinline__ Measured measure(const Cells* cells, float total, float count, int* largest) {
    Measured all[5], best;
    float least = kTooMuch;
    bool enough = false;
#pragma unroll
    for (int k = 0; k < 5; k++) {
        all[k].cost = kTooMuch;
        if (enough) continue;
        all[k] = measure_size(cells, total, count, (8 << k) - 1);
        float bits = all[k].cost < kTooMuch ? all[k].bits + all[k].table : kTooMuch;
        least = bits < least ? bits : least;
        // More symbols have to save more than a hundredth.
        enough = all[k].cost < kTooMuch && all[k].number * 16 < bits * (kNearly - 1);
    }
    *largest = 0;
    best.cost = best.bits = kTooMuch;
    best.table = best.number = 0;
#pragma unroll
    for (int k = 4; k >= 0; k--)
        if (all[k].cost < kTooMuch && all[k].bits + all[k].table <= kNearly * least)
            best = all[k], *largest = (8 << k) - 1;
    if (*largest != 7) return best;
#pragma unroll 1
    for (int size = 6; size >= 3; size--) {
        Measured m = measure_size(cells, total, count, size);
        if (m.cost > best.cost) break;
        best = m, *largest = size;
    }
    return best;
}

// By how many bits an entry it is too much: about log₂ of the factor by which the step is too small.
__device__ __forceinline__ float excess_of(const Measured& m, float rate, float count) {
    if (!(m.cost < kTooMuch)) return kTooMuch;
    float budget = rate * count, wanted = budget - kFixed - m.table;
    if (wanted < kLeastShare * budget) wanted = kLeastShare * budget;
    return (m.bits - wanted) / count;
}
