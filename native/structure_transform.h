// Transforms of kernels, for structure_loops.h; compiled once per instruction set.
//
// Sums are made from the first term to the last, each product and sum rounded by itself: they decide what a frame
// decodes to.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "sixteen.h"
#include "structure.h"

namespace gradwire {
namespace {

constexpr int kTogether = 16;      // kernels that are transformed side by side
constexpr size_t kTile = 2048;     // entries of small ones that are transformed together
static_assert(kTogether == 16, "a vector has sixteen numbers");

// One axis: y[k] = Σ_m rows[m][k]·x[m], for kTogether kernels in the last dimension.
inline void along(const Axis& axis, int outer, int inner, const float* x, float* y) {
    const int n = axis.size;
    for (int o = 0; o < outer; o++)
        for (int k = 0; k < n; k++)
            for (int i = 0; i < inner; i++) {
                const float* from = x + (size_t(o) * n * inner + i) * kTogether;
                Sixteen sum = axis.rows[k] * load16(from);
                for (int m = 1; m < n; m++) {
                    const float factor = axis.rows[m * n + k];
                    from += size_t(inner) * kTogether;
                    sum = sum + factor * load16(from);
                }
                store16(y + ((size_t(o) * n + k) * inner + i) * kTogether, sum);
            }
}

inline void transform_tile(float* x, int kernels, const Axis* axes, int axis_count, int kernel, float* a, float* b) {
    for (int l = 0; l < kernels; l++)
        for (int k = 0; k < kernel; k++) a[size_t(k) * kTogether + l] = x[size_t(l) * kernel + k];
    int outer = 1, inner = kernel;
    for (int i = 0; i < axis_count; i++) {
        inner /= axes[i].size;
        along(axes[i], outer, inner, a, b);
        outer *= axes[i].size;
        std::swap(a, b);
    }
    for (int l = 0; l < kernels; l++)
        for (int k = 0; k < kernel; k++) x[size_t(l) * kernel + k] = a[size_t(k) * kTogether + l];
}

#ifdef __AVX512VBMI__
// Along one axis of small kernels, for whole periods: sixteen neighbours at a time, each term of them by one permutation
// of 32 entries. Reads up to 31 floats behind what it is asked for.
template <int N>
void along_terms(const Axis& axis, size_t period, const float* x, size_t count, float* y) {
    for (const Axis::Phase& phase : axis.phases) {
        __m512i index[N];
        __m512 factor[N];
        for (int m = 0; m < N; m++) {
            index[m] = _mm512_loadu_si512(phase.index.data() + 16 * m);
            factor[m] = _mm512_loadu_ps(phase.factor.data() + 16 * m);
        }
        const float* from = x + phase.from;
        for (size_t start = 0; start < count; start += period) {
            const __m512 low = _mm512_loadu_ps(from + start), high = _mm512_loadu_ps(from + start + 16);
            __m512 sum = _mm512_mul_ps(factor[0], _mm512_permutex2var_ps(low, index[0], high));
            for (int m = 1; m < N; m++)
                sum = _mm512_add_ps(sum, _mm512_mul_ps(factor[m], _mm512_permutex2var_ps(low, index[m], high)));
            _mm512_storeu_ps(y + start, sum);
        }
        y += 16;
    }
}

inline void along_small(const Axis& axis, size_t period, const float* x, size_t count, float* y) {
    switch (axis.size) {
        case 1: return along_terms<1>(axis, period, x, count, y);
        case 2: return along_terms<2>(axis, period, x, count, y);
        case 3: return along_terms<3>(axis, period, x, count, y);
        case 4: return along_terms<4>(axis, period, x, count, y);
        case 5: return along_terms<5>(axis, period, x, count, y);
        case 6: return along_terms<6>(axis, period, x, count, y);
        case 7: return along_terms<7>(axis, period, x, count, y);
        case 8: return along_terms<8>(axis, period, x, count, y);
        case 9: return along_terms<9>(axis, period, x, count, y);
        case 10: return along_terms<10>(axis, period, x, count, y);
        default: return along_terms<16>(axis, period, x, count, y);
    }
}

// In tiles that stay in the first-level cache; `a` and `b` have room for one, and for what is read behind it.
inline void transform_small(float* x, size_t count, const Axis* axes, int axis_count, size_t tile, float* a, float* b) {
    const size_t period = axes[0].phases.size() * 16;
    for (size_t i = 0; i < count; i += tile) {
        const size_t n = count - i < tile ? count - i : tile, whole = (n + period - 1) / period * period;
        const bool inside = axis_count > 1 &&
                            i + whole + 32 <= count;  // then the first reads x, and the last writes it
        if (!inside) {
            std::memcpy(a, x + i, n * sizeof(float));
            std::memset(a + n, 0, (whole + 32 - n) * sizeof(float));
        }
        for (int k = 0; k < axis_count; k++) {
            along_small(axes[k], period, inside && !k ? x + i : a, whole, inside && k + 1 == axis_count ? x + i : b);
            std::swap(a, b);
        }
        if (!inside) std::memcpy(x + i, a, n * sizeof(float));
    }
}
#endif

void transform_any(float* x, size_t count, const Axis* axes, int axis_count, int kernel) {
    static thread_local std::vector<float> room;
    size_t tile = size_t(kernel) * kTogether;
#ifdef __AVX512VBMI__
    if (!axes[0].phases.empty()) {
        while (tile < kTile) tile *= 2;
        room.resize(2 * tile + 96);  // what is read behind a tile does not matter: kernels end with it
        float* const a = room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63) / sizeof(float);
        return transform_small(x, count, axes, axis_count, tile, a, a + (tile + 47) / 16 * 16);
    }
#endif
    room.assign(2 * size_t(kernel) * kTogether, 0.0f);  // lanes without a kernel hold zeros, not NaNs
    float *a = room.data(), *b = a + size_t(kernel) * kTogether;
    for (size_t i = 0; i < count; i += tile)
        transform_tile(x + i, int((count - i < tile ? count - i : tile) / kernel), axes, axis_count, kernel, a, b);
}

}  // namespace
}  // namespace gradwire
