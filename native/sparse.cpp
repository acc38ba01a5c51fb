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
constexpr size_t kKept = 1 << 22;  // candidates for which memory is kept from one tensor to the next

inline uint32_t magnitude_bits(float x) { return as_bits(x) & 0x7fffffffu; }

Scan scan_in_use() {
#ifdef GRADWIRE_X86
    const std::string_view name = kernels().name;
    if (name == avx512_kernels.name) return scan_avx512;
    if (name == avx2_kernels.name) return scan_avx2;
#endif
    return scan_portable;
}

// The k-th largest of n magnitudes, as a bit pattern, and how many are larger, and as large; 1 <= k <= n, and none is below `low`.
// One pass counts them by their distance from `low`, and only those in the bucket of the k-th are put in order.
// Candidates crowd within an octave of their limit, so that buckets are narrow there; what is 16 times as large and
// more shares the last one. Without a limit there are eight buckets to an octave.
struct Kth {
    uint32_t bits;
    size_t above, equal;
};

Kth kth_largest(const float* values, size_t n, size_t k, uint32_t low) {
    constexpr uint32_t kBuckets = 2048;
    const int shift = low < 1 << 20 ? 20 : 14;
    const auto bucket_of = [=](uint32_t bits) { return std::min((bits - low) >> shift, kBuckets - 1); };
    size_t counts[kBuckets] = {}, above = 0;
    for (size_t i = 0; i < n; i++) counts[bucket_of(magnitude_bits(values[i]))]++;
    uint32_t bucket = kBuckets - 1;
    while (above + counts[bucket] < k) above += counts[bucket--];
    std::vector<uint32_t> inside(counts[bucket] + 1);  // one more: each is written before it is known to belong
    size_t m = 0;
    for (size_t i = 0; i < n; i++) {
        inside[m] = magnitude_bits(values[i]);
        m += bucket_of(inside[m]) == bucket;
    }
    inside.pop_back();
    const auto kth = inside.begin() + (k - above - 1);
    std::nth_element(inside.begin(), kth, inside.end(), std::greater<uint32_t>());
    for (auto i = inside.begin(); i < kth; ++i) above += *i > *kth;
    return {*kth, above, size_t(std::count(inside.begin(), inside.end(), *kth))};
}

// A magnitude that, going by a sample, somewhat more than the wanted entries reach. Should it be too high after all,
// the tensor is looked through again.
uint32_t guess(std::vector<float>& sample, size_t wanted, size_t n, size_t sample_size) {
    const double expected = double(sample_size) * double(wanted) / double(n);
    const double rank = expected + 5 * std::sqrt(expected) + 16;  // neighbours are alike, so that samples vary more
    if (rank >= double(sample.size())) return 1;
    return std::min(kInfinity, std::max(1u, kth_largest(sample.data(), sample.size(), size_t(rank), 0).bits));
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

void append_of_sign(Candidates& c, uint32_t sign, size_t start, const uint32_t* index, const float* value, size_t n) {
    c.reserve_block();
    int64_t* position = c.position.data();
    float* values = c.value.data();
    size_t count = c.count;
    for (size_t i = 0; i < n; i++) {
        position[count] = int64_t(start + index[i]);
        values[count] = value[i];
        count += as_bits(value[i]) >> 31 == sign;
    }
    c.count = count;
}

// One pass over all entries.
size_t gather(const Stream& s, float decay, bool two_sided, Candidates* sides) {
    const Scan scan = scan_in_use();
    alignas(64) uint32_t index[kScanRoom];
    alignas(64) float value[kScanRoom];
    for (size_t start = 0; start < s.count; start += kScanBlock) {
        const size_t n = std::min(kScanBlock, s.count - start);
        const Lows low{sides[0].low, sides[two_sided].low};
        const Found found = scan(s.part(start, n), decay, low, index, value);
        if (found.done < n) return start + found.done;
        if (!found.count) continue;
        if (two_sided)
            for (int i = 0; i < 2; i++)
                append_of_sign(sides[i], uint32_t(i), start, index, value, found.count);
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
    const Kth kth = kth_largest(value.data(), count, wanted, least_kept);
    const uint32_t least = kth.bits;
    size_t kept = 0, places = wanted - kth.above;  // for equals of the k-th
    int64_t* p = position.data();
    float* v = value.data();
    const auto keep_if = [&](auto wanted_too) {
        for (size_t i = 0; i < count; i++) {
            const uint32_t b = magnitude_bits(v[i]);
            p[kept] = p[i];
            v[kept] = v[i];
            kept += wanted_too(b);
        }
    };
    if (kth.equal == places)
        keep_if([=](uint32_t b) { return b >= least; });
    else
        keep_if([=](uint32_t b) mutable {
            const bool tie = (b == least) & (places > 0);
            places -= tie;
            return (b > least) | tie;
        });
    count = kept;
    least_kept = least;
    low = least + 1;
}

Candidates* scratch() {
    static thread_local Candidates sides[2];
    for (Candidates& c : sides)
        if (c.value.room() > kKept) c = Candidates();
    return sides;
}

size_t select(const Stream& s, float decay, size_t wanted, uint32_t low, bool two_sided, Candidates* sides) {
    const int n = two_sided ? 2 : 1;
    for (int i = 0; i < n; i++) {
        sides[i].count = 0;
        sides[i].wanted = wanted;
        sides[i].low = low;
    }
    if (wanted != kAll && s.count >= kSmall && wanted <= s.count / 4) guess_all(s, decay, two_sided, sides);
    const uint32_t guessed[2] = {sides[0].low, sides[1].low};
    for (int i = 0; i < n; i++) sides[i].least_kept = sides[i].low;
    size_t done = gather(s, decay, two_sided, sides);
    if (done < s.count) return done;
    bool again = false;
    for (int i = 0; i < n; i++) again |= guessed[i] > low && sides[i].count < wanted;
    if (again) {
        for (int i = 0; i < n; i++) {
            sides[i].count = 0;
            sides[i].low = sides[i].least_kept = low;
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

Found scan_portable(const Stream& s, float decay, Lows low, uint32_t* index, float* value) {
    constexpr size_t kTogether = 64;  // most of them hold nothing of interest, and their loops vectorise
    size_t n = 0;
    for (size_t i = 0; i < s.count; i += kTogether) {
        const size_t width = std::min(kTogether, s.count - i);
        float u[kTogether];
        int32_t most = 0;
        for (size_t j = 0; j < width; j++) {
            u[j] = s.memory ? s.gradient[i + j] + s.memory[i + j] * decay : s.gradient[i + j];
            most = std::max(most, int32_t(magnitude_bits(u[j])));
        }
        if (uint32_t(most) >= kInfinity) return {n, i};
        if (s.memory_out) std::memcpy(s.memory_out + i, u, width * sizeof(float));
        if (uint32_t(most) < std::min(low.positive, low.negative)) continue;
        for (size_t j = 0; j < width; j++) {
            index[n] = uint32_t(i + j);
            value[n] = u[j];
            n += magnitude_bits(u[j]) >= (as_bits(u[j]) >> 31 ? low.negative : low.positive);
        }
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
