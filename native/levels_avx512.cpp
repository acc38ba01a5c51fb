// The kernels of levels with AVX-512: entries to levels and back by hand, the rest as the compiler vectorises it.
//
// Up to 32 levels, tables are in two registers: a permutation looks up sixteen entries at once, and the interval of
// an entry is found by bisection. Everything happens in registers, sixteen entries at a time.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "levels_loops.h"

namespace gradwire {
namespace {

constexpr size_t kCounted = 4096;  // symbols that are counted while they are in the first-level cache

// 32 numbers in registers.
struct Table {
    __m512 low, high;

    explicit Table(const float* v) : low(_mm512_loadu_ps(v)), high(_mm512_loadu_ps(v + 16)) {}
    template <bool Wide>
    GRADWIRE_INLINE __m512 at(__m512i i) const {
        return Wide ? _mm512_permutex2var_ps(low, i, high) : _mm512_permutexvar_ps(i, low);
    }
};

GRADWIRE_INLINE __m512i mix_lanes(__m512i x) {
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0x21f0aaad));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)), _mm512_set1_epi32(0x735a2d97));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
}

struct Keys {
    uint32_t key1, key2;

    Keys(uint64_t first, uint64_t seed)
        : key1(mix(uint32_t(seed) ^ 0x9e3779b9u ^ mix(uint32_t(first >> 32)))), key2(mix(key1 ^ uint32_t(seed >> 32))) {
    }
    GRADWIRE_INLINE __m512 uniform(__m512i index) const {
        __m512i x = mix_lanes(_mm512_xor_si512(index, _mm512_set1_epi32(int(key1))));
        x = mix_lanes(_mm512_add_epi32(x, _mm512_set1_epi32(int(key2))));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(x, 8)), _mm512_set1_ps(1.0f / 16777216.0f));
    }
};

