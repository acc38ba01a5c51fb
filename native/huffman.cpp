// Huffman codes of up to 15 bits, the first bit highest.
//
// Traps:
// - A code is found by the bits that come next, so each look at the table waits for the one before: two nanoseconds a
//   symbol. So several places of the data are decoded side by side. All but the first are guesses, since nobody knows
//   where a code begins there; but a decoder that begins anywhere soon meets the one from the front, and both go on as
//   one. What it finds from then on counts only if the decoder before it, which is right, comes to its first bit.
// - Data may be damaged: bits without a code, codes behind the end, and padding that is not zero are all refused.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.h"

namespace gradwire {

// A package is known by its weight alone: the lightest ones of a round are made of the lightest of the round before, so
// that it is enough to know, of each round, how many leaves are among the first ones.
void huffman_lengths(const int64_t* frequencies, int symbols, uint8_t* lengths) {
    constexpr int kRounds = 15;  // the longest code
    std::vector<int> order;
    for (int s = 0; s < symbols; s++)
        if (frequencies[s]) order.push_back(s);
    const auto lighter = [&](int a, int b) { return frequencies[a] < frequencies[b]; };
    std::stable_sort(order.begin(), order.end(), lighter);
    const size_t n = order.size();
    std::vector<int64_t> packages, merged;
    std::vector<uint8_t> is_leaf[kRounds];
    for (auto& round : is_leaf) {
        merged.clear();
        for (size_t leaf = 0, package = 0; leaf < n || package < packages.size();) {
            // Among equal weights leaves come first.
            const bool next = package == packages.size() || (leaf < n && frequencies[order[leaf]] <= packages[package]);
            merged.push_back(next ? frequencies[order[leaf++]] : packages[package++]);
            round.push_back(next);
        }
        packages.clear();
        for (size_t i = 0; i + 1 < merged.size(); i += 2) packages.push_back(merged[i] + merged[i + 1]);
    }
    std::memset(lengths, 0, size_t(symbols));
    size_t first = n ? 2 * (n - 1) : 0;
    for (int round = kRounds - 1; round >= 0; round--) {
        size_t leaves = 0;
        for (size_t i = 0; i < first; i++) leaves += is_leaf[round][i];
        for (size_t i = 0; i < leaves; i++) lengths[order[i]]++;
        first = 2 * (first - leaves);
    }
}

namespace {

// Where bits are written: those that do not fill a byte yet are the highest of `waiting`.
struct Bits {
    uint8_t* end;
    uint64_t waiting = 0;
    uint32_t filled = 0;
};

// Writes the codes of symbols, `Group` of them joined at a time: up to 57 bits fit behind those that are waiting. Eight
// bytes are written at once.
template <size_t Group>
void write_codes(const uint8_t* symbols, size_t groups, const uint32_t* code, Bits& bits) {
    Bits b = bits;
    for (; groups; groups--, symbols += Group) {
        uint64_t joined = 0;
        uint32_t length = 0;
        for (size_t k = 0; k < Group; k++) {
            const uint32_t entry = code[symbols[k]];
            joined = joined << (entry >> 16) | (entry & 0xffff);
            length += entry >> 16;
        }
        if (!length) continue;  // a shift by all 64 bits is none
        b.filled += length;
        b.waiting |= joined << (64 - b.filled);
        for (int k = 0; k < 8; k++) b.end[k] = uint8_t(b.waiting >> (56 - 8 * k));
        b.end += b.filled >> 3;
        b.waiting <<= b.filled & ~7u;
        b.filled &= 7;
    }
    bits = b;
}

}  // namespace

size_t huffman_encode(const uint8_t* symbols, size_t n, const uint8_t* lengths, const uint16_t* codes, int alphabet,
                      uint8_t* out) {
    uint32_t code[kMaxSymbols] = {};
    size_t longest = 1;
    for (int s = 0; s < alphabet; s++) {
        code[s] = uint32_t(lengths[s]) << 16 | (codes[s] & ((1u << lengths[s]) - 1));
        longest = std::max<size_t>(longest, lengths[s]);
    }
    Bits bits{out};
    const size_t group = longest <= 7 ? 8 : longest <= 14 ? 4 : 3, groups = n / group;
    (group == 8 ? write_codes<8> : group == 4 ? write_codes<4> : write_codes<3>)(symbols, groups, code, bits);
    write_codes<1>(symbols + groups * group, n - groups * group, code, bits);
    return size_t(bits.end - out) + (bits.filled > 0);
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

constexpr int kWindow = 13;  // bits: two usual codes, and a table that stays in the first-level cache
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

// Where a decoder stands: at a bit of the data, and behind the symbols that it has written.
struct Place {
    size_t at;
    uint8_t* out;
};

constexpr size_t kMost = kLooks * kWindow;  // bits of a step

// Decodes up to eight symbols, or none if the next code is longer than a window. Eight bytes have to be there.
[[gnu::always_inline]] inline bool step(const uint8_t* data, const Window* windows, Place& place) {
    uint64_t bits = bits_from(data, place.at);
    if (__builtin_expect(!windows[bits >> (64 - kWindow)].count, 0)) return false;
    for (size_t look = 0; look < kLooks; look++) {
        const Window w = windows[bits >> (64 - kWindow)];
        std::memcpy(place.out, w.symbols, 2);
        place.out += w.count;
        place.at += w.length;
        bits <<= w.length;
    }
    return true;
}

// Decoders side by side, each with a segment of the data of its own, after which they meet again.
constexpr size_t kSide = 4, kSegment = 8 << 14;  // bits: the symbols stay in the second-level cache
constexpr size_t kWarmUp = 256;  // symbols: after these a decoder has nearly always met the one from the front
constexpr int kMisses = 4;  // of all segments together: codes of one length never meet

class Decoder {
  public:
    Decoder(const uint8_t* data, size_t length, const uint8_t* lengths, const uint16_t* codes, int symbols)
        : data_(data), length_(length) {
        shortest_ = 16;
        for (int s = 0; s < symbols; s++)
            if (lengths[s]) {
                longest_ = std::max<int>(longest_, lengths[s]);
                shortest_ = std::min<int>(shortest_, lengths[s]);
            }
        if (longest_ && longest_ <= 15) table_ = codes_by_bits(lengths, codes, symbols, longest_);
    }

    bool decode(size_t n, uint8_t* out) {
        if (table_.empty()) return false;
        end_ = out + n;
        place_ = {0, out};
        if (n >= kWorthWindows) {
            windows_ = all_windows(table_, longest_);
            if (!side_by_side() || !one_by_one()) return false;
        }
        while (place_.out < end_) {
            const Code one = code_at(place_.at);
            place_.at += one.length;
            if (!one.length || place_.at > 8 * length_) return false;
            *place_.out++ = one.symbol;
        }
        const size_t at = place_.at;
        return (at + 7) / 8 == length_ && !(at & 7 && uint8_t(data_[length_ - 1] << (at & 7)));
    }

  private:
    Code code_at(size_t at) const {
        uint32_t bits = 0;  // zeros are read past the end
        for (size_t byte = at >> 3; byte < (at >> 3) + 3; byte++) bits = bits << 8 | (byte < length_ ? data_[byte] : 0);
        return table_[bits << (at & 7) >> (24 - longest_) & ((1u << longest_) - 1)];
    }

    Code code_inside(size_t at) const {  // where eight bytes are known to be there
        return table_[bits_from(data_, at) >> (64 - longest_)];
    }

    bool one_by_one() {
        Place place = place_;
        while (size_t(end_ - place.out) >= 2 * kLooks && (place.at >> 3) + 8 <= length_) {
            if (step(data_, windows_.data(), place)) continue;
            const Code one = code_inside(place.at);
            if (!one.length) return false;
            *place.out++ = one.symbol;
            place.at += one.length;
        }
        place_ = place;
        return true;
    }

    // Where a decoder that begins at this bit is after some symbols; bits without a code are passed over.
    size_t after(size_t at) const {
        for (size_t i = 0; i < kWarmUp; i++) at += std::max<size_t>(1, code_inside(at).length);
        return at;
    }

    // Decodes segments, kSide of them at a time, as long as there are so many. False if the data is damaged.
    bool side_by_side() {
        const size_t widest = kSegment + 16 * kWarmUp, room = widest / size_t(shortest_) + 64;
        std::vector<uint8_t> found;
        for (int misses = 0; misses < kMisses && (place_.at + kSide * kSegment + 16 * kWarmUp) / 8 + 16 <= length_;) {
            if (found.empty()) found.resize(kSide * room);
            size_t start[kSide + 1];
            Place side[kSide];
            bool good[kSide];
            start[0] = place_.at;
            start[kSide] = place_.at + kSide * kSegment;
            for (size_t k = 0; k < kSide; k++) {
                if (k) start[k] = after(place_.at + k * kSegment);
                side[k] = {start[k], found.data() + k * room};
                good[k] = true;
            }
            together(side, start + 1, good);
            for (size_t k = 0; k < kSide; k++) {
                if (place_.at != start[k]) {
                    misses++;
                    break;
                }
                const uint8_t* first = found.data() + k * room;
                const size_t count = size_t(side[k].out - first);
                if (!good[k] || count > size_t(end_ - place_.out)) return false;  // more codes than symbols
                std::memcpy(place_.out, first, count);
                place_ = {side[k].at, place_.out + count};
            }
        }
        return true;
    }

    // Each goes on up to the bit where the next one has begun, or past it if no code begins there.
    void together(Place* side, const size_t* stop, bool* good) const {
        const uint8_t* const data = data_;
        const Window* const windows = windows_.data();
        const auto one = [&](Place& place, bool& is_good) {
            const Code code = code_inside(place.at);
            is_good &= code.length > 0;
            place.at += std::max<size_t>(1, code.length);
            *place.out = code.symbol;
            place.out += code.length > 0;
        };
        Place p[kSide];
        std::copy(side, side + kSide, p);
        const auto far = [&](size_t k) { return p[k].at + kMost <= stop[k]; };
        while (far(0) && far(1) && far(2) && far(3))
            for (size_t k = 0; k < kSide; k++)
                if (__builtin_expect(!step(data, windows, p[k]), 0)) one(p[k], good[k]);
        for (size_t k = 0; k < kSide; k++) {
            while (far(k))
                if (!step(data, windows, p[k])) one(p[k], good[k]);
            while (p[k].at < stop[k]) one(p[k], good[k]);
        }
        std::copy(p, p + kSide, side);
    }

    const uint8_t* data_;
    size_t length_;
    int longest_ = 0, shortest_;
    std::vector<Code> table_;
    std::vector<Window> windows_;
    Place place_{};
    uint8_t* end_ = nullptr;
};

}  // namespace

bool huffman_decode(const uint8_t* data, size_t length, size_t n, const uint8_t* lengths, const uint16_t* codes,
                    int symbols, uint8_t* out) {
    return Decoder(data, length, lengths, codes, symbols).decode(n, out);
}

}  // namespace gradwire
