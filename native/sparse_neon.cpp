// The scan of sparse codecs with NEON.
//
// There is no compress instruction: a table has, for every mask of four lanes, the shuffle that moves them to the front,
// and another the indices of the found entries. As with AVX2 they are stored whole and without a branch.
#include "sparse.h"

#ifdef GRADWIRE_NEON
#include "neon_tables.h"

namespace gradwire {
namespace {

struct Lanes {
    alignas(64) uint8_t shuffle[16][16];
    alignas(64) uint32_t of[16][4];
    uint8_t count[16];
    constexpr Lanes() : shuffle(), of(), count() {
        for (int mask = 0; mask < 16; mask++) {
            int n = 0;
            for (int lane = 0; lane < 4; lane++) {
                if (!(mask >> lane & 1)) continue;
                of[mask][n] = uint32_t(lane);
                for (int byte = 0; byte < 4; byte++) shuffle[mask][4 * n + byte] = uint8_t(4 * lane + byte);
                n++;
            }
            count[mask] = uint8_t(n);
        }
    }
};
constexpr Lanes kLanes;

template <bool Memory, bool Update>
Found scan(const Stream& stream, float decay, Lows low, uint32_t* index, float* value) {
    const Stream s = stream;  // a copy: stores could otherwise change it
    const F32 factor = vdupq_n_f32(decay);
    // As integers, numbers above 0 order like their magnitudes, and so do those below 0 with their sign bit flipped;
    // the others are then below 0.
    const int32x4_t below_positive = vdupq_n_s32(int32_t(low.positive - 1));
    const int32x4_t below_negative = vdupq_n_s32(int32_t(low.negative - 1));
    const U32 sign = vdupq_n_u32(0x80000000u);
    size_t n = 0, i = 0;
    for (; i + kGroup <= s.count; i += kGroup) {
        F32 u[4];
        U32 large[4], most = vdupq_n_u32(0);
        load_group<Memory>(s, i, factor, u, most);
        for (int v = 0; v < 4; v++) {
            const U32 bits = bits_of(u[v]);
            large[v] = vorrq_u32(vcgtq_s32(vreinterpretq_s32_u32(bits), below_positive),
                                 vcgtq_s32(vreinterpretq_s32_u32(veorq_u32(bits, sign)), below_negative));
        }
        if (any(vorrq_u32(vorrq_u32(large[0], large[1]), vorrq_u32(large[2], large[3])))) {
            if (__builtin_expect(!finite(most), 0)) return {n, i};
            const U8 mask = low_bytes(large);
            const uint64_t found = RowMask::of<1>(&mask).bits;
            for (int v = 0; v < 4; v++) {
                const unsigned four = found >> 4 * v & 15;
                const U8 front = vqtbl1q_u8(bytes_of(bits_of(u[v])), vld1q_u8(kLanes.shuffle[four]));
                vst1q_f32(value + n, vreinterpretq_f32_u8(front));
                vst1q_u32(index + n, vaddq_u32(vld1q_u32(kLanes.of[four]), vdupq_n_u32(uint32_t(i) + 4 * unsigned(v))));
                n += kLanes.count[four];
            }
        }
        if (Update)
            for (int v = 0; v < 4; v++) vst1q_f32(s.memory_out + i + 4 * v, u[v]);
    }
    return scan_rest(s, decay, low, index, value, {n, i});
}

}  // namespace

Found neon_scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value) {
    if (s.memory) return (s.memory_out ? scan<true, true> : scan<true, false>)(s, decay, low, index, value);
    return (s.memory_out ? scan<false, true> : scan<false, false>)(s, decay, low, index, value);
}

}  // namespace gradwire
#endif
