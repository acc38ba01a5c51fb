// Selection of the largest entries, for any machine: only the scan has faster forms.
#include "sparse.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#include "quantize.h"

namespace gradwire {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr size_t kSampleRuns = 1024, kRun = 64, kSmall = 1 << 14, kSpare = 1 << 16;

inline uint32_t magnitude_bits(float x) { return as_bits(x) & 0x7fffffffu; }

Scan scan_in_use() {
#ifdef GRADWIRE_X86
    const std::string_view name = kernels().name;
    if (name == avx512_kernels.name) return scan_avx512;
    if (name == avx2_kernels.name) return scan_avx2;
#endif
    return scan_portable;
}

// The k-th largest of n magnitudes, as a bit pattern; 1 <= k <= n. One pass counts them by their leading bits, and only
// those in the bucket of the k-th are put in order.
uint32_t kth_largest(const float* values, size_t n, size_t k) {
    constexpr int kBucketBits = 11;
    uint32_t least = ~0u, most = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t b = magnitude_bits(values[i]);
        least = std::min(least, b);
        most = std::max(most, b);
    }
    int shift = 0;
    while ((most - least) >> shift >> kBucketBits) shift++;
    size_t counts[1 << kBucketBits] = {};
    for (size_t i = 0; i < n; i++) counts[(magnitude_bits(values[i]) - least) >> shift]++;
    uint32_t bucket = (1 << kBucketBits) - 1;
    while (k > counts[bucket]) k -= counts[bucket--];
    if (!shift) return least + bucket;
    std::vector<uint32_t> inside(counts[bucket] + 1);  // one more: each is written before it is known to belong
    size_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t b = magnitude_bits(values[i]);
        inside[m] = b;
        m += (b - least) >> shift == bucket;
    }
    inside.pop_back();
    std::nth_element(inside.begin(), inside.begin() + (k - 1), inside.end(), std::greater<uint32_t>());
    return inside[k - 1];
}

// A magnitude that, going by a sample, somewhat more than the wanted entries reach. Should it be too high after all,
// the tensor is looked through again.
uint32_t guess(std::vector<float>& sample, size_t wanted, size_t n, size_t sample_size) {
    const double expected = double(sample_size) * double(wanted) / double(n);
    const double rank = expected + 6 * std::sqrt(expected) + 16;  // neighbours are alike, so that samples vary more
    if (rank >= double(sample.size())) return 1;
    return std::min(kInfinity, std::max<uint32_t>(1, kth_largest(sample.data(), sample.size(), size_t(rank))));
}

void guess_all(const Stream& s, float decay, bool two_sided, Candidates* sides) {
    const size_t runs = std::min(kSampleRuns, s.count / (4 * kRun)), size = runs * kRun;
    std::vector<float> all(size), part[2];
    sample(s.gradient, s.memory, decay, s.count, runs, kRun, all.data());
    if (two_sided)
        for (float u : all) part[as_bits(u) >> 31].push_back(u);
    for (int i = 0; i <= int(two_sided); i++)
        sides[i].low = std::max(sides[i].low, guess(two_sided ? part[i] : all, sides[i].wanted, s.count, size));
}

void append(Candidates& c, size_t start, const uint32_t* index, const float* value, size_t n) {
    c.reserve_block();
    int64_t* position = c.position.data() + c.count;
    for (size_t i = 0; i < n; i++) position[i] = int64_t(start + index[i]);
    std::memcpy(c.value.data() + c.count, value, n * sizeof(float));
    c.count += n;
}

void append_by_sign(Candidates* sides, size_t start, const uint32_t* index, const float* value, size_t n) {
    int64_t* position[2];
    float* values[2];
    size_t count[2];
    for (int i = 0; i < 2; i++) {
        sides[i].reserve_block();
        position[i] = sides[i].position.data();
        values[i] = sides[i].value.data();
        count[i] = sides[i].count;
    }
    const uint32_t low[2] = {sides[0].low, sides[1].low};
    for (size_t i = 0; i < n; i++) {
        const int side = as_bits(value[i]) >> 31;
        position[side][count[side]] = int64_t(start + index[i]);
        values[side][count[side]] = value[i];
        count[side] += magnitude_bits(value[i]) >= low[side];
    }
    for (int i = 0; i < 2; i++) sides[i].count = count[i];
}

