// The kernels of levels with NEON: up to 16 levels, to the nearest one and back, by hand; the rest as the compiler
// vectorises it.
//
// What pays is that levels are looked up in registers, 16 entries at a time, where the plain loop loads them one by one.
// Stochastic rounding selects its levels on the way through the thresholds, which the compiler vectorises as it is.
#include "levels_loops.h"

#ifdef GRADWIRE_NEON
#include "neon_tables.h"

namespace gradwire {
namespace {

// A group of entries to symbols, and their levels from u. As in count_below, a symbol is the number of thresholds that
// are not above u: 0 of a NaN.
GRADWIRE_INLINE U8 nearest(const F32* middles, int thresholds, const F32* u) {
    U32 above[4] = {};
    for (int j = 0; j < thresholds; j++)
        for (int v = 0; v < 4; v++) above[v] = vsubq_u32(above[v], vcgeq_f32(u[v], middles[j]));
    return low_bytes(above);
}

// How often each symbol comes among those of a block, in whole groups: what stands behind the last is no symbol.
void count_groups(const uint8_t* symbols, size_t n, int levels, int64_t* counts) {
    static_assert(kBlock / kGroup < 256, "a sum of this many is a byte");
    int64_t rest = int64_t(n);
    for (int j = 1; j < levels; j++) {
        U8 sums = vdupq_n_u8(0);
        for (size_t i = 0; i < n; i += kGroup)
            sums = vsubq_u8(sums, vceqq_u8(vld1q_u8(symbols + i), vdupq_n_u8(uint8_t(j))));
        const int64_t found = vaddlvq_u8(sums);
        counts[j] += found;
        rest -= found;
    }
    counts[0] += rest;
}

void assign_bucket(const Stream& s, float decay, size_t first, size_t last, const float* values, int levels,
                   uint8_t* symbols, int64_t* counts) {
    const Floats table([&](int j) { return j < levels ? values[j] : 0.0f; });
    F32 middles[kEntries];
    for (int j = 0; j + 1 < levels; j++)
        middles[j] = vdupq_n_f32(float((double(values[j]) + double(values[j + 1])) / 2));
    for (size_t start = first; start < last; start += kBlock) {
        const size_t n = at_most(kBlock, last - start);
        float block[kBlock];  // the last group may reach beyond its entries, but not beyond this
        uint8_t found[kBlock];
        load_block(s, decay, start, n, block);
        for (size_t i = n; i % kGroup; i++) block[i] = 0;
        for (size_t i = 0; i < n; i += kGroup) {
            F32 u[4], value[4];
            for (int v = 0; v < 4; v++) u[v] = vld1q_f32(block + i + 4 * v);
            const U8 symbol = nearest(middles, levels - 1, u);
            vst1q_u8(found + i, symbol);
            if (!s.memory_out) continue;
            table.look_up(symbol, value);
            for (int v = 0; v < 4; v++) vst1q_f32(block + i + 4 * v, vsubq_f32(u[v], value[v]));
        }
        std::memcpy(symbols + start, found, n);
        if (s.memory_out) std::memcpy(s.memory_out + start, block, n * sizeof(float));
        for (size_t i = n; i % kGroup; i++) found[i] = 255;
        count_groups(found, n, levels, counts);
    }
}

void assign(const Stream& s, float decay, Buckets b, const float* values, int levels, bool stochastic, uint64_t seed,
            uint8_t* symbols, int64_t* counts) {
    if (stochastic || levels > kEntries)
        return assign_loop(s, decay, b, values, levels, stochastic, seed, symbols, counts);
    for (size_t k = 0; k < b.count; k++, values += levels)
        assign_bucket(s, decay, size_t(b.starts[k]), size_t(b.starts[k + 1]), values, levels, symbols, counts);
}

void spread(const uint8_t* symbols, Buckets b, const float* values, int levels, float* out, bool accumulate) {
    if (levels > kEntries) return spread_loop(symbols, b, values, levels, out, accumulate);
    for (size_t k = 0; k < b.count; k++, values += levels) {
        const Floats table([&](int j) { return j < levels ? values[j] : 0.0f; });  // any other symbol finds a zero
        const size_t last = size_t(b.starts[k + 1]);
        size_t i = size_t(b.starts[k]);
        for (; i + kGroup <= last; i += kGroup) {
            F32 value[4];
            table.look_up(vld1q_u8(symbols + i), value);
            for (int v = 0; v < 4; v++) {
                float* to = out + i + 4 * v;
                vst1q_f32(to, accumulate ? vaddq_f32(vld1q_f32(to), value[v]) : value[v]);
            }
        }
        for (; i < last; i++) {
            const float value = symbols[i] < levels ? values[symbols[i]] : 0.0f;
            out[i] = accumulate ? out[i] + value : value;
        }
    }
}

}  // namespace

const LevelKernels neon_levels = GRADWIRE_LEVEL_KERNELS(assign, spread, take_between_loop<AppendOneByOne>,
                                                        count_parts_loop, take_part_loop<AppendOneByOne>, nullptr);

}  // namespace gradwire
#endif
