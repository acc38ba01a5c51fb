// The loops over structured tensors, compiled once per instruction set; compilers make vectors of the inner ones.
#pragma once

#include <cfloat>
#include <cstring>

#include "class_parts.h"
#include "grid_loop.h"
#include "sixteen.h"
#include "structure.h"
#include "structure_transform.h"

namespace gradwire {
namespace {  // one copy per instruction set

static_assert(kDirections == 16, "a vector has sixteen numbers");

void compensate_any(const Compensated& source, size_t start, size_t count, float* x) {
    const float *g = source.gradient + start, *e = source.memory ? source.memory + start : nullptr;
    if (!e)
        std::memcpy(x, g, count * sizeof(float));
    else
        for (size_t i = 0; i < count; i++) x[i] = compensated(g[i], e[i], source.decay);
}

GRADWIRE_INLINE Sixteen widen16(const int8_t* x) {
#ifdef __AVX512F__
    return Sixteen(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))));
#else
    float wide[16];
    for (int i = 0; i < 16; i++) wide[i] = float(x[i]);
    return load16(wide);
#endif
}

// The prediction of Rows rows from place q on, for Vectors × 16 places.
template <int Rows, int Vectors>
inline void predict_some(float* x, size_t width, size_t q, const float* left, const int8_t* right, int rank,
                         float sign) {
    Sixteen sum[Rows][Vectors] = {};
    for (int t = 0; t < rank; t++) {
        Sixteen b[Vectors];
        for (int v = 0; v < Vectors; v++) b[v] = widen16(right + size_t(t) * width + q + 16 * v);
        for (int r = 0; r < Rows; r++)
            for (int v = 0; v < Vectors; v++) sum[r][v] = sum[r][v] + left[r * rank + t] * b[v];
    }
    for (int r = 0; r < Rows; r++)
        for (int v = 0; v < Vectors; v++) {
            float* to = x + r * width + q + 16 * v;
            store16(to, load16(to) + sign * sum[r][v]);
        }
}

template <int Rows>
inline void predict_rows(float* x, size_t width, const float* left, const int8_t* right, int rank, float sign) {
    size_t q = 0;
    for (; q + 32 <= width; q += 32) predict_some<Rows, 2>(x, width, q, left, right, rank, sign);
    for (; q < width; q++)
        for (int r = 0; r < Rows; r++) {
            float sum = 0;
            for (int t = 0; t < rank; t++) sum = sum + left[r * rank + t] * float(right[size_t(t) * width + q]);
            x[r * width + q] = x[r * width + q] + sign * sum;
        }
}

void predict_any(float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank, float sign) {
    size_t row = 0;
    const size_t rows = count / width;
    for (; row + 4 <= rows; row += 4) predict_rows<4>(x + row * width, width, left + row * rank, right, rank, sign);
    for (; row < rows; row++) predict_rows<1>(x + row * width, width, left + row * rank, right, rank, sign);
}

#ifdef __AVX512VBMI__
// What symbols stand for, by tables in registers: of 16, 32 or 64 numbers.
template <int Registers>
inline size_t look_up_some(const float* values, const uint8_t* symbols, size_t n, float* out) {
    __m512 table[Registers];
    for (int i = 0; i < Registers; i++) table[i] = _mm512_loadu_ps(values + 16 * i);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols + i)));
        __m512 found;
        if constexpr (Registers == 1) found = _mm512_permutexvar_ps(s, table[0]);
        if constexpr (Registers >= 2) found = _mm512_permutex2var_ps(table[0], s, table[1]);
        if constexpr (Registers == 4)
            found = _mm512_mask_blend_ps(_mm512_test_epi32_mask(s, _mm512_set1_epi32(32)), found,
                                         _mm512_permutex2var_ps(table[2], s, table[3]));
        _mm512_storeu_ps(out + i, found);
    }
    return i;
}
#endif

// `values` has room for all 256 symbols, of which so many occur.
inline void look_up(const float* values, int number, const uint8_t* symbols, size_t n, float* out) {
    size_t i = 0;
#ifdef __AVX512VBMI__
    if (number <= 64)
        i = (number <= 16   ? look_up_some<1>
             : number <= 32 ? look_up_some<2>
                            : look_up_some<4>)(values, symbols, n, out);
#endif
    for (; i < n; i++) out[i] = values[symbols[i]];
}

// Copies past the caches, where there are instructions for that.
inline void copy_far(float* to, const float* from, size_t n) {
    size_t i = 0;
#ifdef __AVX2__
    for (; i < n && (reinterpret_cast<uintptr_t>(to + i) & 63); i++) to[i] = from[i];
    for (; i + 16 <= n; i += 16) {
#ifdef __AVX512F__
        _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#else
        _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
        _mm256_stream_ps(to + i + 8, _mm256_loadu_ps(from + i + 8));
#endif
    }
    _mm_sfence();
#endif
    for (; i < n; i++) to[i] = from[i];
}

// What a decoder makes of a sum: limited to the finite range, neither −0 nor no number at all.
GRADWIRE_INLINE float settled(float sum) {
    const float x = sum + 0.0f;
    return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x == x ? x : 0.0f;
}

