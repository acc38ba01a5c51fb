// Rounding to a small float format, for any format; compiled once per instruction set and vectorised there.
//
// Traps:
// - No fused multiply-add anywhere (the build says -ffp-contract=off): the reference rounds after each operation.
// - Rounding to a multiple of a power of two is done by adding 1.5 * 2^23 such multiples: the sum has no bits
//   left below the multiple, and the addition itself rounds to nearest, ties to even.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels.h"

// The hot functions of the vector kernels are small, but used by several templates; the compiler would rather call them.
#define GRADWIRE_INLINE [[gnu::always_inline]] inline

namespace gradwire {
namespace {  // one copy per instruction set: an inline function with one name could be linked from the wrong one

inline uint32_t as_bits(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}
inline float as_float(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0x735a2d97u;
    return x ^ (x >> 15);
}

// 24 random bits for an entry: the generator of docs/wire-format.md.
inline uint32_t random24(uint64_t index, uint64_t seed) {
    uint32_t key1 = mix(uint32_t(seed) ^ 0x9e3779b9u ^ mix(uint32_t(index >> 32)));
    uint32_t key2 = mix(key1 ^ uint32_t(seed >> 32));
    return mix(mix(uint32_t(index) ^ key1) + key2) >> 8;
}

inline float compensated(float gradient, float memory, float decay) {
    float u = gradient + memory * decay;
    return u > FLT_MAX ? FLT_MAX : (u < -FLT_MAX ? -FLT_MAX : u);
}

template <bool Stochastic>
inline int to_symbol(const Quantizer& q, float u, uint64_t index) {
    float y = u * q.inverse;
    float a = q.has_sign ? std::fabs(y) : (y > 0 ? y : 0.0f);
    a = a < q.largest ? a : q.largest;
    int exponent = int(as_bits(a) >> 23) - 127;
    exponent = exponent > q.min_exponent ? exponent : q.min_exponent;
    uint32_t magic = (uint32_t(exponent - q.mantissa + 23 + 127) << 23) | 0x400000u;
    int multiple = int(as_bits(a + as_float(magic)) - magic);
    if (Stochastic) {
        // Down to the multiple below, then up with the probability of what is left.
        float spacing = as_float(uint32_t(exponent - q.mantissa + 127) << 23);
        if (float(multiple) * spacing > a) multiple -= 1;
        float rest = (a - float(multiple) * spacing) / spacing;
        multiple += float(random24(index, q.seed)) * (1.0f / 16777216.0f) < rest;
    }
    int i = ((exponent - q.min_exponent) << q.mantissa) + multiple;
    i = i < q.top_index ? i : q.top_index;
    return q.zero_symbol + (y < 0 ? -i : i);
}

inline float rounding_error(const Quantizer& q, float u) {
    float y = u * q.inverse;
    float a = q.has_sign ? std::fabs(y) : (y > 0 ? y : 0.0f);
    float limited = a < q.largest ? a : q.largest;
    int exponent = int(as_bits(limited) >> 23) - 127;
    exponent = exponent > q.min_exponent ? exponent : q.min_exponent;
    float magic = as_float((uint32_t(exponent - q.mantissa + 23 + 127) << 23) | 0x400000u);
    return std::fabs(y) - ((limited + magic) - magic);
}

// Sum of the squared errors of rounding u, in units of the step squared. Sixteen sums, so that it vectorises.
inline double squared_error_loop(const Quantizer& quantizer, const float* u, size_t n) {
    const Quantizer q = quantizer;
    double total = 0;
    size_t i = 0;
    while (n - i >= 16) {
        float sums[16] = {};
        const size_t end = i + (n - i < 1024 ? (n - i) / 16 * 16 : 1024);
        for (; i < end; i += 16)
            for (int l = 0; l < 16; l++) {
                float e = rounding_error(q, u[i + l]);
                sums[l] += e * e;
            }
        for (float s : sums) total += s;
    }
    for (; i < n; i++) total += double(rounding_error(q, u[i])) * rounding_error(q, u[i]);
    return total;
}

// In blocks that stay in the first-level cache, one simple loop for each step, so that the compiler vectorises them.
template <bool Memory, bool Stochastic>
inline void quantize_loop(const Quantizer& quantizer, const Stream& s, uint8_t* symbols) {
    constexpr size_t kBlock = 1024;
    const Quantizer q = quantizer;  // a copy: stores to `symbols` could otherwise change it
    float u[kBlock];
    int32_t symbol[kBlock];
    for (size_t start = 0; start < s.count; start += kBlock) {
        const int n = int(s.count - start < kBlock ? s.count - start : kBlock);
        const float *gradient = s.gradient + start, *memory = Memory ? s.memory + start : nullptr;
        for (int i = 0; i < n; i++) u[i] = Memory ? compensated(gradient[i], memory[i], q.decay) : gradient[i];
        for (int i = 0; i < n; i++) symbol[i] = to_symbol<Stochastic>(q, u[i], s.first + start + i);
        for (int i = 0; i < n; i++) symbols[start + i] = uint8_t(symbol[i]);
        if (float* out = s.memory_out)
            for (int i = 0; i < n; i++) out[start + i] = u[i] - q.values[symbol[i]];
    }
}

[[maybe_unused, gnu::noinline]] void quantize_any(const Quantizer& q, const Stream& s, uint8_t* symbols) {
    if (q.stochastic)
        s.memory ? quantize_loop<true, true>(q, s, symbols) : quantize_loop<false, true>(q, s, symbols);
    else
        s.memory ? quantize_loop<true, false>(q, s, symbols) : quantize_loop<false, false>(q, s, symbols);
}

// fp4's magnitudes are 0, .5, 1, 1.5, 2, 3: evenly spaced up to 2, so that rounding 2|y| to an integer does it up to
// 4, and one comparison does the rest: vector kernels have a short cut for it. (2.5 is a tie between 2, twice the spacing there, and 3: it goes to 2.)
inline bool is_fp4(const Quantizer& q) {
    return q.has_sign && q.mantissa == 1 && q.min_exponent == 0 && q.top_index == 5 && !q.stochastic;
}

inline uint32_t absmax_bits_loop(const float* x, size_t n) {
    uint32_t most = 0;  // magnitudes order like their bit patterns; infinities and NaN are above all others
    for (size_t i = 0; i < n; i++) {
        uint32_t b = as_bits(x[i]) & 0x7fffffffu;
        most = b > most ? b : most;
    }
    return most;
}

// Whether all of u = g + decay * memory is finite.
[[maybe_unused]] inline bool all_finite(const Quantizer& q, const Stream& s) {
    uint32_t most = 0;
    for (size_t i = 0; i < s.count; i++) {
        float u = s.memory ? s.gradient[i] + s.memory[i] * q.decay : s.gradient[i];
        uint32_t b = as_bits(u) & 0x7fffffffu;
        most = b > most ? b : most;
    }
    return most < 0x7f800000u;
}

}  // namespace
}  // namespace gradwire
