// Statistics of buckets, entries to levels and back; compiled once per instruction set and vectorised there.
//
// Traps:
// - Simple loops over blocks that stay in the first-level cache, one for each step: that is what compilers vectorise.
// - Up to kChain levels an entry is compared with all of them and its level selected on the way: no table lookups.
// - Sums are sixteen, entry i of the bucket in sum i mod 16, as the reference has them.
// - Sixteen sums in arrays tempt the compiler to keep sixteen scalars: where it does, they are vectors of the compiler's
//   own (vector_size), which every instruction set has, in as many registers as it takes.
// - Nothing of the standard library's templates here: they could be linked from the wrong instruction set.
#pragma once

#include "levels.h"
#include "quantize.h"

namespace gradwire {
namespace {

constexpr int kBlock = 512, kLanes = 16, kChain = 33;
constexpr float kInfinity = __builtin_inff();
constexpr float kNever = __builtin_nanf("");  // a threshold that nothing reaches, not even an infinity

#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors are only ever passed to functions that are inlined
typedef float FloatLanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef double DoubleLanes __attribute__((vector_size(8 * kLanes)));

GRADWIRE_INLINE FloatLanes lanes_at(const float* p) {
    FloatLanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline size_t at_most(size_t a, size_t b) { return a < b ? a : b; }

inline void load_block(const Stream& s, float decay, size_t start, size_t n, float* u) {
    if (s.memory)
        for (size_t i = 0; i < n; i++) u[i] = compensated(s.gradient[start + i], s.memory[start + i], decay);
    else
        std::memcpy(u, s.gradient + start, n * sizeof(float));
}

inline void load_loop(const Stream& s, float decay, size_t start, size_t n, float limit, float* u) {
    load_block(s, decay, start, n, u);
    if (limit < kInfinity)
        for (size_t i = 0; i < n; i++) u[i] = u[i] > limit ? limit : (u[i] < -limit ? -limit : u[i]);
}

// ── statistics ───────────────────────────────────────────────────────────────────────────────────

struct Sums {
    float low[kLanes], high[kLanes];
    double magnitude[kLanes], total[kLanes], square[kLanes];

    Sums() : magnitude{}, total{}, square{} {
        for (int l = 0; l < kLanes; l++) low[l] = kInfinity, high[l] = -kInfinity;
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
            const int n = int(at_most(kBlock, end - start));
            load_block(s, decay, start, size_t(n), u);
            Sums part = sums;  // a copy that no other pointer reaches stays in registers
            int i = 0;
            for (; i + kLanes <= n; i += kLanes)
                for (int l = 0; l < kLanes; l++) part.add(u + i, l);
            for (int l = 0; i + l < n; l++) part.add(u + i, l);
            sums = part;
        }
        out[0] = kInfinity;
        out[1] = -kInfinity;
        out[2] = out[3] = out[4] = 0;
        for (int l = 0; l < kLanes; l++) {
            out[0] = sums.low[l] < out[0] ? sums.low[l] : out[0];
            out[1] = sums.high[l] > out[1] ? sums.high[l] : out[1];
            out[2] += sums.magnitude[l];
            out[3] += sums.total[l];
            out[4] += sums.square[l];
        }
    }
}

inline void extremes_loop(const float* u, size_t n, float& low, float& high) {
    FloatLanes least = FloatLanes{} + u[0], most = least;
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const FloatLanes v = lanes_at(u + i);
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    low = high = u[0];
    for (int l = 0; l < kLanes; l++) {
        low = least[l] < low ? least[l] : low;
        high = most[l] > high ? most[l] : high;
    }
    for (; i < n; i++) {
        low = u[i] < low ? u[i] : low;
        high = u[i] > high ? u[i] : high;
    }
}

inline double sum_between_loop(const float* u, size_t n, float low, float high, size_t& count) {
    DoubleLanes sums = {};
    IntLanes counts = {};
    for (size_t i = 0; i < n; i += kLanes) {
        FloatLanes v = FloatLanes{} + kInfinity;  // never inside
        if (i + kLanes <= n)
            v = lanes_at(u + i);
        else
            std::memcpy(&v, u + i, (n - i) * sizeof(float));
        const IntLanes inside = (v >= low) & (v < high);
        sums += __builtin_convertvector((FloatLanes)((IntLanes)v & inside), DoubleLanes);
        counts -= inside;
    }
    double total = 0;
    count = 0;
    for (int l = 0; l < kLanes; l++) {
        total += sums[l];
        count += size_t(counts[l]);
    }
    return total;
}

inline size_t count_to_loop(const float* u, size_t n, float limit) {
    int32_t count = 0;
    for (size_t i = 0; i < n; i++) count += u[i] <= limit;
    return size_t(count);
}

inline float largest_to_loop(const float* u, size_t n, float limit) {
    const FloatLanes none = FloatLanes{} - kInfinity;
    FloatLanes most = none;
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const FloatLanes v = lanes_at(u + i), w = v <= limit ? v : none;
        most = w > most ? w : most;
    }
    float largest = -kInfinity;
    for (int l = 0; l < kLanes; l++) largest = most[l] > largest ? most[l] : largest;
    for (; i < n; i++) largest = u[i] <= limit && u[i] > largest ? u[i] : largest;
    return largest;
}

inline float smallest_above_loop(const float* u, size_t n, float limit) {
    const FloatLanes none = FloatLanes{} + kInfinity;
    FloatLanes least = none;
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const FloatLanes v = lanes_at(u + i), w = v > limit ? v : none;
        least = w < least ? w : least;
    }
    float smallest = kInfinity;
    for (int l = 0; l < kLanes; l++) smallest = least[l] < smallest ? least[l] : smallest;
    for (; i < n; i++) smallest = u[i] > limit && u[i] < smallest ? u[i] : smallest;
    return smallest;
}