// Entries start .. end of one bucket. `Step` is the first step of the bisection, 0 if there is nothing to search.
template <int Step, bool Wide, bool Stochastic>
void assign_range(const Stream& s, float decay, size_t start, size_t end, const Table& values, const Table& thresholds,
                  uint64_t seed, uint8_t* symbols) {
    const Keys keys(s.first + start, seed);
    const __m512 most = _mm512_set1_ps(FLT_MAX), least = _mm512_set1_ps(-FLT_MAX), gamma = _mm512_set1_ps(decay);
    __m512i index = _mm512_add_epi32(_mm512_set1_epi32(int(uint32_t(s.first + start))),
                                     _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (size_t i = start; i < end; i += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
        const __mmask16 valid = end - i >= 16 ? 0xffff : __mmask16((1u << (end - i)) - 1);
        __m512 u = _mm512_maskz_loadu_ps(valid, s.gradient + i);
        if (s.memory) {
            u = _mm512_add_ps(u, _mm512_mul_ps(_mm512_maskz_loadu_ps(valid, s.memory + i), gamma));
            u = _mm512_max_ps(_mm512_min_ps(u, most), least);
        }
        __m512i k = _mm512_setzero_si512();
        for (int step = Step; step; step /= 2) {
            const __m512i next = _mm512_add_epi32(k, _mm512_set1_epi32(step));
            k = _mm512_mask_mov_epi32(k, _mm512_cmp_ps_mask(u, thresholds.at<Wide>(next), _CMP_GE_OQ), next);
        }
        __m512 value = values.at<Wide>(k);
        if (Stochastic) {
            const __m512i next = _mm512_add_epi32(k, _mm512_set1_epi32(1));
            const __m512 upper = values.at<Wide>(next);
            const __m512 part = _mm512_mul_ps(keys.uniform(index), _mm512_sub_ps(upper, value));
            const __mmask16 up = _mm512_cmp_ps_mask(part, _mm512_sub_ps(u, value), _CMP_LT_OQ);
            k = _mm512_mask_mov_epi32(k, up, next);
            value = _mm512_mask_mov_ps(value, up, upper);
        }
        _mm512_mask_cvtepi32_storeu_epi8(symbols + i, valid, k);
        if (s.memory_out) _mm512_mask_storeu_ps(s.memory_out + i, valid, _mm512_sub_ps(u, value));
    }
}

void count_lanes(const uint8_t* symbols, size_t n, int levels, int64_t* counts) {
    if (levels > 17) {
        for (size_t i = 0; i < n; i++) counts[symbols[i]]++;
        return;
    }
    int64_t found[17] = {};
    for (size_t i = 0; i < n; i += 64) {
        const __mmask64 valid = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
        const __m512i v = _mm512_maskz_loadu_epi8(valid, symbols + i);
        for (int j = 1; j < levels; j++)
            found[j] += __builtin_popcountll(_mm512_mask_cmpeq_epi8_mask(valid, v, _mm512_set1_epi8(char(j))));
    }
    int64_t rest = int64_t(n);
    for (int j = 1; j < levels; j++) counts[j] += found[j], rest -= found[j];
    counts[0] += rest;
}

using AssignRange = void (*)(const Stream&, float, size_t, size_t, const Table&, const Table&, uint64_t, uint8_t*);

template <bool Stochastic>
AssignRange range_of(int thresholds, bool wide) {
    int step = thresholds ? 1 : 0;
    while (step && 2 * step <= thresholds) step *= 2;
    if (wide) return step == 16 ? assign_range<16, true, Stochastic> : assign_range<8, true, Stochastic>;
    switch (step) {
        case 0: return assign_range<0, false, Stochastic>;
        case 1: return assign_range<1, false, Stochastic>;
        case 2: return assign_range<2, false, Stochastic>;
        case 4: return assign_range<4, false, Stochastic>;
        default: return assign_range<8, false, Stochastic>;
    }
}

void assign(const Stream& s, float decay, Buckets b, const float* values, int levels, bool stochastic, uint64_t seed,
            uint8_t* symbols, int64_t* counts) {
    const uint64_t first = s.first, last = s.first + s.count;
    if (levels > 32 || first >> 32 != last >> 32)
        return assign_loop(s, decay, b, values, levels, stochastic, seed, symbols, counts);
    const int searched = stochastic ? levels - 2 : levels - 1;  // thresholds stand from 1 on
    const AssignRange range = stochastic ? range_of<true>(searched, levels > 16)
                                         : range_of<false>(searched, levels > 16);
    for (size_t k = 0; k < b.count; k++, values += levels) {
        float v[32] = {}, t[32];
        for (int j = 0; j < levels; j++) v[j] = values[j];
        for (int j = 0; j < 32; j++) {
            const bool used = j >= 1 && j <= searched;
            t[j] = !used ? kNever : (stochastic ? v[j] : float((double(v[j - 1]) + double(v[j])) / 2));
        }
        const Table table(v), thresholds(t);
        for (size_t start = size_t(b.starts[k]), end = size_t(b.starts[k + 1]); start < end; start += kCounted) {
            const size_t n = at_most(kCounted, end - start);
            range(s, decay, start, start + n, table, thresholds, seed, symbols);
            count_lanes(symbols + start, n, levels, counts);
        }
    }
}

void spread(const uint8_t* symbols, Buckets b, const float* values, int levels, float* out, bool accumulate) {
    if (levels > 32) return spread_loop(symbols, b, values, levels, out, accumulate);
    for (size_t k = 0; k < b.count; k++, values += levels) {
        float v[32] = {};
        for (int j = 0; j < levels; j++) v[j] = values[j];
        const Table table(v);
        for (size_t i = size_t(b.starts[k]), end = size_t(b.starts[k + 1]); i < end; i += 16) {
            const __mmask16 valid = end - i >= 16 ? 0xffff : __mmask16((1u << (end - i)) - 1);
            const __m512i symbol = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(valid, symbols + i));
            __m512 value = table.at<true>(symbol);
            if (accumulate) value = _mm512_add_ps(_mm512_maskz_loadu_ps(valid, out + i), value);
            _mm512_mask_storeu_ps(out + i, valid, value);
        }
    }
}

// ── selection by rank ──

template <class Row>  // row(valid, i): sixteen entries from i on
GRADWIRE_INLINE void in_rows(size_t n, const Row& row) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) row(__mmask16(0xffff), i);
    if (i < n) row(__mmask16((1u << (n - i)) - 1), i);
}

GRADWIRE_INLINE size_t append(__m512 v, __mmask16 inside, float* out) {
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(inside, v));
    return size_t(__builtin_popcount(inside));
}

