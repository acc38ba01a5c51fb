// The kernels for x86 with AVX2: the plain loops of quantize.h, vectorised by the compiler, and rANS by hand.
//
// Up to 16 symbols, tables are in registers and all lanes of a group move together (avx2_tables.h).
// Traps:
// - vpmaddwd(a | b<<16, c | d<<16) = a*c + b*d, all factors below 2^15: q < 2^14 in the encoder (x < f * 2^(22-k)) and
//   x >> k < 2^14 in the decoder. Below 8 bits of precision this is not so: the generic loops do those.
// - Second emissions of a row stand behind all its first ones; they are rare, and so off the straight path.
// - Emitted bytes are stored eight at a time, those too many to be overwritten: rans_bound() has room.
// - Bytes are read as the eight that end where those not yet taken end. Eight before that there is always something of
//   the chunk: a row takes at most two bytes a lane, and three bytes a lane stand before the first. So whether there
//   were too few bytes is asked once, at the end of a row.
// - Chunks are not decoded side by side as in simd_avx512.cpp: a row is four times as many instructions here, enough
//   to hide that they depend on each other.
#ifdef GRADWIRE_X86
#include <type_traits>

#include "avx2_tables.h"
#include "quantize.h"
#include "rans.h"
#include "streaming.h"

namespace gradwire {
namespace {

// A row: groups of N = 1, 2 or 4 vectors.
template <int Groups, int N>
struct Shape {
    static constexpr int groups = Groups, n = N, vectors = Groups * N, lanes = 8 * vectors;
};

// f(a Shape) and f(std::true_type or std::false_type): from numbers to template arguments.
template <class F>
auto by_lanes(int lanes, F f) {
    switch (lanes) {
        case 8: return f(Shape<1, 1>());
        case 16: return f(Shape<1, 2>());
        case 32: return f(Shape<1, 4>());
        default: return f(Shape<2, 4>());
    }
}
template <class F>
auto by_bool(bool value, F f) {
    return value ? f(std::true_type()) : f(std::false_type());
}

bool covers(const RansTable& t, int lanes) { return t.symbols <= kEntries && t.precision >= 8 && lanes >= 8; }

// ── encoding ──

struct EncodeTables {
    Words limit;        // f << (22-k), from which on a state emits first, without its low byte: that is always zero
    Dwords reciprocal;  // the bits of a float
    Dwords factors;     // (2^k - f) | start << 16

    explicit EncodeTables(const RansTable& t)
        : limit([&](int s) { return t.frequency[s] << (kHighBits - t.precision - 8); }),
          reciprocal([&](int s) { return as_bits(t.reciprocal[s]); }),
          factors([&](int s) { return ((1u << t.precision) - t.frequency[s]) | t.start[s] << 16; }) {}
};

// The lanes of a group that have reached their limits emit their low bytes, in ascending order; returns which of them
// are below the limit afterwards.
template <int N>
GRADWIRE_INLINE Int emit(const EncodeTables& t, Int index, Int* x, uint8_t*& p) {
    const Int first = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x8007068080050480, 0x8003028080010080));
    const Int middle[2] = {first, _mm256_or_si256(first, _mm256_set1_epi8(8))};  // words to bytes 1 and 2 of dwords
    const Pair limits = t.limit.look_up(index);
    Int all_below = _mm256_set1_epi32(-1);
    for (int v = 0; v < N; v++) {
        Int limit = _mm256_shuffle_epi8(v < 2 ? limits.ab : limits.cd, middle[v % 2]);
        Int below = _mm256_cmpgt_epi32(limit, x[v]);
        unsigned full = mask_of(below) ^ 255;
        Int bytes = shuffle(x[v], kShuffles.gather[full]);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p),
                         _mm_or_si128(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
        p += _mm_popcnt_u32(full);
        x[v] = _mm256_srlv_epi32(x[v], _mm256_andnot_si256(below, _mm256_set1_epi32(8)));
        all_below = _mm256_and_si256(all_below, _mm256_cmpgt_epi32(limit, x[v]));
    }
    return all_below;
}

// One row; `index` are its symbols, packed.
template <class Row, bool Twice>
GRADWIRE_INLINE uint8_t* encode_vectors(const EncodeTables& t, const Int* index, Int* x, uint8_t* p) {
    Int below = _mm256_set1_epi32(-1), reciprocal[4], factors[4];
    for (int g = 0; g < Row::groups; g++) below = _mm256_and_si256(below, emit<Row::n>(t, index[g], x + g * Row::n, p));
    if (Twice && __builtin_expect(mask_of(below) != 255, 0))
        for (int g = 0; g < Row::groups; g++) emit<Row::n>(t, index[g], x + g * Row::n, p);
    for (int g = 0; g < Row::groups; g++, x += Row::n) {
        t.reciprocal.look_up<Row::n>(index[g], reciprocal);
        t.factors.look_up<Row::n>(index[g], factors);
        for (int v = 0; v < Row::n; v++) {
            Float quotient = _mm256_mul_ps(_mm256_cvtepi32_ps(x[v]), _mm256_castsi256_ps(reciprocal[v]));
            Int q = _mm256_or_si256(_mm256_cvttps_epi32(quotient), _mm256_set1_epi32(0x10000));
            x[v] = _mm256_add_epi32(x[v], _mm256_madd_epi16(q, factors[v]));
        }
    }
    return p;
}

