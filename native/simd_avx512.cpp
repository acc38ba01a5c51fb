// The kernels for x86 with AVX-512 (with VBMI and VBMI2: Ice Lake, Zen 4 and later).
//
// Up to 16 symbols, a table is a register and a look-up is one permutation; all lanes of a row move together.
// Traps:
// - Permutations look at the low four bits of an index only. So the fused path works with signed numbers -5…5
//   instead of symbols 0…10 and never adds the offset: its tables are laid out in that order (`by_signed_index`).
// - vpmaddwd(a | b<<16, c | d<<16) = a*c + b*d in one instruction. All factors must be below 2^15: q < 2^14 in the
//   encoder (x < f * 2^(22-k)) and x >> k < 2^14 in the decoder.
// - Bytes are compressed in a register and stored whole: vpcompressb to memory is slow on Zen 4. The stores reach up to
//   63 bytes past the end, which is why rans_bound() asks for room.
// - Loads near the end of a chunk are masked, so that not a byte beyond it is touched.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "quantize.h"
#include "rans.h"

namespace gradwire {
namespace {

using Int = __m512i;
using Float = __m512;

// Byte i of four vectors of dwords, packed: the low byte of every lane of a row.
struct Packer {
    Int pair = _mm512_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                               0, 124, 120, 116, 112, 108, 104, 100, 96, 92, 88, 84, 80, 76, 72, 68, 64, 60, 56, 52, 48,
                               44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);

    template <int V>
    Int low_bytes(const Int* x) const {
        if (V == 1) return _mm512_castsi128_si512(_mm512_cvtepi32_epi8(x[0]));
        Int a = _mm512_permutex2var_epi8(x[0], pair, x[1]);
        if (V == 2) return a;
        Int b = _mm512_permutex2var_epi8(x[2], pair, x[3]);
        return _mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1);
    }
};

// The opposite: the bytes of vector v of a row, one to a dword, at the given byte of it.
template <int Place>
struct Spreader {
    static Int index(int v) {
        Int i = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(16 * v));
        return _mm512_slli_epi32(i, 8 * Place);
    }
    static constexpr __mmask64 mask = 0x1111111111111111ull << Place;
    static Int spread(Int bytes, Int index) { return _mm512_maskz_permutexvar_epi8(mask, index, bytes); }
};

template <int V>
inline uint64_t row_mask(const __mmask16* m) {
    uint64_t all = m[0];
    if (V > 1) all |= uint64_t(m[1]) << 16;
    if (V > 2) all |= uint64_t(m[2]) << 32 | uint64_t(m[3]) << 48;
    return all;
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

// One row of 16*V lanes; `index` are the symbols as the tables number them.
template <int V, bool Twice>
inline uint8_t* encode_vectors(const EncodeTables& t, const Packer& packer, const Int* index, Int* x, uint8_t* p) {
    const Int one = _mm512_set1_epi32(0x10000);
    Int limit[V];
    __mmask16 full[V];
    for (int v = 0; v < V; v++) limit[v] = _mm512_permutexvar_epi32(index[v], t.limit);
    for (int pass = 0; pass < (Twice ? 2 : 1); pass++) {
        for (int v = 0; v < V; v++) full[v] = _mm512_cmpge_epi32_mask(x[v], limit[v]);
        uint64_t mask = row_mask<V>(full);
        if (pass && !mask) break;
        _mm512_storeu_si512(p, _mm512_maskz_compress_epi8(mask, packer.low_bytes<V>(x)));
        p += _mm_popcnt_u64(mask);
        for (int v = 0; v < V; v++) x[v] = _mm512_mask_srli_epi32(x[v], full[v], x[v], 8);
    }
    for (int v = 0; v < V; v++) {
        Float r = _mm512_permutexvar_ps(index[v], t.reciprocal);
        Int q = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(x[v]), r));
        Int f = _mm512_permutexvar_epi32(index[v], t.factors);
        x[v] = _mm512_add_epi32(x[v], _mm512_madd_epi16(_mm512_or_si512(q, one), f));
    }
    return p;
}

