// The best levels of a bucket, on its sorted entries; compiled once per instruction set.
//
// Traps:
// - Results must equal the reference to the last bit: prefix sums add one entry after the other in fp64, and every
//   expression has the reference's order of operations.
// - Entries are sorted as integers whose order is that of the floats, by bytes: exact, and four times as fast as
//   std::sort on buckets of 2048.
#pragma once

#include <vector>

#include "levels_loops.h"

namespace gradwire {
namespace {

// Room for one bucket.
struct Sorter {
    std::vector<uint32_t> keys, other;
    std::vector<double> x, sums, squares, least, best, found;
    std::vector<uint32_t> choices;
};

inline uint32_t ordered(float v) {
    const uint32_t b = as_bits(v);
    return b ^ (uint32_t(int32_t(b) >> 31) | 0x80000000u);
}
inline float unordered(uint32_t key) { return as_float(key ^ (~uint32_t(int32_t(key) >> 31) | 0x80000000u)); }

inline void sort_keys(Sorter& t, size_t n) {
    uint32_t *from = t.keys.data(), *to = t.other.data();
    if (n < 128) {
        std::sort(from, from + n);
        return;
    }
    uint32_t counts[4][256] = {};
    for (size_t i = 0; i < n; i++)
        for (int pass = 0; pass < 4; pass++) counts[pass][from[i] >> 8 * pass & 255]++;
    for (int pass = 0; pass < 4; pass++) {
        uint32_t* c = counts[pass];
        if (c[from[0] >> 8 * pass & 255] == n) continue;  // all have the same byte
        uint32_t at = 0;
        for (int d = 0; d < 256; d++) {
            const uint32_t many = c[d];
            c[d] = at;
            at += many;
        }
        for (size_t i = 0; i < n; i++) to[c[from[i] >> 8 * pass & 255]++] = from[i];
        std::swap(from, to);
    }
    if (from != t.keys.data()) t.keys.swap(t.other);
}

inline size_t middle_rank(double total, size_t n, double low, double high) {
    if (!(high > low)) return 0;
    const double below = double(n) - (total - double(n) * low) / (high - low);
    return size_t(std::min(std::max(std::ceil(below) - 1, 0.0), double(n - 1)));
}

inline void orq_greedy(const Sorter& t, size_t n, int levels, float* out) {
    size_t index[kMaxLevels] = {};
    index[levels - 1] = n - 1;
    for (int span = levels - 1; span > 1; span /= 2)
        for (int left = 0; left < levels - 1; left += span) {
            const size_t i = index[left], j = index[left + span];
            index[left + span / 2] = i + middle_rank(t.sums[j] - t.sums[i], j - i, t.x[i], t.x[j]);
        }
    for (int k = 0; k < levels; k++) out[k] = float(t.x[index[k]]);
}

// least[i] + cost(i, j) for i from first to end, and the first of the smallest.
inline size_t cheapest(Sorter& t, size_t j, size_t first, size_t end, double& value) {
    const double *w = t.x.data(), *sums = t.sums.data(), *squares = t.squares.data(), *least = t.least.data();
    double* found = t.found.data();
    const double wj = w[j], sj = sums[j + 1], qj = squares[j + 1];
    for (size_t i = first; i <= end; i++) {
        const double inner = (wj + w[i]) * (sj - sums[i]) - double(int32_t(j - i + 1)) * (w[i] * wj);
        found[i] = least[i] + (inner - (qj - squares[i]));
    }
    double lanes[8];
    std::fill_n(lanes, 8, std::numeric_limits<double>::infinity());
    size_t i = first;
    for (; i + 7 <= end; i += 8)
        for (int l = 0; l < 8; l++) lanes[l] = found[i + l] < lanes[l] ? found[i + l] : lanes[l];
    for (; i <= end; i++) lanes[0] = found[i] < lanes[0] ? found[i] : lanes[0];
    value = *std::min_element(lanes, lanes + 8);
    for (i = first; i < end && found[i] != value; i++) {}
    return i;
}

inline void solve_range(Sorter& t, uint32_t* choice, ptrdiff_t low, ptrdiff_t high, size_t first, size_t end) {
    if (low > high) return;
    const size_t j = size_t(low + high) / 2;
    const size_t at = cheapest(t, j, first, std::min(end, j), t.best[j]);
    choice[j] = uint32_t(at);
    solve_range(t, choice, low, ptrdiff_t(j) - 1, first, at);
    solve_range(t, choice, ptrdiff_t(j) + 1, high, at, end);
}

inline void orq_exact(Sorter& t, size_t n, int levels, float* out) {
    const double first = t.x[0];
    t.squares.resize(n + 1);
    t.least.assign(n, 0);
    t.best.resize(n);
    t.found.resize(n);
    t.choices.resize(n * size_t(levels - 2));
    for (size_t i = 0; i < n; i++) {
        t.x[i] -= first;
        t.sums[i + 1] = t.sums[i] + t.x[i];
        t.squares[i + 1] = t.squares[i] + t.x[i] * t.x[i];
    }
    for (size_t j = 0; j < n; j++) {
        const double wj = t.x[j];
        t.best[j] = (wj + t.x[0]) * (t.sums[j + 1] - t.sums[0]) - double(int32_t(j + 1)) * (t.x[0] * wj) -
                    (t.squares[j + 1] - t.squares[0]);
    }
    for (int layer = 0; layer < levels - 2; layer++) {
        t.least.swap(t.best);
        solve_range(t, t.choices.data() + n * size_t(layer), layer == levels - 3 ? ptrdiff_t(n) - 1 : 0,
                    ptrdiff_t(n) - 1, 0, n - 1);
    }
    size_t j = n - 1;
    for (int k = levels - 1; k > 0; k--) {
        out[k] = unordered(t.keys[j]);
        if (k > 1) j = t.choices[n * size_t(k - 2) + j];
    }
    out[0] = unordered(t.keys[0]);
}

inline void bingrad_two(const Sorter& t, size_t n, float* out) {
    if (t.x[0] == t.x[n - 1]) {
        out[0] = out[1] = float(t.x[0]);
        return;
    }
    size_t best = 1;
    double most = -1;
    for (size_t c = 1; c < n; c++) {
        const double left = t.sums[c], right = t.sums[n] - t.sums[c];
        const double gain = left * left / double(c) + right * right / double(n - c);
        if (gain > most) most = gain, best = c;
    }
    out[0] = float(t.sums[best] / double(best));
    out[1] = float((t.sums[n] - t.sums[best]) / double(n - best));
}

inline float bingrad_pair(const Sorter& t, size_t n) {
    size_t c = 0;
    double mean = t.sums[n] / double(n);
    while (!(mean <= t.x[c]) && c + 1 < n) {
        c++;
        mean = (t.sums[n] - t.sums[c]) / double(n);
    }
    return float(c && t.x[c - 1] > mean ? t.x[c - 1] : mean);
}

inline void search_loop(const Stream& s, float decay, Buckets b, const float* limits, int levels, Search method,
                        float* out) {
    Sorter t;
    const bool pair = method == Search::pair;
    const int width = pair ? 1 : levels;
    for (size_t bucket = 0; bucket < b.count; bucket++, out += width) {
        const size_t start = size_t(b.starts[bucket]), n = size_t(b.starts[bucket + 1]) - start;
        t.keys.resize(n);
        t.other.resize(n);
        t.x.resize(n);
        t.sums.resize(n + 1);
        const float limit = limits ? limits[bucket] : std::numeric_limits<float>::infinity();
        uint32_t* keys = t.keys.data();
        for (size_t i = 0; i < n; i++) {
            float u = s.gradient[start + i];
            if (s.memory) u = compensated(u, s.memory[start + i], decay);
            u = u > limit ? limit : (u < -limit ? -limit : u);
            keys[i] = ordered(pair ? std::fabs(u) : u);
        }
        sort_keys(t, n);
        keys = t.keys.data();
        for (size_t i = 0; i < n; i++) t.x[i] = unordered(keys[i]);
        t.sums[0] = 0;
        if (!pair && n <= size_t(levels)) {
            for (int k = 0; k < levels; k++) out[k] = float(t.x[std::min(size_t(k), n - 1)]);
        } else {
            if (method != Search::exact)
                for (size_t i = 0; i < n; i++) t.sums[i + 1] = t.sums[i] + t.x[i];
            if (method == Search::greedy) orq_greedy(t, n, levels, out);
            if (method == Search::exact) orq_exact(t, n, levels, out);
            if (method == Search::two) bingrad_two(t, n, out);
            if (pair) out[0] = bingrad_pair(t, n);
        }
        for (int k = 0; k < width; k++) out[k] += 0.0f;  // no -0
    }
}

}  // namespace
}  // namespace gradwire
