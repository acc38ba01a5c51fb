// The scan of sparse codecs with AVX-512.
//
// Found entries are compressed in a register and stored whole, whether there are any or not: a branch on each vector
// is mispredicted too often from one entry in a hundred on, and a flushed pipeline holds up the loads to come.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "quantize.h"
#include "sparse.h"
#include "streaming.h"

namespace gradwire {
namespace {

constexpr int kVectors = 4;  // looked at together

template <bool Memory, bool Update>
Found scan(const Stream& stream, float decay, Lows low, uint32_t* index, float* value) {
    const Stream s = stream;  // a copy: stores could otherwise change it
    const bool far = s.streams();
    const __m512 factor = _mm512_set1_ps(decay);
    // As signed integers, numbers above 0 order like their magnitudes; as unsigned ones, those below 0 do, at the top.
    const __m512i positive = _mm512_set1_epi32(int32_t(low.positive));
    const __m512i negative = _mm512_set1_epi32(int32_t(low.negative | 0x80000000u));
    const __m512i step = _mm512_set1_epi32(16);
    __m512i at = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    size_t n = 0, i = 0;
    for (; i + 16 * kVectors <= s.count; i += 16 * kVectors) {
        __m512 u[kVectors];
        __mmask16 found[kVectors];
        unsigned bad = 0, any = 0;
        for (int v = 0; v < kVectors; v++) {
            u[v] = _mm512_loadu_ps(s.gradient + i + 16 * v);
            if (Memory) u[v] = _mm512_add_ps(u[v], _mm512_mul_ps(_mm512_loadu_ps(s.memory + i + 16 * v), factor));
            const __m512i bits = _mm512_castps_si512(u[v]);
            found[v] = _mm512_cmpge_epi32_mask(bits, positive) | _mm512_cmpge_epu32_mask(bits, negative);
            any |= found[v];
        }
        if (any) {
            for (int v = 0; v < kVectors; v++) bad |= _mm512_fpclass_ps_mask(u[v], 0x99);  // NaN and infinities
            if (__builtin_expect(bad != 0, 0)) return {n, i};
            for (int v = 0; v < kVectors; v++) {
                _mm512_storeu_ps(value + n, _mm512_maskz_compress_ps(found[v], u[v]));
                _mm512_storeu_si512(index + n, _mm512_maskz_compress_epi32(found[v], at));
                at = _mm512_add_epi32(at, step);
                n += _mm_popcnt_u32(found[v]);
            }
        } else {
            at = _mm512_add_epi32(at, _mm512_set1_epi32(16 * kVectors));
        }
        if (Update)
            for (int v = 0; v < kVectors; v++) store(s.memory_out + i + 16 * v, u[v], far);
    }
    if (far) _mm_sfence();
    return scan_rest(s, decay, low, index, value, {n, i});
}

}  // namespace

Found avx512_scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value) {
    if (s.memory) return (s.memory_out ? scan<true, true> : scan<true, false>)(s, decay, low, index, value);
    return (s.memory_out ? scan<false, true> : scan<false, false>)(s, decay, low, index, value);
}

}  // namespace gradwire
#endif
