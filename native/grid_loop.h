// The grid for any instruction set; compiled once for each, and vectorised there.
//
// Traps:
// - The reference limits |y| + shift to 2^24 before it takes the integer part, so that infinities are well-defined.
// - A block is done in simple loops; only where one of its multiples lies outside are they looked at one by one.
#pragma once

#include "grid.h"
#include "quantize.h"

namespace gradwire {
namespace {

template <bool Stochastic>
inline int grid_multiple(const Grid& g, float u, uint64_t index) {
    const float y = u * g.inverse, limit = float(kGridLimit);
    float a = std::fabs(y) + (Stochastic ? 0.0f : g.shift);
    a = a < limit ? a : limit;
    int m = int(a);
    if (Stochastic) m += float(random24(index, g.seed)) * (1.0f / 16777216.0f) < a - float(m);
    return y < 0 ? -m : m;
}

template <bool Memory, bool Stochastic>
inline void grid_loop(const Grid& grid, const Stream& s, uint8_t* symbols, Outliers& outliers) {
    constexpr size_t kBlock = 256;
    const Grid g = grid;  // a copy: stores to `symbols` could otherwise change it
    float u[kBlock];
    int32_t multiple[kBlock];
    for (size_t start = 0; start < s.count; start += kBlock) {
        const int n = int(s.count - start < kBlock ? s.count - start : kBlock);
        const float *gradient = s.gradient + start, *memory = Memory ? s.memory + start : nullptr;
        for (int i = 0; i < n; i++) u[i] = Memory ? compensated(gradient[i], memory[i], g.decay) : gradient[i];
        for (int i = 0; i < n; i++) multiple[i] = grid_multiple<Stochastic>(g, u[i], s.first + start + i);
        uint32_t outside = 0;
        for (int i = 0; i < n; i++)
            outside |= uint32_t(multiple[i] + g.largest > 2 * g.largest) | uint32_t(multiple[i] < -g.largest);
        if (outside)
            for (int i = 0; i < n; i++)
                if (multiple[i] > g.largest || multiple[i] < -g.largest)
                    multiple[i] = outliers.add(s.first + start + i, multiple[i], g.largest);
        for (int i = 0; i < n; i++) symbols[start + i] = uint8_t(multiple[i] + g.largest);
        if (float* out = s.memory_out)
            for (int i = 0; i < n; i++) out[start + i] = u[i] - g.values[multiple[i] + g.largest];
    }
}

[[maybe_unused, gnu::noinline]] void grid_any(const Grid& g, const Stream& s, uint8_t* symbols, Outliers& o) {
    if (g.stochastic)
        s.memory ? grid_loop<true, true>(g, s, symbols, o) : grid_loop<false, true>(g, s, symbols, o);
    else
        s.memory ? grid_loop<true, false>(g, s, symbols, o) : grid_loop<false, false>(g, s, symbols, o);
}

inline bool grid_finite(const Grid& g, const Stream& s) {
    Quantizer q{};
    q.decay = g.decay;
    return all_finite(q, s);
}

// Where memory holds u of outliers, but should hold what is left of it.
inline void settle(const Grid& g, const Stream& s, const Outliers& o, size_t from) {
    if (g.settle && s.memory_out)
        for (size_t i = from; i < o.count; i++)
            s.memory_out[uint64_t(o.positions[i]) - s.first] -= g.beyond(o.multiples[i]);
}

// In two passes: a chunk's symbols stay in the second-level cache.
[[maybe_unused]] Coded grid_rans(const Grid& g, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                                 uint8_t* scratch, Outliers& o) {
    if (!grid_finite(g, s)) return {0, 0};
    const size_t from = o.count;
    grid_any(g, s, scratch, o);
    settle(g, s, o, from);
    return {kernels().rans_encode(t, scratch, s.count, lanes, out), s.count};
}

}  // namespace
}  // namespace gradwire
