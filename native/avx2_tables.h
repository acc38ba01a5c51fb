// Tables of 16 entries in AVX2 registers, and bytes in and out of vectors: what simd_avx2.cpp is made of.
//
// A table of bytes is one register, and vpshufb looks 32 lanes up at once; wider tables are several such registers, one
// for each byte. (A gather from memory would take 5 ms for 2^24 lanes on Zen 4, as much as all the rest of decoding.)
// Traps:
// - These shuffles, and packs and unpacks, stay within 128-bit halves. So the bytes of four vectors a, b, c, d of eight
//   lanes stand in the order of packs ("packed"): a0-3 b0-3 c0-3 d0-3 in the low half, a4-7 b4-7 c4-7 d4-7 in the high
//   one. Unpacks undo exactly that. Only symbols in memory are in plain order (`load_packed`, `store_packed`).
// - There may be fewer vectors: N = 1, 2 or 4. The packed bytes of the others are rubbish that nobody looks at.
// - vpshufb gives zero where an index has its highest bit set: indices are symbols, never negative numbers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "quantize.h"

namespace gradwire {
namespace {

using Int = __m256i;
using Float = __m256;
constexpr int kEntries = 16;  // of a table

struct Bytes {
    Int at;
    template <class F>  // entry i is the low byte of f(i)
    explicit Bytes(F f) {
        alignas(16) uint8_t b[kEntries];
        for (int i = 0; i < kEntries; i++) b[i] = uint8_t(f(i));
        at = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(b)));
    }
    GRADWIRE_INLINE Int look_up(Int index) const { return _mm256_shuffle_epi8(at, index); }
};

struct Pair {  // words of the vectors a, b and of c, d, packed
    Int ab, cd;
};

GRADWIRE_INLINE Pair join(Int low, Int high) {  // words from bytes
    return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
}
template <int N>
GRADWIRE_INLINE void join(const Pair& low, const Pair& high, Int* out) {  // dwords from words
    out[0] = _mm256_unpacklo_epi16(low.ab, high.ab);
    if (N > 1) out[1] = _mm256_unpackhi_epi16(low.ab, high.ab);
    if (N > 2) out[2] = _mm256_unpacklo_epi16(low.cd, high.cd);
    if (N > 2) out[3] = _mm256_unpackhi_epi16(low.cd, high.cd);
}

struct Words {
    Bytes low, high;
    template <class F>
    explicit Words(F f) : low(f), high([&](int i) { return f(i) >> 8; }) {}
    GRADWIRE_INLINE Pair look_up(Int index) const { return join(low.look_up(index), high.look_up(index)); }
};

struct Dwords {
    Words low, high;
    template <class F>
    explicit Dwords(F f) : low(f), high([&](int i) { return f(i) >> 16; }) {}
    template <int N>
    GRADWIRE_INLINE void look_up(Int index, Int* out) const {
        join<N>(low.look_up(index), high.look_up(index), out);
    }
};

// Words from dwords that are small enough, signed.
template <int N>
GRADWIRE_INLINE Pair pack(const Int* x) {
    Int ab = _mm256_packs_epi32(x[0], x[N > 1]);
    return {ab, N > 2 ? _mm256_packs_epi32(x[N / 2], x[N - 1]) : ab};
}

template <int N>
GRADWIRE_INLINE Int load_packed(const uint8_t* p) {
    auto from = reinterpret_cast<const __m128i*>(p);
    Int plain = N == 1   ? _mm256_zextsi128_si256(_mm_loadl_epi64(from))
                : N == 2 ? _mm256_zextsi128_si256(_mm_loadu_si128(from))
                         : _mm256_loadu_si256(reinterpret_cast<const Int*>(p));
    return _mm256_permutevar8x32_epi32(plain, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

template <int N>
GRADWIRE_INLINE void store_packed(uint8_t* p, Int packed) {
    auto to = reinterpret_cast<__m128i*>(p);
    Int plain = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (N == 1) _mm_storel_epi64(to, _mm256_castsi256_si128(plain));
    if (N == 2) _mm_storeu_si128(to, _mm256_castsi256_si128(plain));
    if (N == 4) _mm256_storeu_si256(reinterpret_cast<Int*>(p), plain);
}

// For every mask of eight lanes: the shuffle that brings the low bytes of its lanes to the front of what an OR of both
// halves gives, and the one that gives the last of eight bytes (the same in both halves) to its lanes. 128 is a zero.
struct MaskShuffles {
    alignas(32) uint8_t gather[256][32], scatter[256][32];
    constexpr MaskShuffles() : gather(), scatter() {
        for (int m = 0; m < 256; m++) {
            for (int i = 0; i < 32; i++) gather[m][i] = scatter[m][i] = 128;
            int n = 0;  // lanes in the mask so far
            for (int lane = 0; lane < 8; lane++)
                if (m >> lane & 1) gather[m][lane / 4 * 16 + n++] = uint8_t(lane % 4 * 4);
            for (int lane = 0, i = 8 - n; lane < 8; lane++)
                if (m >> lane & 1) scatter[m][lane * 4] = uint8_t(i++);
        }
    }
};
constexpr MaskShuffles kShuffles;

GRADWIRE_INLINE Int shuffle(Int x, const uint8_t* control) {
    return _mm256_shuffle_epi8(x, _mm256_load_si256(reinterpret_cast<const Int*>(control)));
}
GRADWIRE_INLINE unsigned mask_of(Int x) { return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(x))); }

}  // namespace
}  // namespace gradwire
