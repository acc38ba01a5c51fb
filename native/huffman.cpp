// Huffman codes of up to 15 bits, the first bit highest.
//
// Traps:
// - A code is found by the bits that come next, so each look at the table waits for the one before. With two symbols to
//   a look, and four looks at the same eight bytes, that is a nanosecond a symbol.
// - Data may be damaged: bits without a code, codes behind the end, and padding that is not zero are all refused.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.h"

namespace gradwire {

namespace {

// How often each symbol's leaf is in a package, and its weight.
struct Package {
    int64_t weight;
    std::vector<uint8_t> leaves;
};

}  // namespace

void huffman_lengths(const int64_t* frequencies, int symbols, uint8_t* lengths) {
    constexpr int kRounds = 15;  // the longest code
    std::vector<int> order;
    for (int s = 0; s < symbols; s++)
        if (frequencies[s]) order.push_back(s);
    const auto lighter = [&](int a, int b) { return frequencies[a] < frequencies[b]; };
    std::stable_sort(order.begin(), order.end(), lighter);
    std::vector<Package> leaves, packages;
    for (int s : order) {
        leaves.push_back({frequencies[s], std::vector<uint8_t>(size_t(symbols))});
        leaves.back().leaves[size_t(s)] = 1;
    }
    for (int round = 0; round < kRounds; round++) {
        std::vector<Package> merged(leaves), pairs;
        merged.insert(merged.end(), packages.begin(), packages.end());
        std::stable_sort(merged.begin(), merged.end(),
                         [](const Package& a, const Package& b) { return a.weight < b.weight; });
        for (size_t i = 0; i + 1 < merged.size(); i += 2) {
            pairs.push_back(std::move(merged[i]));
            pairs.back().weight += merged[i + 1].weight;
            for (size_t s = 0; s < size_t(symbols); s++) pairs.back().leaves[s] += merged[i + 1].leaves[s];
        }
        packages.swap(pairs);
    }
    for (int s = 0; s < symbols; s++) lengths[s] = 0;
    for (size_t i = 0; i + 1 < leaves.size(); i++)
        for (int s = 0; s < symbols; s++) lengths[s] = uint8_t(lengths[s] + packages[i].leaves[size_t(s)]);
}

size_t huffman_encode(const uint8_t* symbols, size_t n, const uint8_t* lengths, const uint16_t* codes, uint8_t* out) {
    uint8_t* p = out;
    uint64_t bits = 0;  // the lowest `filled` bits are waiting, the oldest highest
    int filled = 0;
    for (size_t i = 0; i < n; i++) {
        bits = bits << lengths[symbols[i]] | codes[symbols[i]];
        filled += lengths[symbols[i]];
        if (filled >= 32) {
            filled -= 32;
            uint32_t word = uint32_t(bits >> filled);
            *p++ = uint8_t(word >> 24);
            *p++ = uint8_t(word >> 16);
            *p++ = uint8_t(word >> 8);
            *p++ = uint8_t(word);
        }
    }
    for (; filled > 0; filled -= 8) *p++ = uint8_t(filled >= 8 ? bits >> (filled - 8) : bits << (8 - filled));
    return p - out;
}

namespace {

struct Code {
    uint8_t symbol, length;  // length 0: no such code
};

// The code that the first bits of a number begin with, by as many bits as the longest code has.
std::vector<Code> codes_by_bits(const uint8_t* lengths, const uint16_t* codes, int symbols, int longest) {
    const size_t size = size_t(1) << longest;
    std::vector<Code> table(size, Code{0, 0});
    for (int s = 0; s < symbols; s++) {
        if (!lengths[s]) continue;
        const int open = longest - lengths[s];
        for (size_t i = 0, first = size_t(codes[s]) << open; i < size_t(1) << open; i++)
            table[(first + i) & (size - 1)] = {uint8_t(s), lengths[s]};
    }
    return table;
}

// What a window of bits begins with: two symbols if both codes are in it, one if its code is, or none.
struct Window {
    uint8_t symbols[2], count, length;
};

constexpr int kWindow = 12;  // bits: two usual codes, and a table that stays in the first-level cache
constexpr size_t kLooks = 4;  // at eight bytes, of which 57 bits are there wherever the first one is
constexpr size_t kWorthWindows = 1 << 14;  // symbols

std::vector<Window> all_windows(const std::vector<Code>& codes, int longest) {
    constexpr uint32_t size = 1u << kWindow;
    const auto first_code = [&](uint32_t bits) {
        const Code found = codes[longest > kWindow ? bits << (longest - kWindow) : bits >> (kWindow - longest)];
        return found.length <= kWindow ? found : Code{0, 0};
    };
    std::vector<Window> table(size, Window{{0, 0}, 0, 0});
    for (uint32_t bits = 0; bits < size; bits++) {
        const Code one = first_code(bits);
        if (!one.length) continue;
        const Code two = first_code(bits << one.length & (size - 1));
        const bool both = two.length && one.length + two.length <= kWindow;
        table[bits] = {{one.symbol, two.symbol}, uint8_t(both ? 2 : 1), uint8_t(one.length + (both ? two.length : 0))};
    }
    return table;
}

// Eight bytes from bit `at` on, the first bit highest; the last seven bits may be missing.
inline uint64_t bits_from(const uint8_t* data, size_t at) {
    uint64_t x = 0;
    for (int k = 0; k < 8; k++) x = x << 8 | data[(at >> 3) + k];
    return x << (at & 7);
}

}  // namespace

bool huffman_decode(const uint8_t* data, size_t length, size_t n, const uint8_t* lengths, const uint16_t* codes,
                    int symbols, uint8_t* out) {
    int longest = 0;
    for (int s = 0; s < symbols; s++) longest = lengths[s] > longest ? lengths[s] : longest;
    if (!longest || longest > 15) return false;
    const std::vector<Code> table = codes_by_bits(lengths, codes, symbols, longest);
    size_t at = 0, i = 0;  // the bit that comes next, and the symbol
    if (n >= kWorthWindows) {
        const std::vector<Window> windows = all_windows(table, longest);
        while (n - i >= 2 * kLooks && (at >> 3) + 8 <= length) {
            uint64_t bits = bits_from(data, at);
            const size_t before = at;
            for (size_t look = 0; look < kLooks; look++) {
                const Window w = windows[bits >> (64 - kWindow)];
                std::memcpy(out + i, w.symbols, 2);
                i += w.count;
                at += w.length;
                bits <<= w.length;
            }
            if (at != before) continue;
            const Code one = table[bits >> (64 - longest)];  // too long for a window
            if (!one.length) return false;
            out[i++] = one.symbol;
            at += one.length;
        }
    }
    for (; i < n; i++) {
        uint32_t bits = 0;  // zeros are read past the end
        for (size_t byte = at >> 3; byte < (at >> 3) + 3; byte++) bits = bits << 8 | (byte < length ? data[byte] : 0);
        const Code one = table[bits << (at & 7) >> (24 - longest) & ((1u << longest) - 1)];
        at += one.length;
        if (!one.length || at > 8 * length) return false;
        out[i] = one.symbol;
    }
    return (at + 7) / 8 == length && !(at & 7 && uint8_t(data[length - 1] << (at & 7)));
}

}  // namespace gradwire
