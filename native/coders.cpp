// The parts that need no vector instructions of their own: tables, bit packing, moments, samples.
#include <cmath>
#include <cstring>
#include <vector>

#include "quantize.h"

namespace gradwire {

RansTable::RansTable(const int64_t* frequencies, int symbols_, int precision_)
    : precision(precision_), symbols(symbols_), frequency{}, start{}, reciprocal{}, symbol_of_slot{} {
    uint32_t slot = 0;
    for (int s = 0; s < symbols; s++) {
        frequency[s] = uint32_t(frequencies[s]);
        start[s] = slot;
        if (frequency[s]) {
            float r = 1.0f / float(frequency[s]);
            reciprocal[s] = double(r) * frequency[s] < 1.0 ? std::nextafterf(r, 2.0f) : r;
        }
        std::memset(symbol_of_slot + slot, s, frequency[s]);
        slot += frequency[s];
    }
}

void moments(const float* x, size_t n, int64_t& nonzero, double& sum_abs, double& sum_square) {
    double a[8] = {}, q[8] = {};
    int64_t c[8] = {};
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) {
            double v = std::fabs(double(x[i + l]));
            a[l] += v;
            q[l] += v * v;
            c[l] += v != 0;
        }
    for (; i < n; i++) {
        double v = std::fabs(double(x[i]));
        a[0] += v;
        q[0] += v * v;
        c[0] += v != 0;
    }
    nonzero = 0;
    sum_abs = sum_square = 0;
    for (int l = 0; l < 8; l++) {
        nonzero += c[l];
        sum_abs += a[l];
        sum_square += q[l];
    }
}

void sample(const float* gradient, const float* memory, float decay, size_t n, size_t runs, size_t length, float* out) {
    if (n <= runs * length) {
        for (size_t i = 0; i < n; i++) out[i] = memory ? compensated(gradient[i], memory[i], decay) : gradient[i];
        return;
    }
    constexpr size_t kAhead = 8, kLine = 16;  // each run is a few cache misses: have those of several under way
    const size_t stratum = n / runs;
    const auto start_of = [&](size_t r) { return r * stratum + mix(uint32_t(r)) % (stratum - length + 1); };
    for (size_t r = 0; r < runs; r++) {
        if (r + kAhead < runs)
            for (size_t i = start_of(r + kAhead), end = i + length; i < end; i += kLine) {
                __builtin_prefetch(gradient + i);
                if (memory) __builtin_prefetch(memory + i);
            }
        const size_t start = start_of(r);
        for (size_t i = start; i < start + length; i++)
            *out++ = memory ? compensated(gradient[i], memory[i], decay) : gradient[i];
    }
}

namespace {

// Eight bytes as a number, the first lowest; compilers make one load or store of it.
inline uint64_t load8(const uint8_t* p) {
    uint64_t x = 0;
    for (int k = 0; k < 8; k++) x |= uint64_t(p[k]) << 8 * k;
    return x;
}
inline void store8(uint64_t x, uint8_t* p) {
    for (int k = 0; k < 8; k++) p[k] = uint8_t(x >> 8 * k);
}

constexpr uint64_t kPairs = 0x00ff00ff00ff00ffull, kFours = 0x0000ffff0000ffffull;

// Eight symbols of `w` bits, a byte each, to 8w bits and back: pairs, then pairs of pairs, then both halves.
inline uint64_t squeeze(uint64_t x, int w) {
    x = (x & kPairs) | (x >> 8 & kPairs) << w;
    x = (x & kFours) | (x >> 16 & kFours) << 2 * w;
    return (x & 0xffffffffu) | x >> 32 << 4 * w;
}
inline uint64_t stretch(uint64_t x, int w) {
    const uint64_t mask = ~0ull >> (64 - w), two = ~0ull >> (64 - 2 * w), four = ~0ull >> (64 - 4 * w);
    x = (x & four) | (x >> 4 * w & four) << 32;
    x = (x & (two | two << 32)) | (x >> 2 * w & (two | two << 32)) << 16;
    const uint64_t all = mask | mask << 16 | mask << 32 | mask << 48;
    return (x & all) | (x >> w & all) << 8;
}

}  // namespace

void pack_bits(const uint8_t* symbols, size_t n, int width, uint8_t* out) {
    uint64_t bits = 0;
    int filled = 0;
    size_t i = 0;
    // Eight symbols are `width` bytes; of the eight that are stored the others are overwritten by the next.
    for (; n - i >= 72; i += 8, out += width) store8(squeeze(load8(symbols + i), width), out);
    for (; i < n; i++) {
        bits |= uint64_t(symbols[i]) << filled;
        filled += width;
        while (filled >= 8) {
            *out++ = uint8_t(bits);
            bits >>= 8;
            filled -= 8;
        }
    }
    if (filled) *out = uint8_t(bits);
}

bool unpack_bits(const uint8_t* data, size_t n, int width, int limit, uint8_t* symbols) {
    uint64_t bits = 0;
    int filled = 0;
    bool good = true;
    const uint32_t mask = (1u << width) - 1;
    size_t i = 0;
    uint8_t largest = 0;
    for (; n - i >= 72; i += 8, data += width) store8(stretch(load8(data), width), symbols + i);
    for (size_t j = 0; j < i; j++) largest = symbols[j] > largest ? symbols[j] : largest;
    good = largest < limit;
    for (; i < n; i++) {
        if (filled < width) {
            bits |= uint64_t(*data++) << filled;
            filled += 8;
        }
        symbols[i] = uint8_t(bits & mask);
        good &= symbols[i] < limit;
        bits >>= width;
        filled -= width;
    }
    return good && bits == 0;
}

}  // namespace gradwire