// Rows of a chunk from any source of symbols: `next(i, index)` fills in row i, `tail(i, width, symbols)` the last one.
template <int V, bool Twice, class Next, class Tail>
inline size_t encode_chunk(const RansTable& table, const EncodeTables& t, size_t count, uint8_t* out, Next next, Tail tail) {
    constexpr int lanes = 16 * V;
    const Packer packer;
    Int x[V];
    for (int v = 0; v < V; v++) x[v] = _mm512_set1_epi32(kLow);
    uint8_t* p = out + 3 * lanes;
    size_t row = 0;
    for (; row + lanes <= count; row += lanes) {
        Int index[V];
        next(row, index);
        p = encode_vectors<V, Twice>(t, packer, index, x, p);
    }
    alignas(64) uint32_t states[lanes];
    for (int v = 0; v < V; v++) _mm512_store_si512(states + 16 * v, x[v]);
    if (row < count) {
        uint8_t symbols[lanes];
        tail(row, count - row, symbols);
        p = encode_row(table, symbols, int(count - row), states, p);
    }
    write_states(states, lanes, out);
    return p - out;
}

template <int V, bool Twice>
size_t encode_symbols(const RansTable& table, const uint8_t* symbols, size_t count, uint8_t* out) {
    int symbol_at[16];
    for (int i = 0; i < 16; i++) symbol_at[i] = i < table.symbols ? i : -1;
    auto next = [&](size_t row, Int* index) {
        for (int v = 0; v < V; v++)
            index[v] = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols + row + 16 * v)));
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) { std::memcpy(last, symbols + row, width); };
    return encode_chunk<V, Twice>(table, EncodeTables(table, symbol_at), count, out, next, tail);
}

size_t rans_encode(const RansTable& t, const uint8_t* symbols, size_t count, int lanes, uint8_t* out) {
    if (t.symbols <= 16 && lanes >= 16) {
        bool twice = t.precision > 8;
        switch (lanes) {
            case 16: return (twice ? encode_symbols<1, true> : encode_symbols<1, false>)(t, symbols, count, out);
            case 32: return (twice ? encode_symbols<2, true> : encode_symbols<2, false>)(t, symbols, count, out);
            default: return (twice ? encode_symbols<4, true> : encode_symbols<4, false>)(t, symbols, count, out);
        }
    }
    return rans_encode_any(t, symbols, count, lanes, out);
}

// ── conversion to fp4 in the same pass ──

// fp4's magnitudes are 0, .5, 1, 1.5, 2, 3: evenly spaced up to 2, so that rounding 2|y| to an integer does it up to
// 4, and one comparison does the rest. (2.5 is a tie between 2, twice the spacing there, and 3: it goes to 2.)
inline bool is_fp4(const Quantizer& q) {
    return q.has_sign && q.mantissa == 1 && q.min_exponent == 0 && q.top_index == 5 && !q.stochastic;
}

struct Fp4 {
    Float decay, twice_inverse, huge, four, five, values;
    Int one;

    explicit Fp4(const Quantizer& q) {
        decay = _mm512_set1_ps(q.decay);
        twice_inverse = _mm512_set1_ps(2 * q.inverse);
        huge = _mm512_set1_ps(FLT_MAX);
        four = _mm512_set1_ps(4.0f);
        five = _mm512_set1_ps(5.0f);
        alignas(64) float v[16] = {};
        for (int s = 0; s < 11; s++) v[(s - 5) & 15] = q.values[s];
        values = _mm512_load_ps(v);
    }

    // Smaller magnitude of the two, with the sign of the first.
    static Float limit(Float x, Float bound) { return _mm512_range_ps(x, bound, 0b0010); }

    template <bool Memory>
    Int signed_index(const Stream& s, size_t i) const {
        Float u = _mm512_loadu_ps(s.gradient + i);
        if (Memory) u = limit(_mm512_add_ps(u, _mm512_mul_ps(_mm512_loadu_ps(s.memory + i), decay)), huge);
        Float y = _mm512_mul_ps(u, twice_inverse);
        Int index = _mm512_cvtps_epi32(limit(y, four));
        __mmask16 beyond = _mm512_cmp_ps_mask(_mm512_abs_ps(y), five, _CMP_GT_OQ);
        index = _mm512_mask_add_epi32(index, beyond, index, _mm512_srai_epi32(index, 2));  // 4 → 5, -4 → -5
        if (s.memory_out) _mm512_storeu_ps(s.memory_out + i, _mm512_sub_ps(u, _mm512_permutexvar_ps(index, values)));
        return index;
    }
};

