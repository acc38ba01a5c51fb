// Tables of 16 entries in NEON registers, and bytes in and out of vectors: what the kernels for arm64 are made of.
//
// A table of bytes is one register, and TBL looks 16 lanes up at once; wider tables are several such registers, one for
// each byte, whose results are zipped. (TBL of four registers at once takes as long as four of one, or longer.) Lanes
// come in groups of 16: a vector of bytes, a pair of words, four vectors of dwords. All are in plain order: unlike those
// of AVX2, zips do not stay within halves.
// Traps:
// - TBL gives zero where an index is 16 or more: tables have 16 entries, and shuffles use 255 for a zero.
// - There is no instruction for a bit mask of lanes. Bits are put in place by AND and added up pairwise, for all lanes
//   of a row at once, since what makes it slow is the way from vectors to ordinary registers.
// - Nor is there one for streaming stores that compilers offer alike: Stream::far is not looked at.
#pragma once

#include "kernels.h"

#ifdef GRADWIRE_NEON
#include <arm_neon.h>

#include "quantize.h"

namespace gradwire {
namespace {

using U8 = uint8x16_t;
using U16 = uint16x8_t;
using U32 = uint32x4_t;
using F32 = float32x4_t;
constexpr int kEntries = 16, kGroup = 16;  // entries of a table, lanes of a group

GRADWIRE_INLINE U8 bytes_of(U16 x) { return vreinterpretq_u8_u16(x); }
GRADWIRE_INLINE U8 bytes_of(U32 x) { return vreinterpretq_u8_u32(x); }
GRADWIRE_INLINE U16 words_of(U32 x) { return vreinterpretq_u16_u32(x); }
GRADWIRE_INLINE U32 bits_of(F32 x) { return vreinterpretq_u32_f32(x); }
GRADWIRE_INLINE F32 float_of(U32 x) { return vreinterpretq_f32_u32(x); }

struct Pair {  // words of lanes 0 to 7, and of 8 to 15
    U16 low, high;
};

GRADWIRE_INLINE Pair join(U8 low, U8 high) {  // words from bytes
    return {vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))};
}
GRADWIRE_INLINE void join(const Pair& low, const Pair& high, U32* out) {  // dwords from words
    out[0] = vreinterpretq_u32_u16(vzip1q_u16(low.low, high.low));
    out[1] = vreinterpretq_u32_u16(vzip2q_u16(low.low, high.low));
    out[2] = vreinterpretq_u32_u16(vzip1q_u16(low.high, high.high));
    out[3] = vreinterpretq_u32_u16(vzip2q_u16(low.high, high.high));
}

struct Bytes {
    U8 at;
    template <class F>  // entry i is the low byte of f(i)
    explicit Bytes(F f) {
        uint8_t b[kEntries];
        for (int i = 0; i < kEntries; i++) b[i] = uint8_t(f(i));
        at = vld1q_u8(b);
    }
    GRADWIRE_INLINE U8 look_up(U8 index) const { return vqtbl1q_u8(at, index); }
};

struct Words {
    Bytes low, high;
    template <class F>
    explicit Words(F f) : low(f), high([&](int i) { return f(i) >> 8; }) {}
    GRADWIRE_INLINE Pair look_up(U8 index) const { return join(low.look_up(index), high.look_up(index)); }
};

struct Dwords {
    Words low, high;
    template <class F>
    explicit Dwords(F f) : low(f), high([&](int i) { return f(i) >> 16; }) {}
    GRADWIRE_INLINE void look_up(U8 index, U32* out) const { join(low.look_up(index), high.look_up(index), out); }
};

struct Floats {
    Dwords bits;
    template <class F>
    explicit Floats(F f) : bits([&](int i) { return as_bits(f(i)); }) {}
    GRADWIRE_INLINE void look_up(U8 index, F32* out) const {
        U32 found[4];
        bits.look_up(index, found);
        for (int v = 0; v < 4; v++) out[v] = float_of(found[v]);
    }
};

