// Sparse codecs: the largest entries of a tensor in one pass, and the codes of their positions.
//
// What is chosen is exact and does not depend on the instruction set: each supplies only `scan`, which finds all
// entries from a magnitude on. Magnitudes are compared by their bit patterns, which order like them, with infinities
// and NaN above all others: so these are always among the found ones, and cost no test on the way.
#pragma once

#include <functional>
#include <memory>

#include "kernels.h"

namespace gradwire {

constexpr size_t kScanBlock = 4096;  // entries that a scan looks at; its found ones stay in the first-level cache
constexpr size_t kScanRoom = kScanBlock + 16;  // vector stores reach beyond the found ones

// What a scan found, and how many entries it wrote: less than all if it stopped before a NaN or an infinity.
struct Found {
    size_t count, done;
};

// The least magnitude of interest of entries of either sign, as a bit pattern from 1 on.
struct Lows {
    uint32_t positive, negative;
};

// u = g + decay * memory of at most kScanBlock entries goes to memory_out (if there is one); u and index (from 0) of
// those with a magnitude of interest go to `value` and `index`, in order.
using Scan = Found (*)(const Stream& s, float decay, Lows low, uint32_t* index, float* value);

Found portable_scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value);

// The entries that do not fill a vector any more, behind those that are done. Static: each instruction set has its own
// copy, compiled with its own flags, and the linker must not take one for the other.
static inline Found scan_rest(const Stream& s, float decay, Lows low, uint32_t* index, float* value, Found so_far) {
    if (so_far.done == s.count) return so_far;
    const Stream part = s.part(so_far.done, s.count - so_far.done);
    const Found rest = portable_scan(part, decay, low, index + so_far.count, value + so_far.count);
    for (size_t j = so_far.count; j < so_far.count + rest.count; j++) index[j] += uint32_t(so_far.done);
    return {so_far.count + rest.count, so_far.done + rest.done};
}
#ifdef GRADWIRE_X86
Found avx2_scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value);
Found avx512_scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value);
#endif
#ifdef GRADWIRE_NEON
Found neon_scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value);
#endif

// An array that grows, and does not touch memory before it is used.
template <class T>
class Buffer {
  public:
    T* data() const { return data_.get(); }
    size_t room() const { return room_; }
    void reserve(size_t used, size_t room);

  private:
    std::unique_ptr<T[]> data_;
    size_t room_ = 0;
};

// The entries seen so far that may be among the `wanted` largest, in the order of their positions.
struct Candidates {
    Buffer<int64_t> position;
    Buffer<float> value;
    size_t count = 0, wanted = 0;
    uint32_t low = 1;         // smaller ones need not be kept
    uint32_t least_kept = 1;  // none of those that are is below this

    void reserve_block();
    double mean() const;  // of the magnitudes; 0 of nothing
    void prune();  // to the `wanted` largest, lowest positions first among equals; later equals are then too late
};

constexpr size_t kAll = ~size_t(0);

Candidates*
scratch();  // two of this thread's, whose memory is kept: fresh pages cost more than what is written to them

// The `wanted` largest magnitudes (kAll: all) from `low` on, of all entries (sides[0]), or of the positive (sides[0])
// and the negative ones (sides[1]). Returns how many entries were written to memory_out: all of them, or those
// before a NaN or an infinity; on several threads others may have been written behind it, unless memory is updated in
// place, which one thread does.
size_t select(const Stream& s, float decay, size_t wanted, uint32_t low, bool two_sided, Candidates* sides,
              int threads);

// Writes n numbers from the first one on: of those that are made when they are looked at.
using Make = std::function<void(size_t first, size_t n, float* out)>;

// The `wanted` largest magnitudes of `count` finite numbers, zeros left out, of which `block` are made at a time.
void select_made(size_t count, size_t wanted, size_t block, const Make& make, Candidates& found);

double sum_magnitudes(const float* values, size_t n);  // eight partial sums, always the same ones

// out[position] = value and zeros elsewhere (store) or what was there (over), or out[position] += value; `stride` 0: one
// value for all.
void scatter_store(float* out, size_t n, const int64_t* positions, size_t count, const float* values, size_t stride,
                   int threads);
void scatter_over(float* out, const int64_t* positions, size_t count, const float* values, size_t stride, int threads);
void scatter_add(float* out, const int64_t* positions, size_t count, const float* values, size_t stride, int threads);

// ── gaps: docs/wire-format.md, codec 5 ──
constexpr int kMaxGapBits = 48;

uint64_t golomb_quotients(const int64_t* gaps, size_t n, int b);
size_t golomb_encode(const int64_t* gaps, size_t n, int b, uint8_t* out);  // 8 bytes more room than it takes
// Both read the next n positions from bit `at` on, behind the position `before` (-1 for the first), and return the bit
// behind them; -1 if the data is damaged or a position is not below the limit.
int64_t golomb_positions(const uint8_t* data, size_t length, uint64_t at, size_t n, int b, int64_t limit,
                         int64_t before, int64_t* positions);
void gap_counts(const int64_t* gaps, size_t n, int m, int64_t counts[256]);
// The number of bytes of low bits; `low` has room for 6 bytes a gap and 8 more.
size_t gap_classes(const int64_t* gaps, size_t n, int m, uint8_t* classes, uint8_t* low);
int64_t class_positions(const uint8_t* classes, size_t n, int m, const uint8_t* data, size_t length, uint64_t at,
                        int64_t limit, int64_t before, int64_t* positions);

}  // namespace gradwire
