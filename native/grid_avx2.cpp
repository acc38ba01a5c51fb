// The grid for x86 with AVX2: up to 15 symbols are quantized by hand, others by the plain loops; rANS is a second pass
// over a chunk's symbols, which are still in the second-level cache.
//
// Traps: as in grid_avx512.cpp. There are no unsigned comparisons: a multiple is outside if it is above or below.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "grid_loop.h"
#include "streaming.h"

namespace gradwire {
namespace {

using Int = __m256i;
using Float = __m256;
constexpr size_t kRow = 32;

struct Vectors {
    Grid g;
    Float low, high, decay, inverse, shift, sign;
    Int largest, least, exponent;

    explicit Vectors(const Grid& grid) : g(grid) {
        float v[16] = {};
        for (int s = 0; s <= 2 * g.largest; s++) v[s] = g.values[s];
        low = _mm256_loadu_ps(v);
        high = _mm256_loadu_ps(v + 8);
        decay = _mm256_set1_ps(g.decay);
        inverse = _mm256_set1_ps(g.inverse);
        shift = _mm256_set1_ps(g.shift);
        sign = _mm256_set1_ps(-0.0f);
        largest = _mm256_set1_epi32(g.largest);
        least = _mm256_set1_epi32(-g.largest);
        exponent = _mm256_set1_epi32(0x7f800000);
    }

    // Negative where u is a NaN or an infinity: its exponent has all bits set.
    GRADWIRE_INLINE Int not_finite(Float u) const {
        return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(u), exponent), exponent);
    }

    GRADWIRE_INLINE Int multiple(Float u, unsigned& outside) const {
        Float y = _mm256_mul_ps(u, inverse);
        Int m = _mm256_cvttps_epi32(_mm256_add_ps(y, _mm256_or_ps(shift, _mm256_and_ps(y, sign))));
        Int out = _mm256_or_si256(_mm256_cmpgt_epi32(m, largest), _mm256_cmpgt_epi32(least, m));
        outside = unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(out)));
        return m;
    }

    GRADWIRE_INLINE Float value(Int symbol) const {
        Float a = _mm256_permutevar8x32_ps(low, symbol), b = _mm256_permutevar8x32_ps(high, symbol);
        return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(symbol, 28)));
    }

    // The multiples of 8 entries from `first` on, those in the mask listed apart, and what is left of their u.
    [[gnu::noinline]] Int take_out(Int multiples, Float& u, unsigned outside, uint64_t first, Outliers& o) const {
        alignas(32) int32_t m[8];
        alignas(32) float x[8];
        _mm256_store_si256(reinterpret_cast<Int*>(m), multiples);
        _mm256_store_ps(x, u);
        for (; outside; outside &= outside - 1) {
            const int l = __builtin_ctz(outside);
            const int beyond = grid_multiple<false>(g, x[l], 0);
            m[l] = o.add(first + uint64_t(l), beyond, g.largest);
            if (g.settle && !m[l]) x[l] -= g.beyond(beyond);
        }
        u = _mm256_load_ps(x);
        return _mm256_load_si256(reinterpret_cast<const Int*>(m));
    }
};

// How many entries were done: it stops before a row that holds a NaN or an infinity.
template <bool Memory, bool Update>
size_t quantize_rows(const Grid& g, const Stream& stream, uint8_t* symbols, Outliers& outliers) {
    const Stream s = stream;  // a copy: stores to `symbols` could otherwise change it
    const Vectors c(g);
    const Int in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
    const bool far = s.streams();
    size_t row = 0;
    for (; row + kRow <= s.count; row += kRow) {
        Float u[4];
        Int symbol[4], bad = _mm256_setzero_si256();
        for (int v = 0; v < 4; v++) {
            u[v] = _mm256_loadu_ps(s.gradient + row + 8 * v);
            if (Memory) u[v] = _mm256_add_ps(u[v], _mm256_mul_ps(_mm256_loadu_ps(s.memory + row + 8 * v), c.decay));
            bad = _mm256_or_si256(bad, c.not_finite(u[v]));
        }
        if (__builtin_expect(!_mm256_testz_si256(bad, bad), 0)) return row;
        for (int v = 0; v < 4; v++) {
            unsigned outside;
            Int m = c.multiple(u[v], outside);
            if (__builtin_expect(outside != 0, 0)) m = c.take_out(m, u[v], outside, s.first + row + 8 * v, outliers);
            symbol[v] = _mm256_add_epi32(m, c.largest);
            if (Update) store(s.memory_out + row + 8 * v, _mm256_sub_ps(u[v], c.value(symbol[v])), far);
        }
        Int words[2] = {_mm256_packs_epi32(symbol[0], symbol[1]), _mm256_packs_epi32(symbol[2], symbol[3])};
        Int bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words[0], words[1]), in_order);
        _mm256_storeu_si256(reinterpret_cast<Int*>(symbols + row), bytes);
    }
    if (far) _mm_sfence();
    const Stream rest = s.part(row, s.count - row);
    if (!grid_finite(g, rest)) return row;
    const size_t from = outliers.count;
    grid_any(g, rest, symbols + row, outliers);
    settle(g, rest, outliers, from);
    return s.count;
}

Coded quantize_rans(const Grid& g, const Stream& s, const RansTable& t, int lanes, uint8_t* out, uint8_t* scratch,
                    Outliers& o) {
    if (g.largest > 7) return grid_rans(g, s, t, lanes, out, scratch, o);
    auto quantize = s.memory ? (s.memory_out ? quantize_rows<true, true> : quantize_rows<true, false>)
                             : (s.memory_out ? quantize_rows<false, true> : quantize_rows<false, false>);
    const size_t done = quantize(g, s, scratch, o);
    return {done ? kernels().rans_encode(t, scratch, done, lanes, out) : 0, done};
}

}  // namespace

const GridKernels avx2_grid = {grid_any, quantize_rans};

}  // namespace gradwire
#endif