// Rows of a chunk from any source of symbols: `next(i, index)` fills in row i, `tail(i, width, symbols)` the last one.
// Both say false when they cannot go on.
template <class Row, bool Twice, class Next, class Tail>
GRADWIRE_INLINE Coded encode_chunk(const RansTable& table, size_t count, uint8_t* out, Next next, Tail tail) {
    const EncodeTables t(table);
    Int x[Row::vectors], index[Row::groups];
    for (Int& state : x) state = _mm256_set1_epi32(kLow);
    uint8_t *p = out + 3 * Row::lanes, symbols[kMaxLanes] = {};
    size_t row = 0;
    bool good = true;
    for (; row + Row::lanes <= count && (good = next(row, index)); row += Row::lanes)
        p = encode_vectors<Row, Twice>(t, index, x, p);
    alignas(32) uint32_t states[Row::lanes];
    for (int v = 0; v < Row::vectors; v++) _mm256_store_si256(reinterpret_cast<Int*>(states + 8 * v), x[v]);
    if (good && row < count && tail(row, count - row, symbols)) {
        p = encode_row(table, symbols, int(count - row), states, p);
        row = count;
    }
    write_states(states, Row::lanes, out);
    return {size_t(p - out), row};
}

template <class Row, bool Twice>
size_t encode_symbols(const RansTable& t, const uint8_t* symbols, size_t count, uint8_t* out) {
    auto next = [&](size_t row, Int* index) __attribute__((always_inline)) {
        for (int g = 0; g < Row::groups; g++) index[g] = load_packed<Row::n>(symbols + row + 8 * Row::n * g);
        return true;
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) {
        std::memcpy(last, symbols + row, width);
        return true;
    };
    return encode_chunk<Row, Twice>(t, count, out, next, tail).bytes;
}

size_t rans_encode(const RansTable& t, const uint8_t* symbols, size_t count, int lanes, uint8_t* out) {
    if (!covers(t, lanes)) return rans_encode_any(t, symbols, count, lanes, out);
    return by_lanes(lanes, [&](auto row) {
        return by_bool(t.precision > 8, [&](auto twice) {
            return encode_symbols<decltype(row), decltype(twice)::value>(t, symbols, count, out);
        });
    });
}

// ── conversion to fp4 in the same pass ──

template <class Row, bool Twice, bool Memory, bool Update>
Coded fp4_chunk(const Quantizer& q, const Stream& stream, const RansTable& table, uint8_t* out) {
    const Stream s = stream;  // a copy: stores to `out` could otherwise change it
    const bool far = s.streams();
    const Float decay = _mm256_set1_ps(q.decay), twice_inverse = _mm256_set1_ps(2 * q.inverse);
    const Float magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const Dwords values([&](int i) { return i < q.symbols ? as_bits(q.values[i]) : 0; });
    auto next = [&](size_t row, Int* index) __attribute__((always_inline)) {
        Float u[Row::vectors], bad = _mm256_setzero_ps();
        for (int v = 0; v < Row::vectors; v++) {
            u[v] = _mm256_loadu_ps(s.gradient + row + 8 * v);
            if (Memory) u[v] = _mm256_add_ps(u[v], _mm256_mul_ps(_mm256_loadu_ps(s.memory + row + 8 * v), decay));
            bad = _mm256_or_ps(bad, _mm256_sub_ps(u[v], u[v]));  // NaN, if not finite
        }
        if (__builtin_expect(!_mm256_testz_si256(_mm256_castps_si256(bad), _mm256_castps_si256(bad)), 0)) return false;
        for (int g = 0; g < Row::groups; g++) {
            Int number[4], value[4];
            for (int v = 0; v < Row::n; v++) {
                Float signed_y = _mm256_mul_ps(u[g * Row::n + v], twice_inverse);
                Float y = _mm256_and_ps(signed_y, magnitude);
                Int i = _mm256_cvtps_epi32(_mm256_min_ps(y, _mm256_set1_ps(4.0f)));
                i = _mm256_sub_epi32(i, _mm256_castps_si256(_mm256_cmp_ps(y, _mm256_set1_ps(5.0f), _CMP_GT_OQ)));
                number[v] = _mm256_sign_epi32(i, _mm256_castps_si256(signed_y));
            }
            Pair words = pack<Row::n>(number);
            index[g] = _mm256_add_epi8(_mm256_packs_epi16(words.ab, words.cd), _mm256_set1_epi8(5));
            if (!Update) continue;
            values.look_up<Row::n>(index[g], value);
            for (int v = g * Row::n, i = 0; i < Row::n; v++, i++)
                store(s.memory_out + row + 8 * v, _mm256_sub_ps(u[v], _mm256_castsi256_ps(value[i])), far);
        }
        return true;
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) {
        const Stream rest = s.part(row, width);
        if (!all_finite(q, rest)) return false;
        quantize_any(q, rest, last);
        return true;
    };
    const Coded coded = encode_chunk<Row, Twice>(table, s.count, out, next, tail);
    if (far) _mm_sfence();
    return coded;
}

