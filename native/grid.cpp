// The grid without vector instructions, the choice between them, the search's measure, and the codes of outliers.
#include <algorithm>
#include <cmath>

#include "grid_loop.h"

namespace gradwire {

const GridKernels portable_grid = {grid_any, grid_rans};

const GridKernels& grid_kernels() { return GRADWIRE_IN_USE(grid); }

// ── what a grid comes to ──

namespace {

constexpr int kSizes[] = {7, 15, 31, 63, 127}, kFinest = 127;
constexpr double kNearly = 1.01;

// log2 of an integer: beyond the table, of its leading bits.
double log_of(const double* logs, int64_t i) {
    int shift = 0;
    for (; i > kLogs; i >>= 1) shift++;
    return logs[i] + shift;
}

int bit_length(uint64_t v) { return v ? 64 - __builtin_clzll(v) : 0; }

// About what the outliers of a grid take; `number` of them, whose excesses are 0, 1, … in `cells`, or in the middle
// of nowhere: `ends`.
double outlier_bits(const int64_t* cells, int n, int64_t ends, int64_t number, int64_t count, const double* logs) {
    if (!number) return 0;
    int64_t total = ends * (n + 32);
    for (int i = 0; i < n; i++) total += cells[i] * i;
    const int b = std::max(0, bit_length(uint64_t(total / number)) - 1);
    int64_t codes = ends * (2 * bit_length(((n + 32) >> b) + 1) - 1 + b);
    for (int i = 0; i < n; i++) codes += cells[i] * (2 * bit_length((i >> b) + 1) - 1 + b);
    return double(number) * (log_of(logs, count) - log_of(logs, number) + 2.5) + double(codes);
}

}  // namespace

bool grid_measure(const float* x, const double* first, const double* second, size_t n, int64_t zeros,
                  const double* logs, float step, float shift, Measured& out) {
    // Where the cells of the magnitudes 1, 2, … begin, on both sides.
    size_t above[kFinest + 1], below[kFinest + 1];
    const float *from = x, *to = x + n;
    for (int j = 0; j <= kFinest; j++) {
        const float edge = (float(j + 1) - shift) * step;
        from = std::lower_bound(from, x + n, edge);
        to = std::upper_bound(x, to, -edge);
        above[j] = size_t(from - x);
        below[j] = size_t(to - x);
    }
    if (below[0] > above[0]) return false;  // NaNs, or zeros beside a cell of zero without width
    const int64_t count = int64_t(n) + zeros, ends = int64_t(n - above[kFinest] + below[kFinest]),
                  capacity = count / 16 + 16;
    if (ends > capacity) return false;
    int64_t positive[kFinest], negative[kFinest], both[kFinest], rest = 0;
    double sum1[kFinest], sum2[kFinest], excess = 0;
    const double wide = double(step);
    for (int j = 0; j < kFinest; j++) {
        positive[j] = int64_t(above[j + 1] - above[j]);
        negative[j] = int64_t(below[j] - below[j + 1]);
        both[j] = positive[j] + negative[j];
        sum1[j] = (first[above[j + 1]] - first[above[j]]) - (first[below[j]] - first[below[j + 1]]);
        sum2[j] = (second[above[j + 1]] - second[above[j]]) + (second[below[j]] - second[below[j + 1]]);
        if (j) {
            excess += sum1[j] / wide - double((j + 1) * both[j]);
            rest += both[j];
        }
    }
    auto offset = [](double e, int64_t k) {
        return k ? int(std::min(std::max(std::nearbyint(256 * e / double(k)), -128.0), 127.0)) : 0;
    };
    out.offsets[0] = offset(sum1[0] / wide - double(both[0]), both[0]);
    out.offsets[1] = offset(excess, rest);
    double error = second[above[0]] - second[below[0]];
    for (int j = 0; j < kFinest; j++) {
        const double r = (double(j + 1) + double(out.offsets[j ? 1 : 0]) / 256) * wide;
        error += (sum2[j] - 2 * r * sum1[j]) + r * r * double(both[j]);
    }
    error += double(ends) * wide * wide / 12;
    out.error = error > 0 ? error : 0;
    // The smallest alphabet that is nearly the cheapest.
    double bits[5], apart[5], least = 0;
    int found[5], k = 0;
    for (int largest : kSizes) {
        int64_t inside = 0;
        double spent = 0;
        for (int j = 0; j < largest; j++) {
            inside += both[j];
            spent += double(positive[j]) * log_of(logs, positive[j]) + double(negative[j]) * log_of(logs, negative[j]);
        }
        int64_t outside = ends;
        for (int j = largest; j < kFinest; j++) outside += both[j];
        if (outside > capacity) continue;
        spent += double(count - inside) * log_of(logs, count - inside);
        apart[k] = outlier_bits(both + largest, kFinest - largest, ends, outside, count, logs);
        bits[k] = (double(count) * log_of(logs, count) - spent) + apart[k];
        least = k ? std::min(least, bits[k]) : bits[k];
        found[k++] = largest;
        if (!outside) break;
    }
    for (int i = 0; i < k; i++)
        if (bits[i] <= kNearly * least) {
            out.bits = bits[i];
            out.outlier_bits = apart[i];
            out.largest = found[i];
            return true;
        }
    return false;
}

// ── outliers ──

void add_at(float* x, const int64_t* positions, const float* values, size_t count) {
    constexpr size_t kAhead = 32;  // each is a cache miss: have many of them under way
    for (size_t i = 0; i < count; i++) {
        if (i + kAhead < count) __builtin_prefetch(x + positions[i + kAhead], 1);
        x[positions[i]] += values[i];
    }
}

namespace {

struct BitWriter {
    uint8_t* p;
    uint64_t word = 0;
    int used = 0;

