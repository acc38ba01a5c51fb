// The kernels for arm64 with NEON: rANS and fp4 by hand, the plain loops of quantize.h as the compiler vectorises them.
//
// They were written and tested under emulation only; how fast they are on a machine nobody has measured.
// Up to 16 symbols, tables are in registers and 16 lanes are looked up at once (neon_tables.h). With more symbols,
// decoding looks up lane by lane, and takes bytes by vectors; encoding is the plain loop.
// Traps:
// - Numbers that fit in words are multiplied as words, with sums in dwords (UMLAL): q < 2^14 in the encoder
//   (x < f * 2^(22-k)), x >> k < 2^14 in the decoder. Below 8 bits of precision this is not so: the generic loops do
//   those.
// - Where each eight lanes' bytes go is known from the running counts of the row's mask (RowMask), so that no store
//   waits for the one before it. They are stored eight at a time, in order, those too many to be overwritten:
//   rans_bound() has room.
// - Second emissions of a row stand behind all its first ones; they are rare, and so off the straight path.
// - Bytes are read as the eight that end where those of eight lanes end. Eight before that there is always something of
//   the chunk: a row takes at most two bytes a lane, and three bytes a lane stand before the first. So whether there
//   were too few bytes is asked once, at the end of a row.
// - absmax_bits, quantize and squared_error are integer maxima, roundings and sums in plain loops that compilers
//   vectorise for NEON wherever they compile for arm64: these are the portable ones.
#include "kernels.h"

#ifdef GRADWIRE_NEON
#include <type_traits>

#include "neon_tables.h"
#include "rans.h"

namespace gradwire {
namespace {

template <int N>
using Groups = std::integral_constant<int, N>;

// f(the number of groups) and f(std::true_type or std::false_type): from numbers to template arguments.
template <class F>
auto by_lanes(int lanes, F f) {
    switch (lanes) {
        case 16: return f(Groups<1>());
        case 32: return f(Groups<2>());
        default: return f(Groups<4>());
    }
}
template <class F>
auto by_bool(bool value, F f) {
    return value ? f(std::true_type()) : f(std::false_type());
}

bool in_groups(const RansTable& t, int lanes) { return t.precision >= 8 && lanes >= kGroup; }
bool covers(const RansTable& t, int lanes) { return in_groups(t, lanes) && t.symbols <= kEntries; }

// ── encoding ──

struct EncodeTables {
    Words limit;  // f << (22-k), from which on a state emits first, without its low byte: that is always zero
    Floats reciprocal;
    Words complement, start;  // 2^k - f

