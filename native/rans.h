// Byte-wise interleaved rANS, one chunk at a time; docs/wire-format.md defines the bytes.
//
// Traps and why the arithmetic is right:
// - Division. After renormalisation x < f * 2^(22-k) <= 2^22, an integer that a float holds exactly. Take
//   r = 1/f rounded up to a float. Then x*r >= x/f, and its relative error is below 2^-23 (from r) + 2^-24 (from
//   the product), so the product exceeds x/f by less than (x/f) * 1.5 * 2^-23 < 1/f for x < 2^22.4. As x/f is at
//   least 1/f below the next integer (or an integer itself), truncation gives floor(x/f) exactly.
// - Order. A row's first emissions stand before its second ones, each in ascending order of lanes. The decoder walks
//   back: the second ones first, and within each the highest lane first.
// - How many bytes a lane takes is the same on both sides: an encoder state X in [2^14, 2^22) that emitted once is
//   X>>8 in [2^6, 2^14), one that emitted twice is X>>16 < 2^6. With k = 8 the second never happens.
// - An entry whose symbol has frequency 0 cannot be coded; encoders are only given tables that cover the symbols.
#pragma once

#include "kernels.h"

namespace gradwire {
namespace {

inline uint8_t* write_states(const uint32_t* x, int lanes, uint8_t* out) {
    for (int l = 0; l < lanes; l++) {
        out[3 * l] = uint8_t(x[l]);
        out[3 * l + 1] = uint8_t(x[l] >> 8);
        out[3 * l + 2] = uint8_t(x[l] >> 16);
    }
    return out + 3 * lanes;
}

inline bool read_states(const uint8_t* data, int lanes, uint32_t* x) {
    for (int l = 0; l < lanes; l++) {
        x[l] = data[3 * l] | data[3 * l + 1] << 8 | uint32_t(data[3 * l + 2]) << 16;
        if (x[l] < kLow || x[l] >> kHighBits) return false;
    }
    return true;
}

// Encodes one row (of up to `lanes` symbols); returns where the next byte goes.
inline uint8_t* encode_row(const RansTable& t, const uint8_t* symbols, int width, uint32_t* x, uint8_t* p) {
    const int shift = kHighBits - t.precision;
    for (int pass = 0; pass < (t.precision > 8 ? 2 : 1); pass++)
        for (int l = 0; l < width; l++) {
            bool full = x[l] >= t.frequency[symbols[l]] << shift;
            *p = uint8_t(x[l]);
            p += full;
            x[l] = full ? x[l] >> 8 : x[l];
        }
    for (int l = 0; l < width; l++) {
        const uint8_t s = symbols[l];
        uint32_t q = uint32_t(float(x[l]) * t.reciprocal[s]);
        x[l] += q * ((1u << t.precision) - t.frequency[s]) + t.start[s];
    }
    return p;
}

inline size_t rans_encode_any(const RansTable& t, const uint8_t* symbols, size_t count, int lanes, uint8_t* out) {
    uint32_t x[kMaxLanes];
    for (int l = 0; l < lanes; l++) x[l] = kLow;
    uint8_t* p = out + 3 * lanes;
    for (size_t row = 0; row < count; row += lanes) {
        int width = count - row < size_t(lanes) ? int(count - row) : lanes;
        p = encode_row(t, symbols + row, width, x, p);
    }
    write_states(x, lanes, out);
    return p - out;
}

template <Sink S>
inline void put(const Target& target, size_t i, uint8_t symbol) {
    if (S == Sink::symbols) target.symbols[i] = symbol;
    if (S == Sink::store) target.out[i] = target.values[symbol];
    if (S == Sink::add) target.out[i] = target.onto[i] + target.values[symbol];
}

// Decodes one row; returns where the bytes not yet taken end, or null if there are too few. The states of the lanes stand
// in front of them.
template <Sink S>
inline const uint8_t* decode_row(const RansTable& t, size_t row, int width, uint32_t* x, const uint8_t* begin,
                                 const uint8_t* end, const Target& target) {
    const uint32_t mask = (1u << t.precision) - 1;
    for (int l = 0; l < width; l++) {
        uint32_t slot = x[l] & mask;
        uint8_t s = t.symbol_of_slot[slot];
        put<S>(target, row + l, s);
        x[l] = t.frequency[s] * (x[l] >> t.precision) + slot - t.start[s];
    }
    // Whether a lane takes a byte is as good as random: no branch. A row takes at most two bytes a lane; if there are
    // too few, these are bytes of the states, of which there are three.
    for (uint32_t threshold = t.precision > 8 ? kLow >> 8 : kLow; threshold <= kLow; threshold <<= 8)
        for (int l = width - 1; l >= 0; l--) {
            const uint32_t takes = x[l] < threshold;
            x[l] = x[l] << 8 * takes | (end[-1] & (0u - takes));
            end -= takes;
        }
    return end < begin ? nullptr : end;
}

// The symbols with a frequency, in order: tables in registers, of 16 entries, number only these, so that their starts
// differ. For decoders that look for a slot's symbol by comparing.
constexpr int kPresent = 16;

struct Present {
    int count = 0;
    uint8_t symbol[kPresent] = {};
    uint32_t before[2 * kPresent];  // the last slot before each; above all slots for those there are not

    explicit Present(const RansTable& t) {
        for (uint32_t& slot : before) slot = (1u << t.precision) - 1;
        for (int s = 0; s < t.symbols; s++)
            if (t.frequency[s]) {
                before[count] = t.start[s] - 1;
                symbol[count++] = uint8_t(s);
            }
    }
};

inline bool all_at_start(const uint32_t* x, int lanes) {
    for (int l = 0; l < lanes; l++)
        if (x[l] != kLow) return false;
    return true;
}

template <Sink S>
inline bool rans_decode_chunk(const RansTable& t, const Chunk& c, int lanes) {
    uint32_t x[kMaxLanes];
    if (c.length < size_t(3 * lanes) || !read_states(c.data, lanes, x)) return false;
    const uint8_t *begin = c.data + 3 * lanes, *end = c.data + c.length;
    for (size_t row = (c.count - 1) / lanes * lanes;; row -= lanes) {
        int width = c.count - row < size_t(lanes) ? int(c.count - row) : lanes;
        end = decode_row<S>(t, row, width, x, begin, end, c.target);
        if (!end) return false;
        if (!row) break;
    }
    return end == begin && all_at_start(x, lanes);
}

inline bool rans_decode_any(const RansTable& t, const Chunk* chunks, size_t n, int lanes, Sink sink) {
    auto decode = sink == Sink::symbols ? rans_decode_chunk<Sink::symbols>
                  : sink == Sink::store ? rans_decode_chunk<Sink::store>
                                        : rans_decode_chunk<Sink::add>;
    for (size_t i = 0; i < n; i++)
        if (!decode(t, chunks[i], lanes)) return false;
    return true;
}

}  // namespace
}  // namespace gradwire
