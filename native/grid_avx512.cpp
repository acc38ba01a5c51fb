// The grid for x86 with AVX-512: up to 16 symbols, whose values are one register.
//
// Adding the shift with the sign of y and truncating gives the signed multiple in one conversion. A multiple beyond
// 2^31 converts to the smallest integer, which is outside too; outliers are worked out again one by one.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "grid_loop.h"

namespace gradwire {
namespace {

using Int = __m512i;
using Float = __m512;
constexpr int kRow = 64;

template <bool Memory, bool Update>
size_t quantize_rows(const Grid& grid, const Stream& stream, uint8_t* symbols, Outliers& outliers) {
    const Grid g = grid;
    const Stream s = stream;  // copies: stores to `symbols` could otherwise change them
    alignas(64) float v[16] = {};
    for (int m = -g.largest; m <= g.largest; m++) v[m & 15] = g.values[m + g.largest];
    const Float values = _mm512_load_ps(v), decay = _mm512_set1_ps(g.decay), inverse = _mm512_set1_ps(g.inverse);
    const Int shift = _mm512_castps_si512(_mm512_set1_ps(g.shift)), sign = _mm512_set1_epi32(int(0x80000000u));
    const Int largest = _mm512_set1_epi32(g.largest), twice = _mm512_set1_epi32(2 * g.largest);
    size_t row = 0;
    for (; row + kRow <= s.count; row += kRow) {
        Float u[4];
        Int symbol[4];
        __mmask16 bad = 0, outside[4];
        for (int i = 0; i < 4; i++) {
            u[i] = _mm512_loadu_ps(s.gradient + row + 16 * i);
            if (Memory) u[i] = _mm512_add_ps(u[i], _mm512_mul_ps(_mm512_loadu_ps(s.memory + row + 16 * i), decay));
            bad |= _mm512_fpclass_ps_mask(u[i], 0x99);  // NaN of both kinds, infinities of both signs
        }
        if (__builtin_expect(bad != 0, 0)) return row;
        for (int i = 0; i < 4; i++) {
            Float y = _mm512_mul_ps(u[i], inverse);
            Int signed_shift = _mm512_ternarylogic_epi32(_mm512_castps_si512(y), shift, sign, 0xec);  // shift | (y & sign)
            Int multiple = _mm512_cvttps_epi32(_mm512_add_ps(y, _mm512_castsi512_ps(signed_shift)));
            symbol[i] = _mm512_add_epi32(multiple, largest);
            outside[i] = _mm512_cmpgt_epu32_mask(symbol[i], twice);
        }
        if (__builtin_expect((outside[0] | outside[1] | outside[2] | outside[3]) != 0, 0)) {
            for (int i = 0; i < 4; i++)
                if (outside[i]) {
                    alignas(64) int32_t fixed[16];
                    _mm512_store_si512(fixed, symbol[i]);
                    for (unsigned m = outside[i]; m; m &= m - 1) {
                        const int l = __builtin_ctz(m);
                        const size_t at = row + 16 * i + l;
                        const float x = Memory ? s.gradient[at] + s.memory[at] * g.decay : s.gradient[at];
                        const int multiple = grid_multiple<false>(g, x, 0);
                        fixed[l] = g.largest + outliers.add(s.first + at, multiple, x, g.largest);
                    }
                    symbol[i] = _mm512_load_si512(fixed);
                }
        }
        for (int i = 0; i < 4; i++) {
            if (Update) {
                Float value = _mm512_permutexvar_ps(_mm512_sub_epi32(symbol[i], largest), values);
                _mm512_storeu_ps(s.memory_out + row + 16 * i, _mm512_sub_ps(u[i], value));
            }
            _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + row + 16 * i), _mm512_cvtepi32_epi8(symbol[i]));
        }
    }
    return row + grid_finite(g, s.part(row, s.count - row), symbols + row, outliers);
}

size_t quantize_finite(const Grid& g, const Stream& s, uint8_t* symbols, Outliers& o) {
    if (g.largest > 7 || g.stochastic) return grid_finite(g, s, symbols, o);
    if (s.memory) return (s.memory_out ? quantize_rows<true, true> : quantize_rows<true, false>)(g, s, symbols, o);
    return (s.memory_out ? quantize_rows<false, true> : quantize_rows<false, false>)(g, s, symbols, o);
}

}  // namespace

const GridKernels avx512_grid = {grid_any, quantize_finite};

}  // namespace gradwire
#endif