Coded quantize_rans(const Quantizer& q, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                    uint8_t* scratch) {
    if (is_fp4(q) && covers(t, lanes))
        return by_lanes(lanes, [&](auto row) {
            return by_bool(t.precision > 8, [&](auto twice) {
                constexpr bool k = decltype(twice)::value;
                using Row = decltype(row);
                auto chunk = s.memory && s.memory_out ? fp4_chunk<Row, k, true, true>
                             : s.memory               ? fp4_chunk<Row, k, true, false>
                             : s.memory_out           ? fp4_chunk<Row, k, false, true>
                                                      : fp4_chunk<Row, k, false, false>;
                return chunk(q, s, t, out);
            });
        });
    if (!all_finite(q, s)) return {0, 0};
    quantize_any(q, s, scratch);
    return {rans_encode(t, scratch, s.count, lanes, out), s.count};
}

// ── decoding ──

// The number of a slot's symbol is found by binary search. The starts to compare with are shifted by 8, 4, 2 and 1,
// so that the number so far is the index of the next one; they are smaller by one, as there is only "greater".
// Coarse tables (8 bits) are searched in bytes, with the highest bit flipped because comparisons are signed.
template <bool Coarse>
struct DecodeTables {
    using Table = std::conditional_t<Coarse, Bytes, Words>;
    Table above8, above4, above2, above1, frequency, start;
    Bytes symbols;
    Dwords values;
    Int slot_mask;
    __m128i shift;

    DecodeTables(const RansTable& t, const Present& present, const float* value)
        : above8([&](int i) { return present.before[i + 8] ^ (Coarse ? 128 : 0); }),
          above4([&](int i) { return present.before[i + 4] ^ (Coarse ? 128 : 0); }),
          above2([&](int i) { return present.before[i + 2] ^ (Coarse ? 128 : 0); }),
          above1([&](int i) { return present.before[i + 1] ^ (Coarse ? 128 : 0); }),
          frequency([&](int i) { return t.frequency[present.symbol[i]]; }),
          start([&](int i) { return t.start[present.symbol[i]]; }), symbols([&](int i) { return present.symbol[i]; }),
          values([&](int i) { return value ? as_bits(value[present.symbol[i]]) : 0; }),
          slot_mask(_mm256_set1_epi32((1 << t.precision) - 1)), shift(_mm_cvtsi32_si128(t.precision)) {}

    // One group: the numbers of its symbols, packed; its states become f * (x >> k) + slot - start.
    template <int N>
    GRADWIRE_INLINE Int step(Int* x) const {
        const Int zero = _mm256_setzero_si256();
        Int slot[N], factors[4], at = zero;  // factors: f | (slot - start) << 16
        for (int v = 0; v < N; v++) slot[v] = _mm256_and_si256(x[v], slot_mask);
        const Pair slots = pack<N>(slot);
        if constexpr (Coarse) {
            const Int bytes = _mm256_packus_epi16(slots.ab, slots.cd);
            const Int flipped = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
            auto search = [&](const Bytes& table, char size) __attribute__((always_inline)) {
                Int above = _mm256_cmpgt_epi8(flipped, table.look_up(at));
                at = _mm256_or_si256(at, _mm256_and_si256(above, _mm256_set1_epi8(size)));
            };
            search(above8, 8), search(above4, 4), search(above2, 2), search(above1, 1);
            Int rest = _mm256_sub_epi8(bytes, start.look_up(at));
            join<N>(join(frequency.look_up(at), zero), join(rest, zero), factors);
        } else {
            auto search = [&](const Words& table, char size) __attribute__((always_inline)) {
                Pair s = table.look_up(at);
                Int above = _mm256_packs_epi16(_mm256_cmpgt_epi16(slots.ab, s.ab), _mm256_cmpgt_epi16(slots.cd, s.cd));
                at = _mm256_or_si256(at, _mm256_and_si256(above, _mm256_set1_epi8(size)));
            };
            search(above8, 8), search(above4, 4), search(above2, 2), search(above1, 1);
            Pair s = start.look_up(at), rest = {_mm256_sub_epi16(slots.ab, s.ab), _mm256_sub_epi16(slots.cd, s.cd)};
            join<N>(frequency.look_up(at), rest, factors);
        }
        for (int v = 0; v < N; v++) {
            Int high = _mm256_or_si256(_mm256_srl_epi32(x[v], shift), _mm256_set1_epi32(0x10000));
            x[v] = _mm256_madd_epi16(high, factors[v]);
        }
        return at;
    }
};

