// Codes of the gaps between positions: Golomb–Rice, and classes with low bits (docs/wire-format.md, codec 5).
//
// Bits are written through a 64-bit buffer that holds less than a byte between two numbers, so that up to 56 bits go in
// at once; longer codes go in parts. Reading takes 64 bits from any byte, and at least 57 of them are of use.
#include <algorithm>
#include <cstring>

#include "sparse.h"

namespace gradwire {
namespace {

class BitWriter {
  public:
    explicit BitWriter(uint8_t* out) : p_(out) {}

    void put(uint64_t bits, int n) {  // n <= 56; writes up to 8 bytes
        buffer_ |= bits << filled_;
        filled_ += n;
        for (int i = 0; i < 8; i++) p_[i] = uint8_t(buffer_ >> 8 * i);
        const int bytes = filled_ >> 3;
        p_ += bytes;
        buffer_ >>= 8 * bytes;
        filled_ &= 7;
    }
    uint8_t* end() const { return p_ + (filled_ > 0); }

  private:
    uint8_t* p_;
    uint64_t buffer_ = 0;
    int filled_ = 0;
};

class BitReader {
  public:
    BitReader(const uint8_t* data, size_t length) : data_(data), length_(length), bits_(8 * uint64_t(length)) {}

    uint64_t at = 0;  // may pass the end, where there are zeros; `good` says

    uint64_t peek() const {  // 57 bits or more
        const uint64_t byte = at >> 3;
        if (byte + 8 <= length_) return peek_inside();
        uint64_t x = 0;
        for (uint64_t i = byte; i < length_; i++) x |= uint64_t(data_[i]) << 8 * (i - byte);
        return x >> (at & 7);
    }
    uint64_t peek_inside() const {  // where eight bytes are known to be there
        const uint64_t byte = at >> 3;
        uint64_t x = 0;
        for (int i = 0; i < 8; i++) x |= uint64_t(data_[byte + i]) << 8 * i;
        return x >> (at & 7);
    }
    bool good() const { return at <= bits_; }
    bool done() const { return at >= bits_; }
    size_t bytes() const { return size_t((at + 7) >> 3); }
    bool padded() const { return !(at & 7) || !(data_[at >> 3] >> (at & 7)); }

  private:
    const uint8_t* data_;
    uint64_t length_, bits_;
};

inline uint64_t mask(int n) { return (uint64_t(1) << n) - 1; }

// How many low bits the class of a gap leaves open; the class is then open * 2^m + (gap >> open).
inline int open_bits(uint64_t gap, int m) { return std::max(0, 63 - __builtin_clzll(gap | 1) - m); }

}  // namespace

uint64_t golomb_quotients(const int64_t* gaps, size_t n, int b) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += uint64_t(gaps[i]) >> b;
    return sum;
}

size_t golomb_encode(const int64_t* gaps, size_t n, int b, uint8_t* out) {
    BitWriter writer(out);
    for (size_t i = 0; i < n; i++) {
        const uint64_t gap = uint64_t(gaps[i]), low = gap & mask(b);
        uint64_t zeros = gap >> b;
        if (__builtin_expect(zeros + 1 + b > 56, 0)) {
            for (; zeros > 0; zeros -= std::min<uint64_t>(zeros, 48)) writer.put(0, int(std::min<uint64_t>(zeros, 48)));
        }
        writer.put((low << 1 | 1) << zeros, int(zeros) + 1 + b);
    }
    return writer.end() - out;
}

int64_t golomb_positions(const uint8_t* data, size_t length, uint64_t at, size_t n, int b, int64_t limit,
                         int64_t before, int64_t* positions) {
    BitReader reader(data, length);
    reader.at = at;
    const uint64_t end = uint64_t(limit), most = end >> b;
    uint64_t position = uint64_t(before);  // -1 before the first
    for (size_t i = 0; i < n; i++) {
        uint64_t zeros = 0, x = reader.peek();
        while (__builtin_expect(!(x & mask(57)), 0)) {
            zeros += 57;
            reader.at += 57;
            if (reader.done() || zeros > most) return -1;
            x = reader.peek();
        }
        const int more = __builtin_ctzll(x);
        zeros += more;
        reader.at += more + 1;
        const uint64_t low = (more + 1 + b <= 57 ? x >> (more + 1) : reader.peek()) & mask(b);
        reader.at += b;
        if (!reader.good() || zeros > most) return -1;
        position += 1 + (zeros << b) + low;
        if (position >= end) return -1;
        positions[i] = int64_t(position);
    }
    return int64_t(reader.at);
}

void gap_counts(const int64_t* gaps, size_t n, int m, int64_t counts[256]) {
    uint32_t part[4][256] = {};  // neighbours often have the same class: counting them in one place would wait for it
    std::memset(counts, 0, 256 * sizeof(int64_t));
    for (size_t start = 0; start < n; start += size_t(1) << 30) {
        const size_t end = std::min(n, start + (size_t(1) << 30));
        for (size_t i = start; i < end; i++) {
            const int open = open_bits(uint64_t(gaps[i]), m);
            part[i & 3][((open << m) + int(uint64_t(gaps[i]) >> open)) & 255]++;
        }
        for (auto& p : part)
            for (int c = 0; c < 256; c++) {
                counts[c] += p[c];
                p[c] = 0;
            }
    }
}

size_t gap_classes(const int64_t* gaps, size_t n, int m, uint8_t* classes, uint8_t* low) {
    BitWriter writer(low);
    for (size_t i = 0; i < n; i++) {
        const uint64_t gap = uint64_t(gaps[i]);
        const int open = open_bits(gap, m);
        classes[i] = uint8_t((uint64_t(open) << m) + (gap >> open));
        writer.put(gap & mask(open), open);
    }
    return writer.end() - low;
}

int64_t class_positions(const uint8_t* classes, size_t n, int m, const uint8_t* data, size_t length, uint64_t at,
                        int64_t limit, int64_t before, int64_t* positions) {
    struct Class {
        uint64_t least, mask;  // the smallest gap, and the low bits that are left open
        uint32_t open;
    } of[256] = {};
    for (int c = 0; c < 256 && c >> m <= kMaxGapBits; c++) {
        const int open = std::max(0, (c >> m) - 1);
        of[c] = {(open ? (c & mask(m)) | uint64_t(1) << m : uint64_t(c)) << open, mask(open), uint32_t(open)};
    }
    BitReader reader(data, length);
    reader.at = at;
    int64_t position = before;
    size_t i = 0;
    // So few gaps cannot make a position overflow: whether the last one is below the limit says it of all of them.
    constexpr size_t kBlock = 32, kBytes = kBlock * kMaxGapBits / 8 + 8;
    for (; n - i >= kBlock && (reader.at >> 3) + kBytes <= length; i += kBlock) {
        for (size_t k = i; k < i + kBlock; k++) {
            const Class& found = of[classes[k]];
            position += 1 + int64_t(found.least | (reader.peek_inside() & found.mask));
            reader.at += found.open;
            positions[k] = position;
        }
        if (position >= limit) return -1;
    }
    for (; i < n; i++) {
        const Class& found = of[classes[i]];
        const uint64_t gap = found.least | (reader.peek() & found.mask);
        reader.at += found.open;
        if (!reader.good() || gap >= uint64_t(limit)) return -1;
        position += 1 + int64_t(gap);
        if (position >= limit) return -1;
        positions[i] = position;
    }
    return int64_t(reader.at);
}

}  // namespace gradwire
