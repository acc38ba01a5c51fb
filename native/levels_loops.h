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
#if defined(__AVX512F__)
constexpr int kWide = 16;
#elif defined(__AVX2__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
constexpr float kInfinity = __builtin_inff();
constexpr float kNever = __builtin_nanf("");  // a threshold that nothing reaches, not even an infinity

#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors are only ever passed to functions that are inlined
typedef float FloatLanes __attribute__((vector_size(4 * kWide)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kWide)));
typedef uint32_t UintLanes __attribute__((vector_size(4 * kWide)));
typedef float HalfLanes __attribute__((vector_size(2 * kWide)));
typedef double DoubleLanes __attribute__((vector_size(4 * kWide)));  // of half as many lanes

GRADWIRE_INLINE FloatLanes lanes_at(const float* p) {
    FloatLanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Entries i, i + 1, … of n, and behind the last one `rest`.
GRADWIRE_INLINE FloatLanes lanes_at(const float* u, size_t i, size_t n, float rest) {
    if (i + kWide <= n) return lanes_at(u + i);
    FloatLanes v = FloatLanes{} + rest;
    if (i < n) std::memcpy(&v, u + i, (n - i) * sizeof(float));
    return v;
}

GRADWIRE_INLINE IntLanes lane_numbers() {
    IntLanes lane = {};
    for (int l = 0; l < kWide; l++) lane[l] = l;
    return lane;
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
    for (size_t i = 0; i < n; i += kWide) {
        const FloatLanes v = lanes_at(u, i, n, u[0]);
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    low = high = u[0];
    for (int l = 0; l < kWide; l++) {
        low = least[l] < low ? least[l] : low;
        high = most[l] > high ? most[l] : high;
    }
}

// ── selection by rank ────────────────────────────────────────────────────────────────────────────

// Lanes of v to the end of a list, if `inside` is -1 there: `out` has room for all. Returns how many.
struct AppendOneByOne {
    GRADWIRE_INLINE static size_t append(FloatLanes v, IntLanes inside, float* out) {
        size_t count = 0;
        for (int l = 0; l < kWide; l++) {
            out[count] = v[l];
            count += size_t(inside[l] & 1);
        }
        return count;
    }
};

template <class Append>
double take_between_loop(const float* u, size_t n, float low, float high, float* out, size_t& count) {
    DoubleLanes sums[2 * kLanes / kWide] = {};
    IntLanes counts = {};
    size_t taken = 0;
    for (size_t i = 0; i < n; i += kLanes)
        for (int j = 0; j < kLanes / kWide; j++) {
            const FloatLanes v = lanes_at(u, i + size_t(j * kWide), n, kInfinity);  // which is never inside
            const IntLanes inside = (v >= low) & (v < high);
            const IntLanes kept = (IntLanes)v & inside;
            HalfLanes halves[2];
            std::memcpy(halves, &kept, sizeof halves);
            for (int h = 0; h < 2; h++) sums[2 * j + h] += __builtin_convertvector(halves[h], DoubleLanes);
            counts -= inside;
            if (out) taken += Append::append(v, inside, out + taken);
        }
    double total = 0;
    count = 0;
    for (int l = 0; l < kLanes; l++) total += sums[2 * l / kWide][l % (kWide / 2)];
    for (int l = 0; l < kWide; l++) count += size_t(counts[l]);
    return total;
}

// (A NaN, of zero times infinity where all numbers are tiny, is the first's own.)
GRADWIRE_INLINE IntLanes parts_of(FloatLanes v, float first, float scale) {
    const FloatLanes least = {}, most = FloatLanes{} + float(kParts - 1);
    FloatLanes place = (v - first) * scale;
    place = place > least ? place : least;
    place = place < most ? place : most;
    return __builtin_convertvector(place, IntLanes);
}

// A lane has a counter of four bits for each part.
inline void count_parts_loop(const float* u, size_t n, float first, float scale, uint32_t* counts) {
    constexpr size_t kMost = 15 * kWide;
    const UintLanes one = UintLanes{} + 1;
    UintLanes totals[kParts] = {};
    for (size_t start = 0; start < n; start += kMost) {
        const size_t end = at_most(start + kMost, n);
        UintLanes found = {};
        for (size_t i = start; i < end; i += kWide)
            found += one << (UintLanes)(4 * parts_of(lanes_at(u, i, n, u[0]), first, scale));
        for (int k = 0; k < kParts; k++) totals[k] += found >> uint32_t(4 * k) & 15u;
    }
    for (int k = 0; k < kParts; k++) {
        counts[k] = 0;
        for (int l = 0; l < kWide; l++) counts[k] += totals[k][l];
    }
    // Lanes behind the last entry held the first.
    counts[parts_of(FloatLanes{} + u[0], first, scale)[0]] -= uint32_t((kWide - n % kWide) % kWide);
}

template <class Append>
size_t take_part_loop(const float* u, size_t n, float first, float scale, int part, float* out) {
    const IntLanes wanted = IntLanes{} + part, lane = lane_numbers();
    size_t taken = 0;
    for (size_t i = 0; i < n; i += kWide) {
        const FloatLanes v = lanes_at(u, i, n, 0);
        IntLanes inside = parts_of(v, first, scale) == wanted;
        if (i + kWide > n) inside &= lane < int32_t(n - i);
        taken += Append::append(v, inside, out + taken);
    }
    return taken;
}

inline float of_few_loop(const float* u, size_t n, size_t rank) {
    float entries[kFew];
    for (size_t i = 0; i < size_t(kFew); i++) entries[i] = i < n ? u[i] : kInfinity;
    const FloatLanes none = FloatLanes{} + kInfinity;
    FloatLanes found = none;
    for (int first = 0; first < kFew; first += kWide) {
        const FloatLanes v = lanes_at(entries + first);
        IntLanes up_to = {};  // how many are not above each
        for (int i = 0; i < kFew; i++) up_to -= v >= entries[i];
        const FloatLanes beyond = up_to > int32_t(rank) ? v : none;
        found = beyond < found ? beyond : found;
    }
    float least = kInfinity;
    for (int l = 0; l < kWide; l++) least = found[l] < least ? found[l] : least;
    return least;
}

// ── BinGrad and the exact search ─────────────────────────────────────────────────────────────────

inline float magnitudes_loop(const float* u, size_t n, uint32_t& least, uint32_t& most) {
    const int32_t infinity = 0x7f800000;
    const IntLanes none = IntLanes{} + infinity;
    IntLanes low = none, high = {};
    FloatLanes sums = {};
    for (size_t i = 0; i < n; i += kWide) {
        const IntLanes magnitude = (IntLanes)lanes_at(u, i, n, 0) & 0x7fffffff, nonzero = magnitude ? magnitude : none;
        low = nonzero < low ? nonzero : low;
        high = magnitude > high ? magnitude : high;
        sums += (FloatLanes)magnitude;
    }
    least = uint32_t(infinity);
    most = 0;
    float sum = 0;
    for (int l = 0; l < kWide; l++) {
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

#define GRADWIRE_LEVEL_KERNELS(assign, spread, take_between, count_parts, take_part, splits)                           \
    {stats_loop, assign,      spread,          load_loop,        extremes_loop, take_between, count_parts,             \
     take_part,  of_few_loop, magnitudes_loop, bin_numbers_loop, splits,        cheapest_loop}

}  // namespace
}  // namespace gradwire
