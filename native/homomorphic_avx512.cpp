// The homomorphic code with AVX-512: entries to words in one pass; the other loops are the compiler's.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include <cstring>

#include "homomorphic_loops.h"
#include "streaming.h"

namespace gradwire {
namespace {

template <bool Memory, bool Stochastic>
void quantize(const FixedGrid& grid, const Stream& stream, int64_t* positions, int32_t* values, FixedResult& result) {
    const FixedGrid g = grid;
    const Stream s = stream;  // copies: stores could otherwise change them
    constexpr size_t kRow = 128;  // entries: whole vectors of words of any width
    const bool far = s.streams();
    const __m512 decay = _mm512_set1_ps(g.decay), step = _mm512_set1_ps(g.step), limit = _mm512_set1_ps(g.limit);
    const __m512 low_limit = _mm512_set1_ps(-g.limit), most = _mm512_set1_ps(FLT_MAX), least = _mm512_set1_ps(-FLT_MAX);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest_g = _mm512_setzero_si512(), largest_u = _mm512_setzero_si512();
    __m512d low = _mm512_loadu_pd(result.squares), high = _mm512_loadu_pd(result.squares + 8);
    alignas(64) int32_t q[kRow];
    const size_t whole = s.count / kRow * kRow;
    for (size_t i = 0; i < whole; i += kRow) {
        __m512i any = _mm512_setzero_si512();
        for (size_t j = 0; j < kRow; j += 16) {
            const __m512 gradient = _mm512_loadu_ps(s.gradient + i + j);
            const __mmask16 here = _mm512_cmp_ps_mask(gradient, _mm512_setzero_ps(), _CMP_NEQ_UQ);
            __m512 u = gradient, kept = _mm512_setzero_ps();
            if (Memory) {
                kept = _mm512_mul_ps(_mm512_loadu_ps(s.memory + i + j), decay);
                u = _mm512_add_ps(gradient, kept);
                u = _mm512_mask_mov_ps(u, _mm512_cmp_ps_mask(u, most, _CMP_GT_OQ), most);
                u = _mm512_mask_mov_ps(u, _mm512_cmp_ps_mask(u, least, _CMP_LT_OQ), least);
            }
            u = _mm512_maskz_mov_ps(here, u);
            largest_g = _mm512_max_epu32(largest_g, _mm512_and_si512(_mm512_castps_si512(gradient), magnitude));
            largest_u = _mm512_max_epu32(largest_u, _mm512_and_si512(_mm512_castps_si512(u), magnitude));
            const __m512d first = _mm512_cvtps_pd(_mm512_castps512_ps256(u));
            const __m512d second = _mm512_cvtps_pd(_mm512_extractf32x8_ps(u, 1));
            low = _mm512_add_pd(low, _mm512_mul_pd(first, first));
            high = _mm512_add_pd(high, _mm512_mul_pd(second, second));
            __m512i code;
            __m512 rounded;
            if (Stochastic) {
                alignas(64) float entries[16];
                _mm512_store_ps(entries, u);
                for (int k = 0; k < 16; k++) entries[k] = on_grid<true>(g, entries[k], s.first + i + j + k);
                rounded = _mm512_load_ps(entries);
                code = _mm512_cvtps_epi32(rounded);
            } else {
                const __m512 y = _mm512_max_ps(_mm512_min_ps(_mm512_div_ps(u, step), limit), low_limit);
                code = _mm512_cvtps_epi32(y);  // to nearest, ties to even
                rounded = _mm512_cvtepi32_ps(code);
            }
            _mm512_store_si512(q + j, code);
            any = _mm512_or_si512(any, code);
            if (s.memory_out) {
                const __m512 left = _mm512_sub_ps(u, _mm512_mul_ps(rounded, step));
                store(s.memory_out + i + j, _mm512_mask_mov_ps(kept, here, left), far);
            }
        }
        if (!_mm512_test_epi32_mask(any, any)) continue;
        const int fields = 32 / g.bits;
        const uint64_t at = (s.first + i) / uint64_t(fields);
        if (fields > 1) {  // in place: words are written behind what is read
            uint32_t word[kRow / 2];
            for (int w = 0; w < int(kRow) / fields; w++) {
                uint32_t sum = 0;
                for (int e = 0; e < fields; e++) sum += uint32_t(q[w * fields + e]) << (g.bits * e);
                word[w] = sum;
            }
            std::memcpy(q, word, 4 * kRow / size_t(fields));
        }
        for (size_t j = 0; j < kRow / size_t(fields); j += 16) {
            const __m512i word = _mm512_load_si512(q + j);
            const __mmask16 found = _mm512_test_epi32_mask(word, word);
            const __m512i lanes = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
            const __m512i here = _mm512_add_epi64(lanes, _mm512_set1_epi64(int64_t(at + j)));
            const __mmask8 front = __mmask8(found), back = __mmask8(found >> 8);
            const int in_front = _mm_popcnt_u32(front), all = _mm_popcnt_u32(found);
            // Without a branch, which would often be mispredicted; compressed in a register and stored whole, since
            // straight to memory is many times slower on some machines.
            const __m512i after = _mm512_add_epi64(here, _mm512_set1_epi64(8));
            _mm512_storeu_si512(values + result.words, _mm512_maskz_compress_epi32(found, word));
            _mm512_storeu_si512(positions + result.words, _mm512_maskz_compress_epi64(front, here));
            _mm512_storeu_si512(positions + result.words + in_front, _mm512_maskz_compress_epi64(back, after));
            result.words += size_t(all);
        }
    }
    if (far) _mm_sfence();
    _mm512_storeu_pd(result.squares, low);
    _mm512_storeu_pd(result.squares + 8, high);
    result.largest_g = _mm512_reduce_max_epu32(largest_g);
    result.largest_u = _mm512_reduce_max_epu32(largest_u);
    if (whole < s.count) fixed_any(g, s.part(whole, s.count - whole), positions, values, result);
}

void quantize_any512(const FixedGrid& g, const Stream& s, int64_t* positions, int32_t* values, FixedResult& result) {
    if (g.stochastic)
        (s.memory ? quantize<true, true> : quantize<false, true>)(g, s, positions, values, result);
    else
        (s.memory ? quantize<true, false> : quantize<false, false>)(g, s, positions, values, result);
}

}  // namespace

const HomomorphicKernels avx512_homomorphic = {cells_any, bloom_query_any, quantize_any512};

}  // namespace gradwire
#endif
