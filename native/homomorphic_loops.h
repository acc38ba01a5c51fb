// Loops of the homomorphic code that are compiled once per instruction set, and vectorised there.
#pragma once

#include <cmath>

#include "homomorphic.h"
#include "quantize.h"

namespace gradwire {
namespace {  // one copy per instruction set

inline void cells_loop(const SketchShape& shape, const uint32_t* blocks, size_t n, Cells& out) {
    const uint32_t key = shape.key, key2 = shape.key2, starts = shape.segments - 3, low = (1u << shape.log) - 1;
    const int log = shape.log;
    for (size_t i = 0; i < n; i++) {
        const uint32_t x = mix(blocks[i] ^ key) + key2;
        const uint32_t a = mix(x), b = mix(x ^ kGolden), c = mix(x + kOther);
        const uint32_t start = uint32_t((uint64_t(a) * starts) >> 32) << log;
        out.of[0][i] = start + (b & low);
        out.of[1][i] = start + (1u << log) + ((b >> 16) & low);
        out.of[2][i] = start + (2u << log) + (c & low);
        out.of[3][i] = start + (3u << log) + ((c >> 16) & low);
    }
}

// Which word the i-th probe of a group is, and how far it is turned.
inline uint32_t probe(uint32_t group_hash, int i) { return mix(group_hash + uint32_t(i) * kGolden); }

inline void bloom_query_loop(const uint32_t* index, uint32_t index_words, int probes, uint32_t seed, size_t groups,
                             uint32_t* bitmap) {
    const uint32_t key = mix(seed ^ kOther);
    constexpr size_t kGroups = 256;  // stay in the first-level cache over all probes
    uint32_t hash[kGroups], found[kGroups];
    for (size_t start = 0; start < groups; start += kGroups) {
        const size_t n = groups - start < kGroups ? groups - start : kGroups;
        for (size_t j = 0; j < n; j++) {
            hash[j] = mix(uint32_t(start + j) ^ key);
            found[j] = ~0u;
        }
        for (int i = 0; i < probes; i++)
            for (size_t j = 0; j < n; j++) {
                const uint32_t h = probe(hash[j], i);
                const uint32_t word = index[(uint64_t(h) * index_words) >> 32];
                found[j] &= (word >> (h & 31)) | (word << (-h & 31));
            }
        std::memcpy(bitmap + start, found, 4 * n);
    }
}

template <bool Stochastic>
inline float on_grid(const FixedGrid& g, float u, uint64_t index) {
    float y = u / g.step;
    y = y < g.limit ? y : g.limit;
    y = y > -g.limit ? y : -g.limit;
    if (!Stochastic) return std::rint(y) + 0.0f;
    const float lower = std::floor(y);
    return lower + (float(random24(index, g.seed)) * (1.0f / 16777216.0f) < y - lower ? 1.0f : 0.0f) + 0.0f;
}

// Of a few entries, from one that a word begins with; returns nothing of positions and words but q.
template <bool Memory, bool Stochastic>
inline void fixed_entries(const FixedGrid& g, const Stream& s, int32_t* q, FixedResult& result) {
    const int n = int(s.count);
    uint32_t most_g = result.largest_g, most_u = result.largest_u;
    for (int i = 0; i < n; i++) {
        const float gradient = s.gradient[i];
        const float kept = Memory ? s.memory[i] * g.decay : 0.0f;
        const float u = gradient == 0 ? 0.0f : (Memory ? compensated(gradient, s.memory[i], g.decay) : gradient);
        const uint32_t bits_g = as_bits(gradient) & 0x7fffffffu, bits_u = as_bits(u) & 0x7fffffffu;
        most_g = bits_g > most_g ? bits_g : most_g;
        most_u = bits_u > most_u ? bits_u : most_u;
        const float rounded = on_grid<Stochastic>(g, u, s.first + i);
        q[i] = int32_t(rounded);
        result.squares[i & 15] += double(u) * double(u);
        if (s.memory_out) s.memory_out[i] = gradient == 0 ? kept : u - rounded * g.step;
    }
    result.largest_g = most_g;
    result.largest_u = most_u;
}

// Words that are not zero, of entries from `first` on.
inline void collect_words(const int32_t* q, size_t n, int bits, uint64_t first, int64_t* positions, int32_t* values,
                          FixedResult& result) {
    const size_t fields = size_t(32 / bits), words = (n + fields - 1) / fields, at = first / fields;
    size_t found = result.words;
    for (size_t j = 0; j < words; j++) {
        uint32_t word = 0;
        for (size_t e = 0; e < fields && j * fields + e < n; e++) word += uint32_t(q[j * fields + e]) << (bits * e);
        positions[found] = int64_t(at + j);
        values[found] = int32_t(word);
        found += word != 0;
    }
    result.words = found;
}

constexpr size_t kFixedBlock = 1024;

template <bool Memory, bool Stochastic>
inline void fixed_loop(const FixedGrid& grid, const Stream& s, int64_t* positions, int32_t* values,
                       FixedResult& result) {
    const FixedGrid g = grid;  // a copy: stores could otherwise change it
    int32_t q[kFixedBlock];
    for (size_t start = 0; start < s.count; start += kFixedBlock) {
        const size_t n = s.count - start < kFixedBlock ? s.count - start : kFixedBlock;
        fixed_entries<Memory, Stochastic>(g, s.part(start, n), q, result);
        collect_words(q, n, g.bits, s.first + start, positions, values, result);
    }
}

[[maybe_unused, gnu::noinline]] void fixed_any(const FixedGrid& g, const Stream& s, int64_t* positions, int32_t* values,
                                               FixedResult& result) {
    if (g.stochastic)
        s.memory ? fixed_loop<true, true>(g, s, positions, values, result)
                 : fixed_loop<false, true>(g, s, positions, values, result);
    else
        s.memory ? fixed_loop<true, false>(g, s, positions, values, result)
                 : fixed_loop<false, false>(g, s, positions, values, result);
}

[[maybe_unused]] void cells_any(const SketchShape& shape, const uint32_t* blocks, size_t n, Cells& out) {
    cells_loop(shape, blocks, n, out);
}
[[maybe_unused]] void bloom_query_any(const uint32_t* index, uint32_t index_words, int probes, uint32_t seed,
                                      size_t groups, uint32_t* bitmap) {
    bloom_query_loop(index, index_words, probes, seed, groups, bitmap);
}

}  // namespace
}  // namespace gradwire