double take_between(const float* u, size_t n, float low, float high, float* out, size_t& count) {
    const __m512 least = _mm512_set1_ps(low), most = _mm512_set1_ps(high);
    __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    size_t found = 0;
    in_rows(n, [&](__mmask16 valid, size_t i) __attribute__((always_inline)) {
        __m512 v = _mm512_maskz_loadu_ps(valid, u + i);
        const __mmask16 inside = _mm512_mask_cmp_ps_mask(_mm512_mask_cmp_ps_mask(valid, v, least, _CMP_GE_OQ), v, most,
                                                         _CMP_LT_OQ);
        const size_t more = out ? append(v, inside, out + found) : size_t(__builtin_popcount(inside));
        found += more;
        v = _mm512_maskz_mov_ps(inside, v);
        sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
        sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
    });
    count = found;
    double total = 0;
    for (int l = 0; l < kLanes; l++) total += sums[l / 8][l % 8];
    return total;
}

// Numbers of parts as in parts_of.
struct Parts {
    __m512 first, scale;

    GRADWIRE_INLINE __m512i of(__m512 v) const {
        const __m512 place = _mm512_mul_ps(_mm512_sub_ps(v, first), scale);
        const __m512 least = _mm512_setzero_ps(), most = _mm512_set1_ps(float(kParts - 1));
        return _mm512_cvttps_epi32(_mm512_min_ps(_mm512_max_ps(place, least), most));
    }
};

// The sums of the four bytes at the same place in all lanes.
GRADWIRE_INLINE __m128i add_lanes(__m512i bytes) {
    const __m512i together = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_shuffle_epi8(bytes, together),
                                             _mm512_set1_epi8(1));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// A lane has a counter for each part: at first of four bits, then a byte.
void count_parts(const float* u, size_t n, float first, float scale, uint32_t* counts) {
    constexpr size_t kNibbles = 16 * 15, kBytes = 17 * kNibbles;  // so many entries they count
    const Parts parts{_mm512_set1_ps(first), _mm512_set1_ps(scale)};
    const __m512i one = _mm512_set1_epi32(1), low = _mm512_set1_epi8(15);
    __m128i even = _mm_setzero_si128(), odd = even;  // parts 0, 2, 4, 6 and parts 1, 3, 5, 7
    for (size_t block = 0; block < n; block += kBytes) {
        __m512i evens = _mm512_setzero_si512(), odds = evens;
        for (size_t start = block; start < at_most(block + kBytes, n); start += kNibbles) {
            __m512i found = _mm512_setzero_si512();
            in_rows(at_most(kNibbles, n - start), [&](__mmask16 valid, size_t i) __attribute__((always_inline)) {
                const __m512i part = parts.of(_mm512_maskz_loadu_ps(valid, u + start + i));
                const __m512i more = _mm512_maskz_sllv_epi32(valid, one, _mm512_slli_epi32(part, 2));
                found = _mm512_add_epi32(found, more);
            });
            evens = _mm512_add_epi8(evens, _mm512_and_si512(found, low));
            odds = _mm512_add_epi8(odds, _mm512_and_si512(_mm512_srli_epi32(found, 4), low));
        }
        even = _mm_add_epi32(even, add_lanes(evens));
        odd = _mm_add_epi32(odd, add_lanes(odds));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(counts), _mm_unpacklo_epi32(even, odd));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(counts + 4), _mm_unpackhi_epi32(even, odd));
}

size_t take_part(const float* u, size_t n, float first, float scale, int part, float* out) {
    const Parts parts{_mm512_set1_ps(first), _mm512_set1_ps(scale)};
    const __m512i wanted = _mm512_set1_epi32(part);
    size_t count = 0;
    in_rows(n, [&](__mmask16 valid, size_t i) __attribute__((always_inline)) {
        const __m512 v = _mm512_maskz_loadu_ps(valid, u + i);
        count += append(v, _mm512_mask_cmpeq_epi32_mask(valid, parts.of(v), wanted), out + count);
    });
    return count;
}

}  // namespace

const LevelKernels avx512_levels = GRADWIRE_LEVEL_KERNELS(assign, spread, take_between, count_parts, take_part,
                                                          splits_avx512);

}  // namespace gradwire
#endif
