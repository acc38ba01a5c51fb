// The loops over structured tensors, compiled once per instruction set; compilers make vectors of the inner ones.
#pragma once

#include <cfloat>
#include <cstring>

#include "quantize.h"
#include "structure.h"

namespace gradwire {
namespace {  // one copy per instruction set

constexpr int kTogether = 16;      // kernels that are transformed side by side
constexpr int kMostInKernel = 4096;
constexpr size_t kStrip = 1024;    // entries of a row that are predicted at a time
constexpr int kRowsTogether = 4;

// Sixteen numbers, which compilers keep in as many registers as they need.
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));
static_assert(kDirections == 16 && kTogether == 16, "a vector has sixteen numbers");

inline Sixteen load16(const float* x) { return *reinterpret_cast<const Sixteen*>(x); }
inline void store16(float* x, Sixteen v) { *reinterpret_cast<Sixteen*>(x) = v; }

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

void transform_any(float* x, size_t count, const Axis* axes, int axis_count, int kernel) {
    static thread_local std::vector<float> room;
    room.assign(2 * size_t(kernel) * kTogether, 0.0f);  // lanes without a kernel hold zeros, not NaNs
    float *a = room.data(), *b = a + size_t(kernel) * kTogether;
    const size_t tile = size_t(kernel) * kTogether;
    for (size_t i = 0; i < count; i += tile)
        transform_tile(x + i, int((count - i < tile ? count - i : tile) / kernel), axes, axis_count, kernel, a, b);
}

void compensate_any(const Compensated& source, size_t start, size_t count, float* x) {
    const float *g = source.gradient + start, *e = source.memory ? source.memory + start : nullptr;
    if (!e)
        std::memcpy(x, g, count * sizeof(float));
    else
        for (size_t i = 0; i < count; i++) x[i] = compensated(g[i], e[i], source.decay);
}

void predict_any(float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank, float sign) {
    float sum[kStrip];
    for (size_t row = 0; row * width < count; row++, left += rank)
        for (size_t q = 0; q < width; q += kStrip) {
            const size_t n = width - q < kStrip ? width - q : kStrip;
            std::memset(sum, 0, n * sizeof(float));
            for (int t = 0; t < rank; t++) {
                const float a = left[t];
                const int8_t* b = right + t * width + q;
                for (size_t i = 0; i < n; i++) sum[i] = sum[i] + a * float(b[i]);
            }
            float* to = x + row * width + q;
            for (size_t i = 0; i < n; i++) to[i] = to[i] + sign * sum[i];
        }
}

void rebuild_any(const Rebuild& r, size_t first, size_t last, float* to) {
    const size_t start = first * r.width, stop = last * r.width < r.count ? last * r.width : r.count, n = stop - start;
    static thread_local std::vector<float> room;
    if (r.source) room.resize(n);
    float* const out = r.source ? room.data() : to;
    if (r.symbols)
        for (size_t i = 0; i < n; i++) out[i] = r.values[r.symbols[start + i]];
    else
        std::memset(out, 0, n * sizeof(float));
    // The first outlier at or after `start`.
    size_t low = 0, high = r.number;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (size_t(r.positions[middle]) < start)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < r.number && size_t(r.positions[low]) < stop; low++) {
        float& entry = out[size_t(r.positions[low]) - start];
        entry = entry + r.outliers[low];
    }
    if (r.rank) predict_any(out, n, r.width, r.left + first * r.rank, r.right, r.rank, 1.0f);
    if (r.kernel > 1) transform_any(out, n, r.axes, r.axis_count, r.kernel);
    for (size_t i = 0; i < n; i++) {
        const float x = out[i] + 0.0f;
        out[i] = x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x == x ? x : 0.0f;
    }
    if (!r.source) return;
    const float *g = r.source->gradient + start, *e = r.source->memory ? r.source->memory + start : nullptr;
    if (e)
        for (size_t i = 0; i < n; i++) to[i] = compensated(g[i], e[i], r.source->decay) - out[i];
    else
        for (size_t i = 0; i < n; i++) to[i] = g[i] - out[i];
}

// `places` are the sums over rows.
void energies_any(const float* x, size_t count, size_t width, double* rows, double* places) {
    for (size_t start = 0, row = 0; start < count; start += width, row++) {
        const size_t n = count - start < width ? count - start : width;
        double sum[8] = {};
        size_t i = 0;
        for (; i + 8 <= n; i += 8)
            for (int l = 0; l < 8; l++) {
                const double v = x[start + i + l], square = v * v;
                sum[l] += square;
                places[i + l] += square;
            }
        for (; i < n; i++) {
            const double v = x[start + i];
            sum[0] += v * v;
            places[i] += v * v;
        }
        rows[row] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    }
}

template <int Rows>
inline void project_some(const float* x, size_t width, const float* basis, float* out) {
    Sixteen sum[Rows] = {};
    for (size_t q = 0; q < width; q++) {
        const Sixteen b = load16(basis + q * kDirections);
        for (int r = 0; r < Rows; r++) sum[r] += x[r * width + q] * b;
    }
    for (int r = 0; r < Rows; r++) store16(out + r * kDirections, sum[r]);
}

void project_rows_any(const float* x, size_t rows, size_t width, const float* basis, float* out) {
    size_t i = 0;
    for (; i + kRowsTogether <= rows; i += kRowsTogether)
        project_some<kRowsTogether>(x + i * width, width, basis, out + i * kDirections);
    for (; i < rows; i++) project_some<1>(x + i * width, width, basis, out + i * kDirections);
}

template <int Rows>
inline void project_back_some(const float* x, size_t width, size_t first, size_t last, const float* basis, float* out) {
    for (size_t q = first; q < last; q++) {
        Sixteen sum = load16(out + q * kDirections);
        for (int r = 0; r < Rows; r++) sum += x[r * width + q] * load16(basis + r * kDirections);
        store16(out + q * kDirections, sum);
    }
}

void project_columns_any(const float* x, size_t rows, size_t width, size_t first, size_t last, const float* basis,
                         float* out) {
    std::memset(out + first * kDirections, 0, (last - first) * kDirections * sizeof(float));
    constexpr int kRows = 8;
    size_t i = 0;
    for (; i + kRows <= rows; i += kRows)
        project_back_some<kRows>(x + i * width, width, first, last, basis + i * kDirections, out);
    for (; i < rows; i++) project_back_some<1>(x + i * width, width, first, last, basis + i * kDirections, out);
}

// out[i][j] = Σ a[n][i]·b[n][j], in fp64.
void gram_any(const float* a, const float* b, size_t count, double* out) {
    double sum[kDirections][kDirections] = {};
    for (size_t n = 0; n < count; n++)
        for (int i = 0; i < kDirections; i++) {
            const double v = a[n * kDirections + i];
            for (int j = 0; j < kDirections; j++) sum[i][j] += v * double(b[n * kDirections + j]);
        }
    std::memcpy(out, sum, sizeof sum);
}

constexpr StructureLoops structure_loops() {
    return {compensate_any, transform_any,    rebuild_any,         predict_any,
            energies_any,   project_rows_any, project_columns_any, gram_any};
}

}  // namespace
}  // namespace gradwire