// The low halves of dwords, and the low bytes of a group's.
GRADWIRE_INLINE U16 low_words(U32 a, U32 b) { return vuzp1q_u16(words_of(a), words_of(b)); }
GRADWIRE_INLINE U8 low_bytes(U16 a, U16 b) { return vuzp1q_u8(bytes_of(a), bytes_of(b)); }
GRADWIRE_INLINE U8 low_bytes(const U32* x) { return low_bytes(low_words(x[0], x[1]), low_words(x[2], x[3])); }

// The same of masks and signed numbers.
GRADWIRE_INLINE U8 low_bytes(const int32x4_t* x) {
    const U32 y[4] = {vreinterpretq_u32_s32(x[0]), vreinterpretq_u32_s32(x[1]), vreinterpretq_u32_s32(x[2]),
                      vreinterpretq_u32_s32(x[3])};
    return low_bytes(y);
}

GRADWIRE_INLINE bool any(U32 x) { return vmaxvq_u32(x) != 0; }
GRADWIRE_INLINE bool any(U16 x) { return any(vreinterpretq_u32_u16(x)); }

// Which lanes of a row of up to four groups: a bit each; and of each eight of them, how many there are up to their end.
struct RowMask {
    uint64_t bits, ends;

    template <int Groups>
    GRADWIRE_INLINE static RowMask of(const U8* mask) {  // of bytes 0 or 255
        constexpr uint8_t place[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        const U8 bit = vld1q_u8(place);
        U8 sums = vandq_u8(mask[0], bit), others = Groups > 2 ? vandq_u8(mask[Groups / 2], bit) : sums;
        if (Groups > 1) sums = vpaddq_u8(sums, vandq_u8(mask[1], bit));
        if (Groups > 2) others = vpaddq_u8(others, vandq_u8(mask[Groups - 1], bit));
        if (Groups > 2) sums = vpaddq_u8(sums, others);
        for (int lanes = Groups > 2 ? 2 : Groups > 1 ? 4 : 8; lanes > 1; lanes /= 2) sums = vpaddq_u8(sums, sums);
        const uint8x8_t all = vget_low_u8(sums);  // repeated, where there are fewer than four groups
        return {vget_lane_u64(vreinterpret_u64_u8(all), 0),
                vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(all)), 0) * 0x0101010101010101u};
    }
    GRADWIRE_INLINE unsigned eight(int i) const { return bits >> 8 * i & 255; }
    GRADWIRE_INLINE size_t before(int i) const { return i ? ends >> (8 * i - 8) & 255 : 0; }
    template <int Groups>
    GRADWIRE_INLINE size_t count() const {
        return before(2 * Groups);
    }
};

// For every mask of eight lanes: the shuffle that brings its bytes to the front, and the one that gives the last of
// eight bytes to its lanes, and zero to all others.
struct MaskShuffles {
    alignas(64) uint8_t gather[256][8], scatter[256][8];
    constexpr MaskShuffles() : gather(), scatter() {
        for (int m = 0; m < 256; m++) {
            for (int i = 0; i < 8; i++) gather[m][i] = scatter[m][i] = 255;
            int n = 0;  // lanes in the mask so far
            for (int lane = 0; lane < 8; lane++)
                if (m >> lane & 1) gather[m][n++] = uint8_t(lane);
            for (int lane = 0, i = 8 - n; lane < 8; lane++)
                if (m >> lane & 1) scatter[m][lane] = uint8_t(i++);
        }
    }
};
constexpr MaskShuffles kShuffles;

GRADWIRE_INLINE uint8x8_t in_high_half(uint8x8_t shuffle) { return vorr_u8(shuffle, vdup_n_u8(8)); }

// u = g + decay * memory of a group, and the bits of the largest magnitude so far.
template <bool Memory>
GRADWIRE_INLINE void load_group(const Stream& s, size_t i, F32 decay, F32* u, U32& most) {
    for (int v = 0; v < 4; v++) {
        u[v] = vld1q_f32(s.gradient + i + 4 * v);
        if (Memory) u[v] = vaddq_f32(u[v], vmulq_f32(vld1q_f32(s.memory + i + 4 * v), decay));
        most = vmaxq_u32(most, bits_of(vabsq_f32(u[v])));
    }
}
GRADWIRE_INLINE bool finite(U32 most) { return vmaxvq_u32(most) < 0x7f800000u; }

}  // namespace
}  // namespace gradwire
#endif