    explicit EncodeTables(const RansTable& t)
        : limit([&](int s) { return t.frequency[s] << (kHighBits - t.precision - 8); }),
          reciprocal([&](int s) { return t.reciprocal[s]; }),
          complement([&](int s) { return (1u << t.precision) - t.frequency[s]; }),
          start([&](int s) { return t.start[s]; }) {}
};

GRADWIRE_INLINE Pair at_limit(const Pair& limit, const U32* x) {
    return {vcgeq_u16(vshrn_high_n_u32(vshrn_n_u32(x[0], 8), x[1], 8), limit.low),
            vcgeq_u16(vshrn_high_n_u32(vshrn_n_u32(x[2], 8), x[3], 8), limit.high)};
}

// The lanes of all groups that have reached their limits emit their low bytes, in ascending order. Returns whether some
// have still reached them.
template <int N>
GRADWIRE_INLINE bool emit(const EncodeTables& t, const U8* index, U32* x, uint8_t*& p) {
    U8 full[N], bytes[N];
    U16 again = vdupq_n_u16(0);
    for (int g = 0; g < N; g++) {
        U32* y = x + 4 * g;
        const Pair limit = t.limit.look_up(index[g]), reached = at_limit(limit, y);
        full[g] = low_bytes(reached.low, reached.high);
        bytes[g] = low_bytes(y);
        // A mask of a word, widened and times 8, is a shift by -8.
        const int16x8_t low = vreinterpretq_s16_u16(reached.low), high = vreinterpretq_s16_u16(reached.high);
        y[0] = vshlq_u32(y[0], vshll_n_s16(vget_low_s16(low), 3));
        y[1] = vshlq_u32(y[1], vshll_high_n_s16(low, 3));
        y[2] = vshlq_u32(y[2], vshll_n_s16(vget_low_s16(high), 3));
        y[3] = vshlq_u32(y[3], vshll_high_n_s16(high, 3));
        const Pair still = at_limit(limit, y);
        again = vorrq_u16(again, vorrq_u16(still.low, still.high));
    }
    const RowMask mask = RowMask::of<N>(full);
    for (int g = 0; g < N; g++) {
        const uint8x8_t low = vld1_u8(kShuffles.gather[mask.eight(2 * g)]),
                        high = in_high_half(vld1_u8(kShuffles.gather[mask.eight(2 * g + 1)]));
        vst1_u8(p + mask.before(2 * g), vqtbl1_u8(bytes[g], low));
        vst1_u8(p + mask.before(2 * g + 1), vqtbl1_u8(bytes[g], high));
    }
    p += mask.count<N>();
    return any(again);
}

// One row; `index` are its symbols.
template <int N, bool Twice>
GRADWIRE_INLINE uint8_t* encode_vectors(const EncodeTables& t, const U8* index, U32* x, uint8_t* p) {
    const bool again = emit<N>(t, index, x, p);
    if (Twice && __builtin_expect(again, 0)) emit<N>(t, index, x, p);
    for (int g = 0; g < N; g++, x += 4) {
        F32 reciprocal[4];
        U32 q[4];
        t.reciprocal.look_up(index[g], reciprocal);
        const Pair start = t.start.look_up(index[g]), factor = t.complement.look_up(index[g]);
        for (int v = 0; v < 4; v++) q[v] = vcvtq_u32_f32(vmulq_f32(vcvtq_f32_u32(x[v]), reciprocal[v]));
        const U16 low = low_words(q[0], q[1]), high = low_words(q[2], q[3]);
        x[0] = vaddw_u16(x[0], vget_low_u16(start.low));
        x[1] = vaddw_high_u16(x[1], start.low);
        x[2] = vaddw_u16(x[2], vget_low_u16(start.high));
        x[3] = vaddw_high_u16(x[3], start.high);
        x[0] = vmlal_u16(x[0], vget_low_u16(low), vget_low_u16(factor.low));
        x[1] = vmlal_high_u16(x[1], low, factor.low);
        x[2] = vmlal_u16(x[2], vget_low_u16(high), vget_low_u16(factor.high));
        x[3] = vmlal_high_u16(x[3], high, factor.high);
    }
    return p;
}

// Rows of a chunk from any source of symbols: `next(i, index)` fills in row i, `tail(i, width, symbols)` the last one.
// Both say false when they cannot go on.
template <int N, bool Twice, class Next, class Tail>
GRADWIRE_INLINE Coded encode_chunk(const RansTable& table, size_t count, uint8_t* out, Next next, Tail tail) {
    constexpr size_t lanes = kGroup * N;
    const EncodeTables t(table);
    U32 x[4 * N];
    U8 index[N];
    for (U32& state : x) state = vdupq_n_u32(kLow);
    uint8_t *p = out + 3 * lanes, symbols[kMaxLanes] = {};
    size_t row = 0;
    bool good = true;
    for (; row + lanes <= count && (good = next(row, index)); row += lanes)
        p = encode_vectors<N, Twice>(t, index, x, p);
    uint32_t states[lanes];
    for (int v = 0; v < 4 * N; v++) vst1q_u32(states + 4 * v, x[v]);
    if (good && row < count && tail(row, count - row, symbols)) {
        p = encode_row(table, symbols, int(count - row), states, p);
        row = count;
    }
    write_states(states, lanes, out);
    return {size_t(p - out), row};
}

template <int N, bool Twice>
size_t encode_symbols(const RansTable& t, const uint8_t* symbols, size_t count, uint8_t* out) {
    auto next = [&](size_t row, U8* index) __attribute__((always_inline)) {
        for (int g = 0; g < N; g++) index[g] = vld1q_u8(symbols + row + size_t(kGroup * g));
        return true;
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) {
        std::memcpy(last, symbols + row, width);
        return true;
    };
    return encode_chunk<N, Twice>(t, count, out, next, tail).bytes;
}

size_t rans_encode(const RansTable& t, const uint8_t* symbols, size_t count, int lanes, uint8_t* out) {
    if (!covers(t, lanes)) return rans_encode_any(t, symbols, count, lanes, out);
    return by_lanes(lanes, [&](auto n) {
        return by_bool(t.precision > 8, [&](auto twice) {
            return encode_symbols<decltype(n)::value, decltype(twice)::value>(t, symbols, count, out);
        });
    });
}

// ── conversion to fp4 in the same pass ──

template <int N, bool Twice, bool Memory, bool Update>
Coded fp4_chunk(const Quantizer& q, const Stream& stream, const RansTable& table, uint8_t* out) {
    const Stream s = stream;  // a copy: stores to `out` could otherwise change it
    const F32 decay = vdupq_n_f32(q.decay), twice_inverse = vdupq_n_f32(2 * q.inverse);
    const F32 four = vdupq_n_f32(4.0f), five = vdupq_n_f32(5.0f);
    const U8 zero = vdupq_n_u8(uint8_t(q.zero_symbol));
    const Floats values([&](int i) { return i < q.symbols ? q.values[i] : 0.0f; });
    auto next = [&](size_t row, U8* index) __attribute__((always_inline)) {
        F32 u[4 * N];
        U32 most = vdupq_n_u32(0);
        for (int g = 0; g < N; g++) load_group<Memory>(s, row + size_t(kGroup * g), decay, u + 4 * g, most);
        if (__builtin_expect(!finite(most), 0)) return false;
        for (int g = 0; g < N; g++) {
            int32x4_t number[4];
            U32 beyond[4];
            for (int v = 0; v < 4; v++) {
                const F32 y = vmulq_f32(u[4 * g + v], twice_inverse);
                beyond[v] = vcagtq_f32(y, five);
                number[v] = vcvtnq_s32_f32(vmaxq_f32(vminq_f32(y, four), vnegq_f32(four)));
            }
            const int8x16_t up_to_four = vreinterpretq_s8_u8(low_bytes(number));
            const int8x16_t more = vandq_s8(vshrq_n_s8(up_to_four, 2), vreinterpretq_s8_u8(low_bytes(beyond)));
            index[g] = vaddq_u8(vreinterpretq_u8_s8(vaddq_s8(up_to_four, more)), zero);  // 4 → 5, -4 → -5
            if (!Update) continue;
            F32 value[4];
            values.look_up(index[g], value);
            for (int v = 0; v < 4; v++)
                vst1q_f32(s.memory_out + row + size_t(kGroup * g + 4 * v), vsubq_f32(u[4 * g + v], value[v]));
        }
        return true;
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) {
        const Stream rest = s.part(row, width);
        if (!all_finite(q, rest)) return false;
        quantize_any(q, rest, last);
        return true;
    };
    return encode_chunk<N, Twice>(table, s.count, out, next, tail);
}

Coded quantize_rans(const Quantizer& q, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                    uint8_t* scratch) {
    if (is_fp4(q) && covers(t, lanes))
        return by_lanes(lanes, [&](auto n) {
            return by_bool(t.precision > 8, [&](auto twice) {
                constexpr bool k = decltype(twice)::value;
                constexpr int N = decltype(n)::value;
                auto chunk = s.memory && s.memory_out ? fp4_chunk<N, k, true, true>
                             : s.memory               ? fp4_chunk<N, k, true, false>
                             : s.memory_out           ? fp4_chunk<N, k, false, true>
                                                      : fp4_chunk<N, k, false, false>;
                return chunk(q, s, t, out);
            });
        });
    if (!all_finite(q, s)) return {0, 0};
    quantize_any(q, s, scratch);
    return {rans_encode(t, scratch, s.count, lanes, out), s.count};
}

// ── decoding ──

// The number of a slot's symbol is found by binary search. The starts to compare with are shifted by 4, 2 and 1, so that
// the number so far is the index of the next one; they are smaller by one, to be asked for "greater". Coarse tables (8
// bits) are searched in bytes.
template <bool Coarse>
struct DecodeTables {
    using Table = std::conditional_t<Coarse, Bytes, Words>;
    Table above4, above2, above1, frequency, start;
    Bytes symbols;
    Floats values;
    uint16_t above8;
    U16 slot_mask;
    int32x4_t shift;