// Every lane below the threshold takes a byte, the highest lane the last.
template <int V>
GRADWIRE_INLINE const uint8_t* take(uint32_t threshold, Int* x, const uint8_t* end) {
    for (int v = V - 1; v >= 0; v--) {
        Int empty = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(threshold)), x[v]);
        Int bytes = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(end - 8)));
        unsigned mask = mask_of(empty);
        end -= _mm_popcnt_u32(mask);
        x[v] = _mm256_or_si256(_mm256_sllv_epi32(x[v], _mm256_and_si256(empty, _mm256_set1_epi32(8))),
                               shuffle(bytes, kShuffles.scatter[mask]));
    }
    return end;
}

template <class Row, Sink S, bool Coarse>
bool decode_chunk(const RansTable& table, const DecodeTables<Coarse>& tables, const Chunk& c) {
    const DecodeTables<Coarse> t = tables;  // a copy: stores could otherwise change it
    alignas(32) uint32_t states[Row::lanes];
    if (c.length < size_t(3 * Row::lanes) || !read_states(c.data, Row::lanes, states)) return false;
    const uint8_t *begin = c.data + 3 * Row::lanes, *end = c.data + c.length;
    size_t row = c.count / Row::lanes * Row::lanes;
    if (row < c.count) end = decode_row<S>(table, row, int(c.count - row), states, begin, end, c.target);
    if (!end) return false;
    Int x[Row::vectors];
    for (int v = 0; v < Row::vectors; v++) x[v] = _mm256_load_si256(reinterpret_cast<const Int*>(states + 8 * v));
    while (row) {
        row -= Row::lanes;
        for (int g = 0; g < Row::groups; g++) {
            const size_t first = row + 8 * Row::n * g;
            Int at = t.template step<Row::n>(x + g * Row::n), value[4];
            if (S == Sink::symbols) {
                store_packed<Row::n>(c.target.symbols + first, t.symbols.look_up(at));
                continue;
            }
            t.values.template look_up<Row::n>(at, value);
            for (int v = 0; v < Row::n; v++) {
                const size_t i = first + 8 * v;
                Float f = _mm256_castsi256_ps(value[v]);
                if (S == Sink::add) f = _mm256_add_ps(_mm256_loadu_ps(c.target.onto + i), f);
                _mm256_storeu_ps(c.target.out + i, f);
            }
        }
        if (!Coarse) {
            Int least = x[0];
            for (const Int& state : x) least = _mm256_min_epi32(least, state);
            if (__builtin_expect(mask_of(_mm256_cmpgt_epi32(_mm256_set1_epi32(kLow >> 8), least)) != 0, 0))
                end = take<Row::vectors>(kLow >> 8, x, end);
        }
        end = take<Row::vectors>(kLow, x, end);
        if (end < begin) return false;
    }
    for (int v = 0; v < Row::vectors; v++) _mm256_store_si256(reinterpret_cast<Int*>(states + 8 * v), x[v]);
    return end == begin && all_at_start(states, Row::lanes);
}

template <Sink S>
bool decode_chunks(const RansTable& table, const Chunk* chunks, size_t n, int lanes) {
    const Present present(table);
    return by_bool(table.precision == 8 && present.count > 1, [&](auto coarse) {  // a frequency of 256 is not a byte
        const DecodeTables<decltype(coarse)::value> t(table, present, chunks[0].target.values);
        return by_lanes(lanes, [&](auto row) {
            for (size_t i = 0; i < n; i++)
                if (!decode_chunk<decltype(row), S>(table, t, chunks[i])) return false;
            return true;
        });
    });
}

bool rans_decode(const RansTable& t, const Chunk* chunks, size_t n, int lanes, Sink sink) {
    if (!covers(t, lanes)) return rans_decode_any(t, chunks, n, lanes, sink);
    auto decode = sink == Sink::symbols ? decode_chunks<Sink::symbols>
                  : sink == Sink::store ? decode_chunks<Sink::store>
                                        : decode_chunks<Sink::add>;
    return decode(t, chunks, n, lanes);
}

}  // namespace

const Kernels avx2_kernels = {"avx2",      absmax_bits_loop, quantize_any, squared_error_loop,
                              rans_encode, quantize_rans,    rans_decode};

}  // namespace gradwire
#endif