void rebuild_any(const Rebuild& r, size_t first, size_t last, float* to) {
    const size_t start = first * r.width, stop = last * r.width < r.count ? last * r.width : r.count, n = stop - start;
    const bool aside = r.source || r.add;
    static thread_local std::vector<float> room;
    if (aside && room.size() < n) room.resize(n);
    float* const out = aside ? room.data() : to;
    if (r.symbols)
        look_up(r.values, r.symbol_count, r.symbols + (start - r.first_row * r.width), n, out);
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
    if (r.rank) predict_any(out, n, r.width, r.left + (first - r.first_row) * r.rank, r.right, r.rank, 1.0f);
    if (r.kernel > 1) transform_any(out, n, r.axes, r.axis_count, r.kernel);
    if (!r.source) {
        if (r.add)
            for (size_t i = 0; i < n; i++) to[i] = to[i] + settled(out[i]) * r.weight;
        else
            for (size_t i = 0; i < n; i++) to[i] = settled(out[i]) * r.weight;
        return;
    }
    const float *g = r.source->gradient + start, *e = r.source->memory ? r.source->memory + start : nullptr;
    if (e)
        for (size_t i = 0; i < n; i++) out[i] = compensated(g[i], e[i], r.source->decay) - settled(out[i]);
    else
        for (size_t i = 0; i < n; i++) out[i] = g[i] - settled(out[i]);
    r.far ? copy_far(to, out, n) : (void)std::memcpy(to, out, n * sizeof(float));
}

void quantize_any(const Grid& grid, const Entries& entries, Outliers& outliers) {
    constexpr size_t kBlock = 512;  // in simple loops that stay in the first-level cache
    const Grid g = grid;  // copies: what is stored could otherwise change them
    const Entries e = entries;
    const int number = 2 * g.largest + 1;
    int32_t multiple[kBlock];
    float value[kBlock];
    for (size_t start = 0; start < e.count; start += kBlock) {
        const int n = int(e.count - start < kBlock ? e.count - start : kBlock);
        const float *u = e.u + start, *p = e.prediction ? e.prediction + start : nullptr;
        uint8_t* const symbols = e.symbols + start;
        float* const memory = e.memory + start;
        if (p)
            for (int i = 0; i < n; i++) multiple[i] = grid_multiple<false>(g, u[i] - p[i], 0);
        else
            for (int i = 0; i < n; i++) multiple[i] = grid_multiple<false>(g, u[i], 0);
        uint32_t outside = 0;
        for (int i = 0; i < n; i++)
            outside |= uint32_t(multiple[i] + g.largest > 2 * g.largest) | uint32_t(multiple[i] < -g.largest);
        const size_t before = outliers.count;
        if (outside)
            for (int i = 0; i < n; i++)
                if (multiple[i] > g.largest || multiple[i] < -g.largest)
                    multiple[i] = outliers.add(e.first + start + i, multiple[i], g.largest);
        for (int i = 0; i < n; i++) symbols[i] = uint8_t(multiple[i] + g.largest);
        look_up(e.values, number, symbols, size_t(n), value);
        for (size_t k = before; k < outliers.count; k++) {
            float& apart = value[size_t(outliers.positions[k]) - e.first - start];
            apart = apart + g.beyond(outliers.multiples[k]);
        }
        if (p)
            for (int i = 0; i < n; i++) memory[i] = u[i] - settled(value[i] + p[i]);
        else
            for (int i = 0; i < n; i++) memory[i] = u[i] - settled(value[i]);
    }
}

// `places` are the sums over rows. Rows are done four at a time, so that the sums are loaded once for them.
typedef double Eight __attribute__((vector_size(64), aligned(8), may_alias));
typedef float EightFloats __attribute__((vector_size(32), aligned(4), may_alias));

template <int Rows>
inline void energies_some(const float* x, size_t width, double* rows, double* places) {
    Eight sum[Rows] = {};
    size_t i = 0;
    for (; i + 8 <= width; i += 8) {
        Eight place = *reinterpret_cast<Eight*>(places + i);
        for (int r = 0; r < Rows; r++) {
            const Eight v = __builtin_convertvector(*reinterpret_cast<const EightFloats*>(x + r * width + i), Eight);
            const Eight square = v * v;
            sum[r] += square;
            place += square;
        }
        *reinterpret_cast<Eight*>(places + i) = place;
    }
    for (int r = 0; r < Rows; r++) {
        for (size_t q = i; q < width; q++) {
            const double v = x[r * width + q];
            sum[r][0] += v * v;
            places[q] += v * v;
        }
        rows[r] = ((sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3])) +
                  ((sum[r][4] + sum[r][5]) + (sum[r][6] + sum[r][7]));
    }
}

void energies_any(const float* x, size_t count, size_t width, double* rows, double* places) {
    size_t row = 0;
    const size_t whole = count / width;
    for (; row + 4 <= whole; row += 4) energies_some<4>(x + row * width, width, rows + row, places);
    for (; row < whole; row++) energies_some<1>(x + row * width, width, rows + row, places);
    if (size_t rest = count - whole * width) {
        rows[whole] = 0;
        for (size_t q = 0; q < rest; q++) {
            const double v = x[whole * width + q];
            rows[whole] += v * v;
            places[q] += v * v;
        }
    }
}