    DecodeTables(const RansTable& t, const Present& present, const float* value)
        : above4([&](int i) { return present.before[i + 4]; }), above2([&](int i) { return present.before[i + 2]; }),
          above1([&](int i) { return present.before[i + 1]; }),
          frequency([&](int i) { return t.frequency[present.symbol[i]]; }),
          start([&](int i) { return t.start[present.symbol[i]]; }), symbols([&](int i) { return present.symbol[i]; }),
          values([&](int i) { return value ? value[present.symbol[i]] : 0.0f; }), above8(uint16_t(present.before[8])),
          slot_mask(vdupq_n_u16(uint16_t((1 << t.precision) - 1))), shift(vdupq_n_s32(-t.precision)) {}

    // One group: the numbers of its symbols; its states become f * (x >> k) + slot - start.
    GRADWIRE_INLINE U8 step(U32* x) const {
        U8 at;
        Pair factor, rest, high;
        if constexpr (Coarse) {
            const U8 slots = low_bytes(x);
            at = vandq_u8(vcgtq_u8(slots, vdupq_n_u8(uint8_t(above8))), vdupq_n_u8(8));
            auto search = [&](const Bytes& table, uint8_t size) __attribute__((always_inline)) {
                at = vbslq_u8(vdupq_n_u8(size), vcgtq_u8(slots, table.look_up(at)), at);
            };
            search(above4, 4), search(above2, 2), search(above1, 1);
            const U8 f = frequency.look_up(at), left = vsubq_u8(slots, start.look_up(at)), zero = vdupq_n_u8(0);
            factor = join(f, zero);
            rest = join(left, zero);
            high = {vshrn_high_n_u32(vshrn_n_u32(x[0], 8), x[1], 8), vshrn_high_n_u32(vshrn_n_u32(x[2], 8), x[3], 8)};
        } else {
            const Pair slots = {vandq_u16(low_words(x[0], x[1]), slot_mask),
                                vandq_u16(low_words(x[2], x[3]), slot_mask)};
            auto above = [&](U16 low, U16 high_) __attribute__((always_inline)) {
                return low_bytes(vcgtq_u16(slots.low, low), vcgtq_u16(slots.high, high_));
            };
            at = vandq_u8(above(vdupq_n_u16(above8), vdupq_n_u16(above8)), vdupq_n_u8(8));
            auto search = [&](const Words& table, uint8_t size) __attribute__((always_inline)) {
                const Pair s = table.look_up(at);
                at = vbslq_u8(vdupq_n_u8(size), above(s.low, s.high), at);
            };
            search(above4, 4), search(above2, 2), search(above1, 1);
            const Pair s = start.look_up(at);
            factor = frequency.look_up(at);
            rest = {vsubq_u16(slots.low, s.low), vsubq_u16(slots.high, s.high)};
            high = {low_words(vshlq_u32(x[0], shift), vshlq_u32(x[1], shift)),
                    low_words(vshlq_u32(x[2], shift), vshlq_u32(x[3], shift))};
        }
        x[0] = vaddw_u16(vmull_u16(vget_low_u16(high.low), vget_low_u16(factor.low)), vget_low_u16(rest.low));
        x[1] = vaddw_high_u16(vmull_high_u16(high.low, factor.low), rest.low);
        x[2] = vaddw_u16(vmull_u16(vget_low_u16(high.high), vget_low_u16(factor.high)), vget_low_u16(rest.high));
        x[3] = vaddw_high_u16(vmull_high_u16(high.high, factor.high), rest.high);
        return at;
    }
};

// Every lane below the threshold takes a byte, the highest lane the last.
template <int N>
GRADWIRE_INLINE const uint8_t* take(uint32_t threshold, U32* x, const uint8_t* end) {
    U8 empty[N];
    for (int g = 0; g < N; g++) {
        U32 below[4];
        for (int v = 0; v < 4; v++) {
            below[v] = vcltq_u32(x[4 * g + v], vdupq_n_u32(threshold));
            const U32 shift = vandq_u32(below[v], vdupq_n_u32(8));
            x[4 * g + v] = vshlq_u32(x[4 * g + v], vreinterpretq_s32_u32(shift));
        }
        empty[g] = low_bytes(below);
    }
    const RowMask mask = RowMask::of<N>(empty);
    end -= mask.count<N>();
    const uint8_t* eight = end - 8;
    for (int g = 0; g < N; g++, x += 4) {
        const U8 bytes = vcombine_u8(vld1_u8(eight + mask.before(2 * g + 1)), vld1_u8(eight + mask.before(2 * g + 2)));
        const U8 places = vcombine_u8(vld1_u8(kShuffles.scatter[mask.eight(2 * g)]),
                                      in_high_half(vld1_u8(kShuffles.scatter[mask.eight(2 * g + 1)])));
        const Pair taken = join(vqtbl1q_u8(bytes, places), vdupq_n_u8(0));
        x[0] = vaddw_u16(x[0], vget_low_u16(taken.low));
        x[1] = vaddw_high_u16(x[1], taken.low);
        x[2] = vaddw_u16(x[2], vget_low_u16(taken.high));
        x[3] = vaddw_high_u16(x[3], taken.high);
    }
    return end;
}

// Both turns of a row; a second byte, which stands behind the others, is rare, and there is none with 8 bits.
template <int N, bool Coarse>
GRADWIRE_INLINE const uint8_t* take_row(U32* x, const uint8_t* end) {
    if (!Coarse) {
        U32 least = x[0];
        for (int v = 1; v < 4 * N; v++) least = vminq_u32(least, x[v]);
        if (__builtin_expect(vminvq_u32(least) < kLow >> 8, 0)) end = take<N>(kLow >> 8, x, end);
    }
    return take<N>(kLow, x, end);
}

// A chunk from its last row to the first: `decode(row, x)` takes the symbols of a row from the states.
template <int N, Sink S, bool Coarse, class Decode>
GRADWIRE_INLINE bool decode_rows(const RansTable& table, const Chunk& c, Decode decode) {
    constexpr size_t lanes = kGroup * N;
    uint32_t states[lanes];
    if (c.length < 3 * lanes || !read_states(c.data, lanes, states)) return false;
    const uint8_t *begin = c.data + 3 * lanes, *end = c.data + c.length;
    size_t row = c.count / lanes * lanes;
    if (row < c.count) end = decode_row<S>(table, row, int(c.count - row), states, begin, end, c.target);
    if (!end) return false;
    U32 x[4 * N];
    for (int v = 0; v < 4 * N; v++) x[v] = vld1q_u32(states + 4 * v);
    while (row) {
        row -= lanes;
        decode(row, x);
        end = take_row<N, Coarse>(x, end);
        if (end < begin) return false;
    }
    for (int v = 0; v < 4 * N; v++) vst1q_u32(states + 4 * v, x[v]);
    return end == begin && all_at_start(states, int(lanes));
}

template <int N, Sink S, bool Coarse>
bool decode_chunk(const RansTable& table, const DecodeTables<Coarse>& tables, const Chunk& c) {
    const DecodeTables<Coarse> t = tables;  // a copy: stores could otherwise change it
    const Target target = c.target;
    return decode_rows<N, S, Coarse>(table, c, [&](size_t row, U32* x) __attribute__((always_inline)) {
        for (int g = 0; g < N; g++) {
            const size_t first = row + size_t(kGroup * g);
            const U8 at = t.step(x + 4 * g);
            if (S == Sink::symbols) {
                vst1q_u8(target.symbols + first, t.symbols.look_up(at));
                continue;
            }
            F32 value[4];
            t.values.look_up(at, value);
            for (int v = 0; v < 4; v++) {
                const size_t i = first + size_t(4 * v);
                if (S == Sink::add) value[v] = vaddq_f32(vld1q_f32(target.onto + i), value[v]);
                vst1q_f32(target.out + i, value[v]);
            }
        }
    });
}

// With more symbols than a table in registers has: these are looked up in memory, lane by lane.
template <int N, Sink S>
bool decode_any_chunk(const RansTable& t, const Chunk& c) {
    const Target target = c.target;
    const uint32_t mask = (1u << t.precision) - 1;
    return decode_rows<N, S, false>(t, c, [&](size_t row, U32* x) __attribute__((always_inline)) {
        uint32_t states[kGroup * N];
        for (int v = 0; v < 4 * N; v++) vst1q_u32(states + 4 * v, x[v]);
        for (size_t l = 0; l < size_t(kGroup * N); l++) {
            const uint32_t slot = states[l] & mask;
            const uint8_t s = t.symbol_of_slot[slot];
            put<S>(target, row + l, s);
            states[l] = t.frequency[s] * (states[l] >> t.precision) + slot - t.start[s];
        }
        for (int v = 0; v < 4 * N; v++) x[v] = vld1q_u32(states + 4 * v);
    });
}

template <Sink S>
bool decode_chunks(const RansTable& table, const Chunk* chunks, size_t n, int lanes) {
    return by_lanes(lanes, [&](auto groups) {
        constexpr int N = decltype(groups)::value;
        if (!covers(table, lanes)) {
            for (size_t i = 0; i < n; i++)
                if (!decode_any_chunk<N, S>(table, chunks[i])) return false;
            return true;
        }
        const Present present(table);
        return by_bool(table.precision == 8 && present.count > 1, [&](auto coarse) {  // 256 is not a byte
            const DecodeTables<decltype(coarse)::value> t(table, present, chunks[0].target.values);
            for (size_t i = 0; i < n; i++)
                if (!decode_chunk<N, S>(table, t, chunks[i])) return false;
            return true;
        });
    });
}

bool rans_decode(const RansTable& t, const Chunk* chunks, size_t n, int lanes, Sink sink) {
    if (!in_groups(t, lanes)) return rans_decode_any(t, chunks, n, lanes, sink);
    auto decode = sink == Sink::symbols ? decode_chunks<Sink::symbols>
                  : sink == Sink::store ? decode_chunks<Sink::store>
                                        : decode_chunks<Sink::add>;
    return decode(t, chunks, n, lanes);
}

}  // namespace

const Kernels neon_kernels = {"neon",      absmax_bits_loop, quantize_any, squared_error_loop,
                              rans_encode, quantize_rans,    rans_decode};

}  // namespace gradwire
#endif