template <int V, bool Twice, bool Memory>
size_t fp4_chunk(const Quantizer& q, const Stream& s, const RansTable& table, uint8_t* out) {
    int symbol_at[16];
    for (int i = 0; i < 16; i++) {
        int symbol = (i < 8 ? i : i - 16) + 5;
        symbol_at[i] = symbol >= 0 && symbol < 11 ? symbol : -1;
    }
    const Fp4 fp4(q);
    auto next = [&](size_t row, Int* index) {
        for (int v = 0; v < V; v++) index[v] = fp4.signed_index<Memory>(s, row + 16 * v);
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) {
        Stream rest = {s.gradient + row, Memory ? s.memory + row : nullptr,
                       s.memory_out ? s.memory_out + row : nullptr, width, s.first + row};
        quantize_any(q, rest, last);
    };
    return encode_chunk<V, Twice>(table, EncodeTables(table, symbol_at), s.count, out, next, tail);
}

template <int V>
size_t fp4_chunk_of(const Quantizer& q, const Stream& s, const RansTable& t, uint8_t* out) {
    if (t.precision > 8) return (s.memory ? fp4_chunk<V, true, true> : fp4_chunk<V, true, false>)(q, s, t, out);
    return (s.memory ? fp4_chunk<V, false, true> : fp4_chunk<V, false, false>)(q, s, t, out);
}

size_t quantize_rans(const Quantizer& q, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                     uint8_t* scratch) {
    if (is_fp4(q) && lanes >= 16) {
        switch (lanes) {
            case 16: return fp4_chunk_of<1>(q, s, t, out);
            case 32: return fp4_chunk_of<2>(q, s, t, out);
            default: return fp4_chunk_of<4>(q, s, t, out);
        }
    }
    quantize_any(q, s, scratch);
    return rans_encode(t, scratch, s.count, lanes, out);
}

// ── decoding ──

// Tables of 256 bytes (for 8-bit precision) in four registers.
struct Bytes256 {
    Int a, b, c, d;
    explicit Bytes256(const uint8_t* t) {
        a = _mm512_loadu_si512(t);
        b = _mm512_loadu_si512(t + 64);
        c = _mm512_loadu_si512(t + 128);
        d = _mm512_loadu_si512(t + 192);
    }
    Int look_up(Int index) const {
        Int low = _mm512_permutex2var_epi8(a, index, b), high = _mm512_permutex2var_epi8(c, index, d);
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
    }
};

// Takes a byte for each lane in the mask, the highest lane's last.
template <int V>
inline bool take_bytes(const __mmask16* m, const uint8_t* begin, const uint8_t*& end, const uint8_t* limit,
                       const Int* place, Int* x) {
    uint64_t mask = row_mask<V>(m);
    size_t n = size_t(_mm_popcnt_u64(mask));
    if (size_t(end - begin) < n) return false;
    end -= n;
    Int bytes = limit - end >= 64 ? _mm512_loadu_si512(end) : _mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, n), end);
    bytes = _mm512_maskz_expand_epi8(mask, bytes);
    for (int v = 0; v < V; v++)
        x[v] = _mm512_or_si512(_mm512_mask_slli_epi32(x[v], m[v], x[v], 8), Spreader<0>::spread(bytes, place[v]));
    return true;
}

template <int V, Sink S>
inline void put_row(const Target& target, size_t row, Int symbol, int v, Float values) {
    if (S == Sink::symbols) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target.symbols + row + 16 * v), _mm512_cvtepi32_epi8(symbol));
        return;
    }
    float* out = target.out + row + 16 * v;
    Float value = _mm512_permutexvar_ps(symbol, values);
    _mm512_storeu_ps(out, S == Sink::add ? _mm512_add_ps(_mm512_loadu_ps(out), value) : value);
}