inline float magnitudes_loop(const float* u, size_t n, uint32_t& least, uint32_t& most) {
    const int32_t infinity = 0x7f800000;
    IntLanes low = IntLanes{} + infinity, high = {};
    FloatLanes sums = {};
    for (size_t i = 0; i < n; i += kLanes) {
        FloatLanes v = {};
        if (i + kLanes <= n)
            v = lanes_at(u + i);
        else
            std::memcpy(&v, u + i, (n - i) * sizeof(float));
        const IntLanes magnitude = (IntLanes)v & 0x7fffffff, nonzero = magnitude ? magnitude : infinity;
        low = nonzero < low ? nonzero : low;
        high = magnitude > high ? magnitude : high;
        sums += (FloatLanes)magnitude;
    }
    least = uint32_t(infinity);
    most = 0;
    float sum = 0;
    for (int l = 0; l < kLanes; l++) {
        least = uint32_t(low[l]) < least ? uint32_t(low[l]) : least;
        most = uint32_t(high[l]) > most ? uint32_t(high[l]) : most;
        sum += sums[l];
    }
    return sum;
}

inline void bin_numbers_loop(const float* u, size_t n, float first, float scale, int last, uint8_t* bins) {
    const float most = float(last);
    for (size_t i = 0; i < n; i++) {
        float place = (u[i] - first) * scale + 1.0f;
        place = place > 0.0f ? place : 0.0f;
        place = place < most ? place : most;
        bins[i] = uint8_t(int32_t(place));
    }
}

inline size_t cheapest_loop(const Costs& c, size_t j, size_t first, size_t end, double& value) {
    const double *w = c.w, *sums = c.sums, *squares = c.squares, *least = c.least;
    double* found = c.found;
    const double wj = w[j], sj = sums[j + 1], qj = squares[j + 1];
    for (size_t i = first; i <= end; i++) {
        const double inner = (wj + w[i]) * (sj - sums[i]) - double(int32_t(j - i + 1)) * (w[i] * wj);
        found[i] = least[i] + (inner - (qj - squares[i]));
    }
    double lanes[8];
    for (double& lane : lanes) lane = found[first];
    size_t i = first;
    for (; i + 7 <= end; i += 8)
        for (int l = 0; l < 8; l++) lanes[l] = found[i + l] < lanes[l] ? found[i + l] : lanes[l];
    for (; i <= end; i++) lanes[0] = found[i] < lanes[0] ? found[i] : lanes[0];
    value = lanes[0];
    for (double lane : lanes) value = lane < value ? lane : value;
    for (i = first; i < end && found[i] != value; i++) {}
    return i;
}

// ── entries to levels ────────────────────────────────────────────────────────────────────────────

