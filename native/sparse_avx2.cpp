// The scan of sparse codecs with AVX2.
//
// AVX2 has no compress instruction: a table has, for every mask of eight lanes, the lanes to move to the front, which
// are at the same time the indices of the found entries. As with AVX-512 they are stored whole and without a branch.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "quantize.h"
#include "sparse.h"
#include "streaming.h"

namespace gradwire {
namespace {

constexpr int kVectors = 4;  // looked at together

struct Lanes {
    uint8_t of[256][8];
    constexpr Lanes() : of{} {
        for (int mask = 0; mask < 256; mask++)
            for (int lane = 0, n = 0; lane < 8; lane++)
                if (mask >> lane & 1) of[mask][n++] = uint8_t(lane);
    }
};
constexpr Lanes kLanes;

template <bool Memory, bool Update>
Found scan(const Stream& stream, float decay, Lows low, uint32_t* index, float* value) {
    const Stream s = stream;  // a copy: stores could otherwise change it
    const bool far = s.streams();
    const __m256 factor = _mm256_set1_ps(decay);
    // As integers, numbers above 0 order like their magnitudes, and so do those below 0 with their sign bit flipped;
    // the others are then below 0.
    const __m256i below_positive = _mm256_set1_epi32(int32_t(low.positive - 1));
    const __m256i below_negative = _mm256_set1_epi32(int32_t(low.negative - 1));
    const __m256i sign = _mm256_set1_epi32(int32_t(0x80000000u)), largest = _mm256_set1_epi32(0x7f7fffff);
    size_t n = 0, i = 0;
    for (; i + 8 * kVectors <= s.count; i += 8 * kVectors) {
        __m256 u[kVectors];
        unsigned found[kVectors], any = 0;
        for (int v = 0; v < kVectors; v++) {
            u[v] = _mm256_loadu_ps(s.gradient + i + 8 * v);
            if (Memory) u[v] = _mm256_add_ps(u[v], _mm256_mul_ps(_mm256_loadu_ps(s.memory + i + 8 * v), factor));
            const __m256i bits = _mm256_castps_si256(u[v]);
            const __m256i large = _mm256_or_si256(_mm256_cmpgt_epi32(bits, below_positive),
                                                  _mm256_cmpgt_epi32(_mm256_xor_si256(bits, sign), below_negative));
            any |= found[v] = unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(large)));
        }
        if (any) {
            __m256i bad = _mm256_setzero_si256();
            for (int v = 0; v < kVectors; v++) {
                const __m256i magnitude = _mm256_andnot_si256(sign, _mm256_castps_si256(u[v]));
                bad = _mm256_or_si256(bad, _mm256_cmpgt_epi32(magnitude, largest));
            }
            if (__builtin_expect(!_mm256_testz_si256(bad, bad), 0)) return {n, i};
            for (int v = 0; v < kVectors; v++) {
                const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kLanes.of[found[v]]));
                const __m256i lane = _mm256_cvtepu8_epi32(lanes);
                _mm256_storeu_ps(value + n, _mm256_permutevar8x32_ps(u[v], lane));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(index + n),
                                    _mm256_add_epi32(lane, _mm256_set1_epi32(int32_t(i + 8 * v))));
                n += size_t(_mm_popcnt_u32(found[v]));
            }
        }
        if (Update)
            for (int v = 0; v < kVectors; v++) store(s.memory_out + i + 8 * v, u[v], far);
    }
    if (far) _mm_sfence();
    return scan_rest(s, decay, low, index, value, {n, i});
}

}  // namespace

Found avx2_scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value) {
    if (s.memory) return (s.memory_out ? scan<true, true> : scan<true, false>)(s, decay, low, index, value);
    return (s.memory_out ? scan<false, true> : scan<false, false>)(s, decay, low, index, value);
}

}  // namespace gradwire
#endif
