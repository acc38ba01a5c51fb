// Rows of rANS for x86 with AVX-512, from any source of symbols: what every fused encoder needs.
// simd_avx512.cpp names the traps.
#pragma once
#include <immintrin.h>

#include "quantize.h"
#include "rans.h"

namespace gradwire {
namespace {

using Int = __m512i;
using Float = __m512;

// Byte i of four vectors of dwords, packed: the low byte of every lane of a row.
struct Packer {
    Int pair = _mm512_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                               0, 0, 124, 120, 116, 112, 108, 104, 100, 96, 92, 88, 84, 80, 76, 72, 68, 64, 60, 56, 52,
                               48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);

    template <int V>
    GRADWIRE_INLINE Int low_bytes(const Int* x) const {
        if (V == 1) return _mm512_castsi128_si512(_mm512_cvtepi32_epi8(x[0]));
        Int a = _mm512_permutex2var_epi8(x[0], pair, x[1]);
        if (V == 2) return a;
        Int b = _mm512_permutex2var_epi8(x[2], pair, x[3]);
        return _mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1);
    }
};

// The opposite: the bytes of vector v of a row, one to a dword.
inline Int place_of(int v) {
    const Int lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_add_epi32(lane, _mm512_set1_epi32(16 * v));
}
GRADWIRE_INLINE Int spread(Int bytes, Int place) {
    return _mm512_maskz_permutexvar_epi8(0x1111111111111111ull, place, bytes);
}

// The masks of a row's vectors, joined.
template <int V>
GRADWIRE_INLINE __mmask64 row_mask(const __mmask16* m) {
    if (V == 1) return m[0];
    __mmask32 low = _mm512_kunpackw(m[1], m[0]);
    return V == 2 ? low : _mm512_kunpackd(_mm512_kunpackw(m[V - 1], m[V - 2]), low);
}

// ── encoding ──

struct EncodeTables {
    Int limit;    // f << (22-k): a state from here on emits first
    Float reciprocal;
    Int factors;  // (2^k - f) | start << 16

    EncodeTables(const RansTable& t, const int* symbol_at) {
        alignas(64) int32_t l[16], f[16];
        alignas(64) float r[16];
        for (int i = 0; i < 16; i++) {
            int s = symbol_at[i];
            l[i] = s < 0 ? 0x7fffffff : int32_t(t.frequency[s] << (kHighBits - t.precision));
            r[i] = s < 0 ? 0.0f : t.reciprocal[s];
            f[i] = s < 0 ? 0 : int32_t(((1u << t.precision) - t.frequency[s]) | t.start[s] << 16);
        }
        limit = _mm512_load_si512(l);
        reciprocal = _mm512_load_ps(r);
        factors = _mm512_load_si512(f);
    }
};

// The lanes in the masks emit their low bytes, in ascending order.
template <int V>
GRADWIRE_INLINE uint8_t* emit(const Packer& packer, const __mmask16* full, Int* x, uint8_t* p) {
    __mmask64 mask = row_mask<V>(full);
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi8(mask, packer.low_bytes<V>(x)));
    for (int v = 0; v < V; v++) x[v] = _mm512_mask_srli_epi32(x[v], full[v], x[v], 8);
    return p + _mm_popcnt_u64(mask);
}

// One row of 16*V lanes; `index` are the symbols as the tables number them.
template <int V, bool Twice>
GRADWIRE_INLINE uint8_t* encode_vectors(const EncodeTables& t, const Packer& packer, const Int* index, Int* x,
                                        uint8_t* p) {
    const Int one = _mm512_set1_epi32(0x10000);
    Int limit[V];
    __mmask16 full[V];
    for (int v = 0; v < V; v++) {
        limit[v] = _mm512_permutexvar_epi32(index[v], t.limit);
        full[v] = _mm512_cmpge_epi32_mask(x[v], limit[v]);
    }
    p = emit<V>(packer, full, x, p);
    if (Twice) {
        unsigned any = 0;
        for (int v = 0; v < V; v++) any |= full[v] = _mm512_cmpge_epi32_mask(x[v], limit[v]);
        if (__builtin_expect(any != 0, 0)) p = emit<V>(packer, full, x, p);
    }
    for (int v = 0; v < V; v++) {
        Float r = _mm512_permutexvar_ps(index[v], t.reciprocal);
        Int q = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(x[v]), r));
        Int f = _mm512_permutexvar_epi32(index[v], t.factors);
        x[v] = _mm512_dpwssd_epi32(x[v], _mm512_or_si512(q, one), f);
    }
    return p;
}

// Rows of a chunk from any source of symbols: `next(i, index)` fills in row i, `tail(i, width, symbols)` the last one.
// Both say false when they cannot go on.
template <int V, bool Twice, class Next, class Tail>
GRADWIRE_INLINE Coded encode_chunk(const RansTable& table, const EncodeTables& t, size_t count, uint8_t* out, Next next,
                                   Tail tail) {
    constexpr int lanes = 16 * V;
    const Packer packer;
    Int x[V];
    for (int v = 0; v < V; v++) x[v] = _mm512_set1_epi32(kLow);
    uint8_t* p = out + 3 * lanes;
    size_t row = 0;
    bool good = true;
    for (; row + lanes <= count; row += lanes) {
        Int index[V];
        if (!(good = next(row, index))) break;
        p = encode_vectors<V, Twice>(t, packer, index, x, p);
    }
    alignas(64) uint32_t states[lanes];
    for (int v = 0; v < V; v++) _mm512_store_si512(states + 16 * v, x[v]);
    uint8_t symbols[lanes];
    if (good && row < count && tail(row, count - row, symbols)) {
        p = encode_row(table, symbols, int(count - row), states, p);
        row = count;
    }
    write_states(states, lanes, out);
    return {size_t(p - out), row};
}

}  // namespace
}  // namespace gradwire
