// Statistics of buckets, entries to levels and back; compiled once per instruction set and vectorised there.
//
// Traps:
// - Simple loops over blocks that stay in the first-level cache, one for each step: that is what compilers vectorise.
// - Up to kChain levels an entry is compared with all of them and its level selected on the way: no table lookups.
// - The sums of `stats` are sixteen, entry i of the bucket in sum i mod 16, as the reference has them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "levels.h"
#include "quantize.h"

namespace gradwire {
namespace {

constexpr int kBlock = 512, kLanes = 16, kChain = 17;

inline void load_block(const Stream& s, float decay, size_t start, int n, float* u) {
    if (s.memory)
        for (int i = 0; i < n; i++) u[i] = compensated(s.gradient[start + i], s.memory[start + i], decay);
    else
        std::memcpy(u, s.gradient + start, size_t(n) * sizeof(float));
}

struct Sums {
    float low[kLanes], high[kLanes];
    double magnitude[kLanes], total[kLanes], square[kLanes];

    Sums() : magnitude{}, total{}, square{} {
        std::fill_n(low, kLanes, std::numeric_limits<float>::infinity());
        std::fill_n(high, kLanes, -std::numeric_limits<float>::infinity());
    }
    GRADWIRE_INLINE void add(const float* u, int l) {
        const float v = u[l];
        const double x = v;
        low[l] = v < low[l] ? v : low[l];
        high[l] = v > high[l] ? v : high[l];
        magnitude[l] += std::fabs(x);
        total[l] += x;
        square[l] += x * x;
    }
};

inline void stats_loop(const Stream& s, float decay, Buckets b, double* out) {
    float u[kBlock];
    for (size_t k = 0; k < b.count; k++, out += kStats) {
        Sums sums;
        for (size_t start = size_t(b.starts[k]), end = size_t(b.starts[k + 1]); start < end; start += kBlock) {
            const int n = int(std::min<size_t>(kBlock, end - start));
            load_block(s, decay, start, n, u);
            Sums part = sums;  // a copy that no other pointer reaches stays in registers
            int i = 0;
            for (; i + kLanes <= n; i += kLanes)
                for (int l = 0; l < kLanes; l++) part.add(u + i, l);
            for (int l = 0; i + l < n; l++) part.add(u + i, l);
            sums = part;
        }
        out[0] = *std::min_element(sums.low, sums.low + kLanes);
        out[1] = *std::max_element(sums.high, sums.high + kLanes);
        out[2] = out[3] = out[4] = 0;
        for (int l = 0; l < kLanes; l++) out[2] += sums.magnitude[l];
        for (int l = 0; l < kLanes; l++) out[3] += sums.total[l];
        for (int l = 0; l < kLanes; l++) out[4] += sums.square[l];
    }
}

// A block of entries on its way to symbols.
struct Block {
    int n;
    float u[kBlock], low[kBlock], high[kBlock], random[kBlock], value[kBlock];
    int32_t lower[kBlock];
};

inline void draw(Block& k, uint64_t first, uint64_t seed) {
    if (first >> 32 == (first + kBlock) >> 32) {
        const uint32_t key1 = mix(uint32_t(seed) ^ 0x9e3779b9u ^ mix(uint32_t(first >> 32)));
        const uint32_t key2 = mix(key1 ^ uint32_t(seed >> 32));
        const uint32_t base = uint32_t(first);
        for (int i = 0; i < k.n; i++)
            k.random[i] = float(int32_t(mix(mix((base + uint32_t(i)) ^ key1) + key2) >> 8)) * (1.0f / 16777216.0f);
    } else {
        for (int i = 0; i < k.n; i++) k.random[i] = float(random24(first + uint64_t(i), seed)) * (1.0f / 16777216.0f);
    }
}

// How many of thresholds[0 .. m) are not above u; they ascend, m < 256.
inline void count_below(Block& k, const float* thresholds, int m) {
    float padded[256];
    std::fill_n(padded, 256, std::numeric_limits<float>::infinity());
    std::copy_n(thresholds, m, padded + 1);
    std::fill_n(k.lower, k.n, 0);
    int step = 1;
    while (2 * step <= m) step *= 2;
    for (; step; step /= 2)
        for (int i = 0; i < k.n; i++) k.lower[i] += k.u[i] >= padded[k.lower[i] + step] ? step : 0;
}

template <int Levels>
GRADWIRE_INLINE void stochastic_chain(Block& k, const float* v, int levels, uint8_t* symbols) {
    const int s = Levels ? Levels : levels;
    for (int i = 0; i < k.n; i++) {
        const float u = k.u[i];
        float low = v[0], high = v[1];
        int32_t lower = 0;
        for (int j = 1; j < s - 1; j++) {
            const bool above = u >= v[j];
            lower += above;
            low = above ? v[j] : low;
            high = above ? v[j + 1] : high;
        }
        const bool up = k.random[i] * (high - low) < u - low;
        k.value[i] = up ? high : low;
        k.lower[i] = lower + up;
    }
    for (int i = 0; i < k.n; i++) symbols[i] = uint8_t(k.lower[i]);
}

inline void stochastic_search(Block& k, const float* v, int levels, uint8_t* symbols) {
    count_below(k, v + 1, levels - 2);
    for (int i = 0; i < k.n; i++) {
        const int32_t lower = k.lower[i];
        const float low = v[lower], high = v[lower + 1];
        const bool up = k.random[i] * (high - low) < k.u[i] - low;
        k.value[i] = up ? high : low;
        k.lower[i] = lower + up;
    }
    for (int i = 0; i < k.n; i++) symbols[i] = uint8_t(k.lower[i]);
}

inline void to_nearest(Block& k, const float* v, const float* middles, int levels, uint8_t* symbols) {
    count_below(k, middles, levels - 1);
    for (int i = 0; i < k.n; i++) k.value[i] = v[k.lower[i]];
    for (int i = 0; i < k.n; i++) symbols[i] = uint8_t(k.lower[i]);
}

inline void to_nearest_of_two(Block& k, const float* v, float middle, uint8_t* symbols) {
    const float low = v[0], high = v[1];
    for (int i = 0; i < k.n; i++) k.value[i] = k.u[i] >= middle ? high : low;
    for (int i = 0; i < k.n; i++) symbols[i] = k.u[i] >= middle;
}

inline void count_symbols(const uint8_t* symbols, int n, int levels, int64_t* counts) {
    if (levels > kChain) {
        for (int i = 0; i < n; i++) counts[symbols[i]]++;
        return;
    }
    int64_t rest = n;
    for (int j = 1; j < levels; j++) {
        uint16_t found = 0;  // n is at most 512
        for (int i = 0; i < n; i++) found = uint16_t(found + (symbols[i] == j));
        counts[j] += found;
        rest -= found;
    }
    counts[0] += rest;
}

inline void assign_loop(const Stream& s, float decay, Buckets b, const float* values, int levels, bool stochastic,
                        uint64_t seed, uint8_t* symbols, int64_t* counts) {
    Block k;
    float v[kMaxLevels], middles[kMaxLevels];
    for (size_t bucket = 0; bucket < b.count; bucket++, values += levels) {
        std::copy_n(values, levels, v);  // copies: stores to `symbols` could otherwise change them
        for (int j = 0; j + 1 < levels; j++) middles[j] = float((double(v[j]) + double(v[j + 1])) / 2);
        const size_t end = size_t(b.starts[bucket + 1]);
        for (size_t start = size_t(b.starts[bucket]); start < end; start += kBlock) {
            k.n = int(std::min<size_t>(kBlock, end - start));
            load_block(s, decay, start, k.n, k.u);
            uint8_t* to = symbols + start;
            if (stochastic) {
                draw(k, s.first + start, seed);
                switch (levels) {
                    case 2: stochastic_chain<2>(k, v, levels, to); break;
                    case 3: stochastic_chain<3>(k, v, levels, to); break;
                    case 5: stochastic_chain<5>(k, v, levels, to); break;
                    case 9: stochastic_chain<9>(k, v, levels, to); break;
                    default: stochastic_search(k, v, levels, to);
                }
            } else if (levels == 2) {
                to_nearest_of_two(k, v, middles[0], to);
            } else {
                to_nearest(k, v, middles, levels, to);
            }
            count_symbols(to, k.n, levels, counts);
            if (float* out = s.memory_out)
                for (int i = 0; i < k.n; i++) out[start + i] = k.u[i] - k.value[i];
        }
    }
}

inline void spread_loop(const uint8_t* symbols, Buckets b, const float* values, int levels, float* out,
                        bool accumulate) {
    for (size_t bucket = 0; bucket < b.count; bucket++, values += levels) {
        float v[256] = {};  // any symbol finds a number
        std::copy_n(values, levels, v);
        const size_t start = size_t(b.starts[bucket]), end = size_t(b.starts[bucket + 1]);
        if (accumulate)
            for (size_t i = start; i < end; i++) out[i] += v[symbols[i]];
        else
            for (size_t i = start; i < end; i++) out[i] = v[symbols[i]];
    }
}

}  // namespace
}  // namespace gradwire
