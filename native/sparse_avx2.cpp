// The scan of sparse codecs with AVX2.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "quantize.h"
#include "sparse.h"

namespace gradwire {
namespace {

template <bool Memory, bool Update>
Found scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value) {
    const __m256 factor = _mm256_set1_ps(decay);
    // As integers, numbers above 0 order like their magnitudes, and so do those below 0 with their sign bit flipped;
    // the others are then below 0.
    const __m256i below_positive = _mm256_set1_epi32(int32_t(low.positive - 1));
    const __m256i below_negative = _mm256_set1_epi32(int32_t(low.negative - 1));
    const __m256i sign = _mm256_set1_epi32(int32_t(0x80000000u)), largest = _mm256_set1_epi32(0x7f7fffff);
    size_t n = 0, i = 0;
    for (; i + 8 <= s.count; i += 8) {
        __m256 u = _mm256_loadu_ps(s.gradient + i);
        if (Memory) u = _mm256_add_ps(u, _mm256_mul_ps(_mm256_loadu_ps(s.memory + i), factor));
        const __m256i bits = _mm256_castps_si256(u);
        const __m256i large = _mm256_or_si256(_mm256_cmpgt_epi32(bits, below_positive),
                                              _mm256_cmpgt_epi32(_mm256_xor_si256(bits, sign), below_negative));
        unsigned found = unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(large)));
        if (found) {
            if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(_mm256_andnot_si256(sign, bits), largest))) return {n, i};
            alignas(32) float entries[8];
            _mm256_store_ps(entries, u);
            for (; found; found &= found - 1) {
                const unsigned lane = unsigned(__builtin_ctz(found));
                index[n] = uint32_t(i + lane);
                value[n++] = entries[lane];
            }
        }
        if (Update) _mm256_storeu_ps(s.memory_out + i, u);
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

Found scan_avx2(const Stream& s, float decay, Lows low, uint32_t* index, float* value) {
    if (s.memory) return (s.memory_out ? scan<true, true> : scan<true, false>)(s, decay, low, index, value);
    return (s.memory_out ? scan<false, true> : scan<false, false>)(s, decay, low, index, value);
}

}  // namespace gradwire
#endif
