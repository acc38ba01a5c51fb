// The grid for x86 with AVX-512: up to 15 symbols are quantized and coded in one pass, as fp4 is in simd_avx512.cpp.
//
// Traps:
// - Adding the shift with the sign of y and truncating gives the signed multiple in one conversion. A multiple beyond
//   2^31 converts to the smallest integer, which is outside the range too; outliers are worked out again one by one.
// - Tables are indexed by the low four bits of the signed multiple.
#ifdef GRADWIRE_X86
#include "avx512_encode.h"
#include "grid_loop.h"
#include "streaming.h"

namespace gradwire {
namespace {

struct Vectors {
    Grid g;
    Float values, decay, inverse;
    Int shift, sign, largest, twice;

    explicit Vectors(const Grid& grid) : g(grid) {
        alignas(64) float v[16] = {};
        for (int m = -g.largest; m <= g.largest; m++) v[m & 15] = g.values[m + g.largest];
        values = _mm512_load_ps(v);
        decay = _mm512_set1_ps(g.decay);
        inverse = _mm512_set1_ps(g.inverse);
        shift = _mm512_castps_si512(_mm512_set1_ps(g.shift));
        sign = _mm512_set1_epi32(int(0x80000000u));
        largest = _mm512_set1_epi32(g.largest);
        twice = _mm512_set1_epi32(2 * g.largest);
    }

    template <bool Memory>
    GRADWIRE_INLINE Float load(const Stream& s, size_t i, __mmask16& bad) const {
        Float u = _mm512_loadu_ps(s.gradient + i);
        if (Memory) u = _mm512_add_ps(u, _mm512_mul_ps(_mm512_loadu_ps(s.memory + i), decay));
        bad |= _mm512_fpclass_ps_mask(u, 0x99);  // NaN of both kinds, infinities of both signs
        return u;
    }

    GRADWIRE_INLINE Int multiple(Float u, __mmask16& outside) const {
        Float y = _mm512_mul_ps(u, inverse);
        Int signed_shift = _mm512_ternarylogic_epi32(_mm512_castps_si512(y), shift, sign, 0xec);  // shift | (y & sign)
        Int m = _mm512_cvttps_epi32(_mm512_add_ps(y, _mm512_castsi512_ps(signed_shift)));
        outside = _mm512_cmpgt_epu32_mask(_mm512_add_epi32(m, largest), twice);
        return m;
    }

    // The multiples of 16 entries from `first` on, those in the mask listed apart, and what is left of their u.
    [[gnu::noinline]] Int take_out(Int multiples, Float& u, unsigned outside, uint64_t first,
                                   Outliers& outliers) const {
        alignas(64) int32_t m[16];
        alignas(64) float x[16];
        _mm512_store_si512(m, multiples);
        _mm512_store_ps(x, u);
        for (; outside; outside &= outside - 1) {
            const int l = __builtin_ctz(outside);
            const int multiple = grid_multiple<false>(g, x[l], 0);
            m[l] = outliers.add(first + uint64_t(l), multiple, g.largest);
            if (g.settle && !m[l]) x[l] -= g.beyond(multiple);
        }
        u = _mm512_load_ps(x);
        return _mm512_load_si512(m);
    }
};

// Symbols of a tensor without a memory: 64 entries at a time.
void quantize(const Grid& g, const Stream& s, uint8_t* symbols, Outliers& outliers) {
    if (s.memory || s.memory_out || g.stochastic) return grid_any(g, s, symbols, outliers);
    const Vectors c(g);
    size_t i = 0;
    for (; i + 64 <= s.count; i += 64) {
        Float u[4];
        Int m[4];
        __mmask16 outside[4];
        for (int v = 0; v < 4; v++) {
            u[v] = _mm512_loadu_ps(s.gradient + i + 16 * v);
            m[v] = c.multiple(u[v], outside[v]);
        }
        if (__builtin_expect(outside[0] | outside[1] | outside[2] | outside[3], 0))
            for (int v = 0; v < 4; v++)
                if (outside[v]) m[v] = c.take_out(m[v], u[v], outside[v], s.first + i + 16 * v, outliers);
        for (int v = 0; v < 4; v++)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + i + 16 * v),
                             _mm512_cvtepi32_epi8(_mm512_add_epi32(m[v], c.largest)));
    }
    grid_any(g, s.part(i, s.count - i), symbols + i, outliers);
}

template <int V, bool Twice, bool Memory, bool Update>
Coded chunk(const Grid& g, const Stream& stream, const RansTable& table, uint8_t* out, Outliers& outliers) {
    const Stream s = stream;  // a copy: stores to `out` could otherwise change it
    const bool far = s.streams();
    int symbol_at[16];
    for (int i = 0; i < 16; i++) {
        const int symbol = (i < 8 ? i : i - 16) + g.largest;
        symbol_at[i] = symbol >= 0 && symbol <= 2 * g.largest ? symbol : -1;
    }
    const Vectors c(g);
    auto next = [&](size_t row, Int* index) __attribute__((always_inline)) {
        Float u[V];
        __mmask16 bad = 0, outside[V];
        for (int v = 0; v < V; v++) u[v] = c.load<Memory>(s, row + 16 * v, bad);
        if (__builtin_expect(bad != 0, 0)) return false;
        for (int v = 0; v < V; v++) index[v] = c.multiple(u[v], outside[v]);
        for (int v = 0; v < V; v++)
            if (__builtin_expect(outside[v] != 0, 0))
                index[v] = c.take_out(index[v], u[v], outside[v], s.first + row + 16 * v, outliers);
        if (Update)
            for (int v = 0; v < V; v++)
                store(s.memory_out + row + 16 * v, _mm512_sub_ps(u[v], _mm512_permutexvar_ps(index[v], c.values)), far);
        return true;
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) {
        const Stream rest = s.part(row, width);
        if (!grid_finite(g, rest)) return false;
        const size_t from = outliers.count;
        grid_any(g, rest, last, outliers);
        settle(g, rest, outliers, from);
        return true;
    };
    const Coded coded = encode_chunk<V, Twice>(table, EncodeTables(table, symbol_at), s.count, out, next, tail);
    if (far) _mm_sfence();
    return coded;
}

template <int V, bool Twice>
Coded chunk_of(const Grid& g, const Stream& s, const RansTable& t, uint8_t* out, Outliers& o) {
    if (s.memory) return (s.memory_out ? chunk<V, Twice, true, true> : chunk<V, Twice, true, false>)(g, s, t, out, o);
    return (s.memory_out ? chunk<V, Twice, false, true> : chunk<V, Twice, false, false>)(g, s, t, out, o);
}

Coded quantize_rans(const Grid& g, const Stream& s, const RansTable& t, int lanes, uint8_t* out, uint8_t* scratch,
                    Outliers& o) {
    if (g.largest > 7 || lanes < 16) return grid_rans(g, s, t, lanes, out, scratch, o);
    const bool twice = t.precision > 8;
    switch (lanes) {
        case 16: return (twice ? chunk_of<1, true> : chunk_of<1, false>)(g, s, t, out, o);
        case 32: return (twice ? chunk_of<2, true> : chunk_of<2, false>)(g, s, t, out, o);
        default: return (twice ? chunk_of<4, true> : chunk_of<4, false>)(g, s, t, out, o);
    }
}

}  // namespace

const GridKernels avx512_grid = {quantize, quantize_rans};

}  // namespace gradwire
#endif