template <int V, Sink S, bool Coarse>
bool decode_chunk(const RansTable& t, const uint8_t* data, size_t length, size_t count, const Target& target) {
    constexpr int lanes = 16 * V;
    alignas(64) uint32_t states[lanes];
    if (length < size_t(3 * lanes) || !read_states(data, lanes, states)) return false;
    const uint8_t *begin = data + 3 * lanes, *end = data + length, *limit = end;

    size_t row = (count - 1) / lanes * lanes;
    if (count - row < size_t(lanes)) {  // the last row is not full
        end = decode_row<S>(t, row, int(count - row), states, begin, end, target);
        if (!end) return false;
        if (!row) return end == begin && all_at_start(states, lanes);
        row -= lanes;
    }

    alignas(64) int32_t factor[16] = {}, start[16] = {};
    alignas(64) float value[16] = {};
    alignas(64) uint8_t rest[256] = {};  // slot - start
    for (int s = 0; s < t.symbols; s++) {
        factor[s] = int32_t(t.frequency[s] | 0x10000u);
        start[s] = int32_t(t.start[s]);
        if (S != Sink::symbols) value[s] = target.values[s];
        if (Coarse)
            for (uint32_t i = 0; i < t.frequency[s]; i++) rest[t.start[s] + i] = uint8_t(i);
    }
    const Int factors = _mm512_load_si512(factor), starts = _mm512_load_si512(start);
    const Float values = _mm512_load_ps(value);
    const Bytes256 symbols(t.symbol_of_slot), rests(rest);
    const Packer packer;
    const Int slot_mask = _mm512_set1_epi32((1 << t.precision) - 1);
    const Int low = _mm512_set1_epi32(kLow), very_low = _mm512_set1_epi32(kLow >> 8);
    const __m128i shift = _mm_cvtsi32_si128(t.precision);
    Int x[V], place0[V], place2[V];
    for (int v = 0; v < V; v++) {
        x[v] = _mm512_load_si512(states + 16 * v);
        place0[v] = Spreader<0>::index(v);
        place2[v] = Spreader<2>::index(v);
    }

    for (;; row -= lanes) {
        __mmask16 empty[V];
        if (Coarse) {
            Int slots = packer.low_bytes<V>(x);
            Int symbol = symbols.look_up(slots), rest_bytes = rests.look_up(slots);
            for (int v = 0; v < V; v++) {
                Int s = Spreader<0>::spread(symbol, place0[v]);
                Int a = _mm512_or_si512(_mm512_srli_epi32(x[v], 8), Spreader<2>::spread(rest_bytes, place2[v]));
                x[v] = _mm512_madd_epi16(a, _mm512_permutexvar_epi32(s, factors));
                put_row<V, S>(target, row, s, v, values);
            }
        } else {
            uint64_t any = 0;
            for (int v = 0; v < V; v++) {
                Int slot = _mm512_and_si512(x[v], slot_mask);
                // Four bytes are read where one is wanted: RansTable pads its table for that.
                Int s = _mm512_and_si512(_mm512_i32gather_epi32(slot, t.symbol_of_slot, 1), _mm512_set1_epi32(255));
                Int rest_words = _mm512_slli_epi32(_mm512_sub_epi32(slot, _mm512_permutexvar_epi32(s, starts)), 16);
                Int a = _mm512_or_si512(_mm512_srl_epi32(x[v], shift), rest_words);
                x[v] = _mm512_madd_epi16(a, _mm512_permutexvar_epi32(s, factors));
                put_row<V, S>(target, row, s, v, values);
                empty[v] = _mm512_cmplt_epi32_mask(x[v], very_low);
                any |= empty[v];
            }
            if (any && !take_bytes<V>(empty, begin, end, limit, place0, x)) return false;
        }
        for (int v = 0; v < V; v++) empty[v] = _mm512_cmplt_epi32_mask(x[v], low);
        if (!take_bytes<V>(empty, begin, end, limit, place0, x)) return false;
        if (!row) break;
    }
    for (int v = 0; v < V; v++) _mm512_store_si512(states + 16 * v, x[v]);
    return end == begin && all_at_start(states, lanes);
}

template <int V, Sink S>
bool decode_chunk_of(const RansTable& t, const uint8_t* data, size_t length, size_t count, const Target& target) {
    return (t.precision == 8 ? decode_chunk<V, S, true> : decode_chunk<V, S, false>)(t, data, length, count, target);
}

template <int V>
bool decode_vectors(const RansTable& t, const uint8_t* data, size_t length, size_t count, Sink sink,
                    const Target& target) {
    switch (sink) {
        case Sink::symbols: return decode_chunk_of<V, Sink::symbols>(t, data, length, count, target);
        case Sink::store: return decode_chunk_of<V, Sink::store>(t, data, length, count, target);
        default: return decode_chunk_of<V, Sink::add>(t, data, length, count, target);
    }
}

bool rans_decode(const RansTable& t, const uint8_t* data, size_t length, size_t count, int lanes, Sink sink,
                 const Target& target) {
    if (t.symbols <= 16 && lanes >= 16) {
        switch (lanes) {
            case 16: return decode_vectors<1>(t, data, length, count, sink, target);
            case 32: return decode_vectors<2>(t, data, length, count, sink, target);
            default: return decode_vectors<4>(t, data, length, count, sink, target);
        }
    }
    return rans_decode_any(t, data, length, count, lanes, sink, target);
}

}  // namespace

const Kernels avx512_kernels = {"avx512", absmax_bits_loop, quantize_any, rans_encode, quantize_rans, rans_decode};

}  // namespace gradwire
#endif
