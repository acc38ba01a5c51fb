// The scan of sparse codecs with AVX-512.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "quantize.h"
#include "sparse.h"

namespace gradwire {
namespace {

template <bool Memory, bool Update>
Found scan(const Stream& stream, float decay, uint32_t low, uint32_t* index, float* value) {
    const Stream s = stream;  // a copy: stores could otherwise change it
    const __m512 factor = _mm512_set1_ps(decay);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), least = _mm512_set1_epi32(int32_t(low));
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    size_t n = 0, i = 0;
    for (; i + 16 <= s.count; i += 16) {
        __m512 u = _mm512_loadu_ps(s.gradient + i);
        if (Memory) u = _mm512_add_ps(u, _mm512_mul_ps(_mm512_loadu_ps(s.memory + i), factor));
        const __mmask16 found =
            _mm512_cmpge_epu32_mask(_mm512_and_si512(_mm512_castps_si512(u), magnitude), least);
        if (found) {
            if (_mm512_fpclass_ps_mask(u, 0x99)) return {n, i};  // NaN of both kinds, infinities of both signs
            _mm512_storeu_ps(value + n, _mm512_maskz_compress_ps(found, u));
            const __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(i)));
            _mm512_storeu_si512(index + n, _mm512_maskz_compress_epi32(found, at));
            n += _mm_popcnt_u32(found);
        }
        if (Update) _mm512_storeu_ps(s.memory_out + i, u);
    }
    if (i < s.count) {
        const Found rest = scan_portable(s.part(i, s.count - i), decay, low, index + n, value + n);
        for (size_t j = n; j < n + rest.count; j++) index[j] += uint32_t(i);
        n += rest.count;
        i += rest.done;
    }
    return {n, i};
}

}  // namespace

Found scan_avx512(const Stream& s, float decay, uint32_t low, uint32_t* index, float* value) {
    if (s.memory) return (s.memory_out ? scan<true, true> : scan<true, false>)(s, decay, low, index, value);
    return (s.memory_out ? scan<false, true> : scan<false, false>)(s, decay, low, index, value);
}

}  // namespace gradwire
#endif
