// The grid for arm64 with NEON: up to 15 symbols are quantized by hand, others by the plain loops; rANS is a second pass
// over a chunk's symbols, which are still in the second-level cache.
//
// Traps:
// - Adding the shift with the sign of y and truncating gives the signed multiple in one conversion. One beyond 2^31
//   converts to the largest or smallest integer, which is outside the range too; outliers are worked out again one by
//   one.
// - A -0 has the shift of a 0: otherwise the two would differ where the shift is 1.
#include "kernels.h"

#ifdef GRADWIRE_NEON
#include "grid_loop.h"
#include "neon_tables.h"

namespace gradwire {
namespace {

struct Vectors {
    Grid g;
    Floats values;
    F32 decay, inverse, shift;
    int32x4_t largest;
    U32 twice;

    explicit Vectors(const Grid& grid)
        : g(grid), values([&](int i) { return i <= 2 * grid.largest ? grid.values[i] : 0.0f; }),
          decay(vdupq_n_f32(g.decay)), inverse(vdupq_n_f32(g.inverse)), shift(vdupq_n_f32(g.shift)),
          largest(vdupq_n_s32(g.largest)), twice(vdupq_n_u32(uint32_t(2 * g.largest))) {}

    // The symbols, as numbers, of four entries; `outside` are those beyond the symbols' range.
    GRADWIRE_INLINE int32x4_t symbols(F32 u, U32& outside) const {
        const F32 y = vmulq_f32(u, inverse);
        const F32 signed_shift = vbslq_f32(vcltzq_f32(y), vnegq_f32(shift), shift);
        const int32x4_t symbol = vaddq_s32(vcvtq_s32_f32(vaddq_f32(y, signed_shift)), largest);
        outside = vcgtq_u32(vreinterpretq_u32_s32(symbol), twice);
        return symbol;
    }

    // The symbols of a group of entries from `first` on, those beyond the range listed apart, and what is left of their
    // u.
    [[gnu::noinline]] void take_out(int32x4_t* symbol, F32* u, const U32* outside, uint64_t first, Outliers& o) const {
        int32_t m[kGroup];
        float x[kGroup];
        uint32_t out[kGroup];
        for (int v = 0; v < 4; v++) {
            vst1q_s32(m + 4 * v, symbol[v]);
            vst1q_f32(x + 4 * v, u[v]);
            vst1q_u32(out + 4 * v, outside[v]);
        }
        for (int l = 0; l < kGroup; l++) {
            if (!out[l]) continue;
            const int beyond = grid_multiple<false>(g, x[l], 0), left = o.add(first + uint64_t(l), beyond, g.largest);
            m[l] = left + g.largest;
            if (g.settle && !left) x[l] -= g.beyond(beyond);
        }
        for (int v = 0; v < 4; v++) {
            symbol[v] = vld1q_s32(m + 4 * v);
            u[v] = vld1q_f32(x + 4 * v);
        }
    }
};

// How many entries were done: it stops before a row that holds a NaN or an infinity.
template <bool Memory, bool Update>
size_t quantize_rows(const Grid& g, const Stream& stream, uint8_t* symbols, Outliers& outliers) {
    const Stream s = stream;  // a copy: stores to `symbols` could otherwise change it
    const Vectors c(g);
    size_t row = 0;
    for (; row + kGroup <= s.count; row += kGroup) {
        F32 u[4];
        U32 most = vdupq_n_u32(0), outside[4];
        int32x4_t number[4];
        load_group<Memory>(s, row, c.decay, u, most);
        if (__builtin_expect(!finite(most), 0)) return row;
        for (int v = 0; v < 4; v++) number[v] = c.symbols(u[v], outside[v]);
        if (__builtin_expect(any(vorrq_u32(vorrq_u32(outside[0], outside[1]), vorrq_u32(outside[2], outside[3]))), 0))
            c.take_out(number, u, outside, s.first + row, outliers);
        const U8 symbol = low_bytes(number);
        vst1q_u8(symbols + row, symbol);
        if (!Update) continue;
        F32 value[4];
        c.values.look_up(symbol, value);
        for (int v = 0; v < 4; v++) vst1q_f32(s.memory_out + row + 4 * v, vsubq_f32(u[v], value[v]));
    }
    const Stream rest = s.part(row, s.count - row);
    if (!grid_finite(g, rest)) return row;
    const size_t from = outliers.count;
    grid_any(g, rest, symbols + row, outliers);
    settle(g, rest, outliers, from);
    return s.count;
}

Coded quantize_rans(const Grid& g, const Stream& s, const RansTable& t, int lanes, uint8_t* out, uint8_t* scratch,
                    Outliers& o) {
    if (g.largest > 7) return grid_rans(g, s, t, lanes, out, scratch, o);
    auto quantize = s.memory ? (s.memory_out ? quantize_rows<true, true> : quantize_rows<true, false>)
                             : (s.memory_out ? quantize_rows<false, true> : quantize_rows<false, false>);
    const size_t done = quantize(g, s, scratch, o);
    return {done ? kernels().rans_encode(t, scratch, done, lanes, out) : 0, done};
}

}  // namespace

const GridKernels neon_grid = {grid_any, quantize_rans};

}  // namespace gradwire
#endif