template <int Rows>
inline void project_some(const float* x, size_t width, const float* basis, float* out) {
    Sixteen sum[Rows] = {};
    for (size_t q = 0; q < width; q++) {
        const Sixteen b = load16(basis + q * kDirections);
        for (int r = 0; r < Rows; r++) sum[r] = multiply_add(x[r * width + q], b, sum[r]);
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
inline void project_back_some(const float* x, size_t width, const float* basis, float* out) {
    Sixteen b[Rows];
    for (int r = 0; r < Rows; r++) b[r] = load16(basis + r * kDirections);
    for (size_t q = 0; q < width; q++) {
        Sixteen sum = load16(out + q * kDirections), odd = {};
        for (int r = 0; r < Rows; r += 2) {
            sum = multiply_add(x[r * width + q], b[r], sum);
            if (r + 1 < Rows) odd = multiply_add(x[(r + 1) * width + q], b[r + 1], odd);
        }
        store16(out + q * kDirections, sum + odd);
    }
}

void add_columns_any(const float* x, size_t rows, size_t width, const float* left, float* right) {
    if (rows == kRowsTogether) return project_back_some<kRowsTogether>(x, width, left, right);
    for (size_t i = 0; i < rows; i++) project_back_some<1>(x + i * width, width, left + i * kDirections, right);
}

typedef uint8_t Bytes64 __attribute__((vector_size(64), aligned(1), may_alias));

GRADWIRE_INLINE Bytes64 load64(const uint8_t* x) { return *reinterpret_cast<const Bytes64*>(x); }

// Counts of a few symbols that occur alone, two at a time.
inline void count_few(const uint8_t* symbols, size_t n, int low, int high, int64_t* counts) {
    constexpr size_t kMost = 128 * 64;  // no byte of a sum overflows, and they stay in the first-level cache
    for (size_t i = 0; i < n; i += kMost) {
        const size_t end = i + (n - i < kMost ? n - i : kMost);
        for (int s = low; s <= high; s += 2) {
            Bytes64 sum[2] = {};
            const Bytes64 wanted[2] = {uint8_t(s) - Bytes64{}, uint8_t(s + 1) - Bytes64{}};
            for (size_t j = i; j < end; j += 64)
                for (int k = 0; k < 2; k++) sum[k] -= Bytes64(load64(symbols + j) == wanted[k]);
            for (int k = 0; k < 2; k++)
                for (int l = 0; l < 64; l++) counts[(s + k) & 255] += sum[k][l];
        }
    }
}

void count_symbols_any(const uint8_t* symbols, size_t n, int64_t* counts) {
    constexpr int kFew = 10;
    const size_t whole = n / 64 * 64;
    Bytes64 least = ~Bytes64{}, most = {};
    for (size_t i = 0; i < whole; i += 64) {
        const Bytes64 x = load64(symbols + i);
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    int low = 255, high = 0;
    for (int l = 0; whole && l < 64; l++) {
        low = least[l] < low ? least[l] : low;
        high = most[l] > high ? most[l] : high;
    }
    size_t i = 0;
    if (high - low < kFew) {
        count_few(symbols, whole, low, high, counts);
        i = whole;
    }
    uint32_t four[4][256] = {};
    while (i + 4 <= n) {
        const size_t end = n - i < size_t(1) << 31 ? n : i + (size_t(1) << 31);  // no sum overflows
        for (; i + 4 <= end; i += 4)
            for (int l = 0; l < 4; l++) four[l][symbols[i + l]]++;
        for (int s = 0; s < 256; s++)
            for (auto& each : four) counts[s] += each[s], each[s] = 0;
    }
    for (; i < n; i++) counts[symbols[i]]++;
}

// out[i][j] = Σ a[n][i]·b[n][j], in fp64: eight rows of it at a time, which registers hold.
void gram_any(const float* a, const float* b, size_t count, double* out) {
    constexpr int kRows = 8;
    for (int first = 0; first < kDirections; first += kRows) {
        Eight sum[kRows][2] = {};
        for (size_t n = 0; n < count; n++) {
            Eight right[2];
            for (int k = 0; k < 2; k++)
                right[k] = __builtin_convertvector(*reinterpret_cast<const EightFloats*>(b + n * kDirections + 8 * k),
                                                   Eight);
            for (int i = 0; i < kRows; i++)
                for (int k = 0; k < 2; k++) sum[i][k] += double(a[n * kDirections + first + i]) * right[k];
        }
        std::memcpy(out + first * kDirections, sum, sizeof sum);
    }
}

constexpr StructureLoops structure_loops() {
    return {compensate_any, transform_any,   rebuild_any,       predict_any, energies_any,      project_rows_any,
            quantize_any,   add_columns_any, count_symbols_any, gram_any,    class_part_loops()};
}

}  // namespace
}  // namespace gradwire