// A block of entries on its way to symbols.
struct Block {
    int n;
    float u[kBlock], low[kBlock], high[kBlock], random[kBlock], value[kBlock];
    int32_t symbol[kBlock];
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

GRADWIRE_INLINE void choose_up(Block& k, int i, float low, float high) {
    const bool up = k.random[i] * (high - low) < k.u[i] - low;
    k.value[i] = up ? high : low;
    k.symbol[i] += up;
}

// How many of thresholds[0 .. m) are not above u; they ascend, m < 256.
inline void count_below(Block& k, const float* thresholds, int m) {
    for (int i = 0; i < k.n; i++) k.symbol[i] = 0;
    if (m < kChain) {
        for (int j = 0; j < m; j++) {
            const float threshold = thresholds[j];
            for (int i = 0; i < k.n; i++) k.symbol[i] += k.u[i] >= threshold;
        }
        return;
    }
    float padded[256];
    for (int j = 0; j < 256; j++) padded[j] = j && j <= m ? thresholds[j - 1] : kNever;
    int step = 1;
    while (2 * step <= m) step *= 2;
    for (; step; step /= 2)
        for (int i = 0; i < k.n; i++) k.symbol[i] += k.u[i] >= padded[k.symbol[i] + step] ? step : 0;
}

// The commonest numbers of levels, known to the compiler: everything stays in registers.
template <int Levels>
GRADWIRE_INLINE void stochastic_chain(Block& k, const float* v) {
    for (int i = 0; i < k.n; i++) {
        const float u = k.u[i];
        float low = v[0], high = v[1];
        int32_t lower = 0;
        for (int j = 1; j < Levels - 1; j++) {
            const bool above = u >= v[j];
            lower += above;
            low = above ? v[j] : low;
            high = above ? v[j + 1] : high;
        }
        k.symbol[i] = lower;
        choose_up(k, i, low, high);
    }
}

inline void stochastic_any(Block& k, const float* v, int levels) {
    count_below(k, v + 1, levels - 2);
    for (int i = 0; i < k.n; i++) k.low[i] = v[k.symbol[i]];
    for (int i = 0; i < k.n; i++) k.high[i] = v[k.symbol[i] + 1];
    for (int i = 0; i < k.n; i++) choose_up(k, i, k.low[i], k.high[i]);
}

inline void to_nearest(Block& k, const float* v, const float* middles, int levels) {
    count_below(k, middles, levels - 1);
    if (levels == 2) {
        const float low = v[0], high = v[1];
        for (int i = 0; i < k.n; i++) k.value[i] = k.symbol[i] ? high : low;
    } else {
        for (int i = 0; i < k.n; i++) k.value[i] = v[k.symbol[i]];
    }
}

inline void count_symbols(const uint8_t* symbols, int n, int levels, int64_t* counts) {
    if (levels > 17) {
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

[[maybe_unused]] inline void assign_loop(const Stream& s, float decay, Buckets b, const float* values, int levels,
                                         bool stochastic, uint64_t seed, uint8_t* symbols, int64_t* counts) {
    Block k;
    float v[kMaxLevels], middles[kMaxLevels];  // copies: stores to `symbols` could otherwise change them
    for (size_t bucket = 0; bucket < b.count; bucket++, values += levels) {
        for (int j = 0; j < levels; j++) v[j] = values[j];
        for (int j = 0; j + 1 < levels; j++) middles[j] = float((double(v[j]) + double(v[j + 1])) / 2);
        const size_t end = size_t(b.starts[bucket + 1]);
        for (size_t start = size_t(b.starts[bucket]); start < end; start += kBlock) {
            k.n = int(at_most(kBlock, end - start));
            load_block(s, decay, start, size_t(k.n), k.u);
            if (!stochastic) {
                to_nearest(k, v, middles, levels);
            } else {
                draw(k, s.first + start, seed);
                switch (levels) {
                    case 2: stochastic_chain<2>(k, v); break;
                    case 3: stochastic_chain<3>(k, v); break;
                    case 5: stochastic_chain<5>(k, v); break;
                    case 9: stochastic_chain<9>(k, v); break;
                    default: stochastic_any(k, v, levels);
                }
            }
            for (int i = 0; i < k.n; i++) symbols[start + i] = uint8_t(k.symbol[i]);
            count_symbols(symbols + start, k.n, levels, counts);
            if (float* out = s.memory_out)
                for (int i = 0; i < k.n; i++) out[start + i] = k.u[i] - k.value[i];
        }
    }
}

[[maybe_unused]] inline void spread_loop(const uint8_t* symbols, Buckets b, const float* values, int levels, float* out,
                                         bool accumulate) {
    float v[kMaxValues] = {};  // any symbol finds a number
    for (size_t bucket = 0; bucket < b.count; bucket++, values += levels) {
        for (int j = 0; j < levels; j++) v[j] = values[j];
        const size_t start = size_t(b.starts[bucket]), end = size_t(b.starts[bucket + 1]);
        if (accumulate)
            for (size_t i = start; i < end; i++) out[i] += v[symbols[i]];
        else
            for (size_t i = start; i < end; i++) out[i] = v[symbols[i]];
    }
}

#define GRADWIRE_LEVEL_KERNELS(assign, spread)                                                                         \
    {stats_loop,          assign,           spread,           load_loop,                                               \
     extremes_loop,       sum_between_loop, count_to_loop,    largest_to_loop,                                         \
     smallest_above_loop, magnitudes_loop,  bin_numbers_loop, cheapest_loop}

}  // namespace
}  // namespace gradwire