    void put(uint64_t bits, int n) {  // n < 57
        word |= bits << used;
        for (used += n; used >= 8; used -= 8, word >>= 8) *p++ = uint8_t(word);
    }
    void zeros(uint64_t n) {
        for (; n > 32; n -= 32) put(0, 32);
        put(0, int(n));
    }
};

struct BitReader {
    const uint8_t* data;
    uint64_t at, end;  // in bits

    bool bit() {
        const bool b = data[at >> 3] >> (at & 7) & 1;
        at++;
        return b;
    }
    bool take(int n, uint64_t& value) {  // n < 57
        if (end - at < uint64_t(n)) return false;
        value = 0;
        for (int done = 0; done < n;) {
            const int offset = int(at & 7), k = std::min(8 - offset, n - done);
            value |= uint64_t(data[at >> 3] >> offset & ((1 << k) - 1)) << done;
            done += k;
            at += uint64_t(k);
        }
        return true;
    }
    bool zeros(uint64_t& n) {
        const uint64_t start = at;
        while (at < end) {
            const uint8_t left = uint8_t(data[at >> 3] >> (at & 7));
            if (left) {
                at += uint64_t(__builtin_ctz(left));
                n = at++ - start;
                return true;
            }
            at = (at | 7) + 1;
        }
        return false;
    }
};

}  // namespace

size_t pack_outliers(const int64_t* gaps, const uint8_t* negative, const int64_t* excesses, size_t n, int a, int b,
                     uint8_t* out) {
    BitWriter w{out};
    for (size_t i = 0; i < n; i++) {
        const uint64_t gap = uint64_t(gaps[i]), x = uint64_t(excesses[i]), head = (x >> b) + 1;
        const int size = bit_length(head) - 1;
        w.zeros(gap >> a);
        w.put(1, 1);
        w.put(gap & ((1ull << a) - 1), a);
        w.put(negative[i], 1);
        w.put(0, size);
        w.put(1, 1);
        w.put(head & ((1ull << size) - 1), size);
        w.put(x & ((1ull << b) - 1), b);
    }
    if (w.used) *w.p++ = uint8_t(w.word);
    return size_t(w.p - out);
}

bool unpack_outliers(const uint8_t* data, size_t length, size_t n, int64_t elements, int largest, int a, int b,
                     int64_t* positions, int32_t* multiples) {
    BitReader r{data, 0, 8 * uint64_t(length)};
    int64_t position = -1;
    for (size_t i = 0; i < n; i++) {
        uint64_t quotient, low, sign, size, head, rest;
        if (!r.zeros(quotient) || quotient > (uint64_t(elements) >> a) || !r.take(a, low)) return false;
        position += 1 + int64_t((quotient << a) + low);
        if (!r.take(1, sign) || !r.zeros(size) || size > 24 || position >= elements) return false;
        if (!r.take(int(size), head) || !r.take(b, rest)) return false;
        const uint64_t magnitude = uint64_t(largest) + 1 + ((((1ull << size) | head) - 1) << b) + rest;
        if (magnitude > uint64_t(kGridLimit)) return false;
        positions[i] = position;
        multiples[i] = sign ? -int32_t(magnitude) : int32_t(magnitude);
    }
    uint64_t left = 0;
    return r.end - r.at <= 7 && r.take(int(r.end - r.at), left) && !left;
}

}  // namespace gradwire