// One pass over all entries.
size_t gather(const Stream& s, float decay, bool two_sided, Candidates* sides) {
    const Scan scan = scan_in_use();
    alignas(64) uint32_t index[kScanRoom];
    alignas(64) float value[kScanRoom];
    for (size_t start = 0; start < s.count; start += kScanBlock) {
        const size_t n = std::min(kScanBlock, s.count - start);
        const uint32_t low = two_sided ? std::min(sides[0].low, sides[1].low) : sides[0].low;
        const Found found = scan(s.part(start, n), decay, low, index, value);
        if (found.done < n) return start + found.done;
        if (!found.count) continue;
        if (two_sided)
            append_by_sign(sides, start, index, value, found.count);
        else
            append(sides[0], start, index, value, found.count);
        for (int i = 0; i <= int(two_sided); i++)
            if (sides[i].wanted != kAll && sides[i].count / 4 > std::max(sides[i].wanted, kSpare)) sides[i].prune();
    }
    return s.count;
}

}  // namespace

template <class T>
void Buffer<T>::reserve(size_t used, size_t room) {
    if (room <= room_) return;
    room = std::max(room, 2 * room_);
    std::unique_ptr<T[]> larger(new T[room]);
    if (used) std::memcpy(larger.get(), data_.get(), used * sizeof(T));
    data_ = std::move(larger);
    room_ = room;
}

void Candidates::reserve_block() {
    position.reserve(count, count + kScanRoom);
    value.reserve(count, count + kScanRoom);
}

void Candidates::prune() {
    if (count <= wanted) return;
    const uint32_t least = kth_largest(value.data(), count, wanted);
    size_t above = 0, kept = 0;
    for (size_t i = 0; i < count; i++) above += magnitude_bits(value.data()[i]) > least;
    size_t equals = wanted - above;  // that still have a place
    int64_t* p = position.data();
    float* v = value.data();
    for (size_t i = 0; i < count; i++) {
        const uint32_t b = magnitude_bits(v[i]);
        const bool tie = (b == least) & (equals > 0);
        p[kept] = p[i];
        v[kept] = v[i];
        kept += (b > least) | tie;
        equals -= tie;
    }
    count = kept;
    low = least + 1;
}

size_t select(const Stream& s, float decay, size_t wanted, uint32_t low, bool two_sided, Candidates* sides) {
    const int n = two_sided ? 2 : 1;
    for (int i = 0; i < n; i++) {
        sides[i].wanted = wanted;
        sides[i].low = low;
    }
    if (wanted != kAll && s.count >= kSmall && wanted <= s.count / 4) guess_all(s, decay, two_sided, sides);
    const uint32_t guessed[2] = {sides[0].low, sides[1].low};
    size_t done = gather(s, decay, two_sided, sides);
    if (done < s.count) return done;
    bool again = false;
    for (int i = 0; i < n; i++) again |= guessed[i] > low && sides[i].count < wanted;
    if (again) {
        for (int i = 0; i < n; i++) {
            sides[i].count = 0;
            sides[i].low = low;
        }
        const Stream written{s.memory_out, nullptr, nullptr, s.count, s.first};  // the memory may have been overwritten
        Stream unwritten = s;
        unwritten.memory_out = nullptr;
        gather(s.memory_out ? written : unwritten, decay, two_sided, sides);
    }
    for (int i = 0; i < n; i++) {
        sides[i].reserve_block();
        if (wanted != kAll) sides[i].prune();
    }
    return s.count;
}

Found scan_portable(const Stream& s, float decay, uint32_t low, uint32_t* index, float* value) {
    float u[kScanBlock];
    uint32_t most = 0;
    for (size_t i = 0; i < s.count; i++) {
        u[i] = s.memory ? s.gradient[i] + s.memory[i] * decay : s.gradient[i];
        most = std::max(most, magnitude_bits(u[i]));
    }
    if (most >= kInfinity) return {0, 0};
    if (s.memory_out) std::memcpy(s.memory_out, u, s.count * sizeof(float));
    if (most < low) return {0, s.count};
    size_t n = 0;
    for (size_t i = 0; i < s.count; i++) {
        index[n] = uint32_t(i);
        value[n] = u[i];
        n += magnitude_bits(u[i]) >= low;
    }
    return {n, s.count};
}

double sum_magnitudes(const float* values, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += std::fabs(double(values[i]));
    return sum;
}

void scatter_store(float* out, size_t n, const int64_t* positions, size_t count, const float* values, size_t stride) {
    constexpr size_t kBlock = 4096;  // zeroed and written while it is in the first-level cache
    size_t i = 0;
    for (size_t start = 0; start < n; start += kBlock) {
        const size_t end = std::min(n, start + kBlock);
        std::memset(out + start, 0, (end - start) * sizeof(float));
        for (; i < count && size_t(positions[i]) < end; i++) out[positions[i]] = values[i * stride];
    }
}

void scatter_add(float* out, const int64_t* positions, size_t count, const float* values, size_t stride) {
    constexpr size_t kAhead = 32;
    for (size_t i = 0; i < count; i++) {
        if (i + kAhead < count) __builtin_prefetch(out + positions[i + kAhead], 1);
        out[positions[i]] += values[i * stride];
    }
}

}  // namespace gradwire
