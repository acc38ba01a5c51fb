// Selection of the largest entries, for any machine: only the scan has faster forms.
#include "sparse.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "quantize.h"
#include "threads.h"

namespace gradwire {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr size_t kSampleRuns = 1024, kRun = 64, kSmall = 1 << 14, kSpare = 1 << 16;
constexpr size_t kKept = 1 << 22;  // candidates for which memory is kept from one tensor to the next

inline uint32_t magnitude_bits(float x) { return as_bits(x) & 0x7fffffffu; }

// Counts magnitudes (none below `low`) by their distance from `low`, which tells the k-th largest up to its bucket.
// Candidates crowd within an octave of their limit, so that buckets are narrow there; what is 16 times as large and
// more shares the last one. Without a limit there are eight buckets to an octave.
struct Buckets {
    static constexpr uint32_t kCount = 2048;
    uint32_t low, bucket = kCount - 1;  // of the k-th
    int shift;
    size_t inside, above = 0;  // how many are in that bucket, and in those above it

    Buckets(const float* values, size_t n, size_t k, uint32_t low_) : low(low_), shift(low_ < 1 << 20 ? 20 : 14) {
        size_t counts[kCount] = {};
        for (size_t i = 0; i < n; i++) counts[of(magnitude_bits(values[i]))]++;
        while (above + counts[bucket] < k) above += counts[bucket--];
        inside = counts[bucket];
    }
    uint32_t of(uint32_t bits) const { return std::min((bits - low) >> shift, kCount - 1); }
};

// The k-th largest of n magnitudes, as a bit pattern; 1 <= k <= n.
uint32_t kth_largest(const float* values, size_t n, size_t k) {
    const Buckets buckets(values, n, k, 0);
    std::vector<uint32_t> inside(buckets.inside + 1);  // one more: each is written before it is known to belong
    size_t m = 0;
    for (size_t i = 0; i < n; i++) {
        inside[m] = magnitude_bits(values[i]);
        m += buckets.of(inside[m]) == buckets.bucket;
    }
    inside.pop_back();
    const auto kth = inside.begin() + (k - buckets.above - 1);
    std::nth_element(inside.begin(), kth, inside.end(), std::greater<uint32_t>());
    return *kth;
}

// A magnitude that, going by a sample, somewhat more than the wanted entries reach. Should it be too high after all,
// the tensor is looked through again.
uint32_t guess(const std::vector<float>& sample, size_t wanted, size_t n, size_t sample_size) {
    const double expected = double(sample_size) * double(wanted) / double(n);
    const double rank = expected + 5 * std::sqrt(expected) + 16;  // neighbours are alike, so that samples vary more
    if (rank >= double(sample.size())) return 1;
    return std::min(kInfinity, std::max(1u, kth_largest(sample.data(), sample.size(), size_t(rank))));
}

void guess_all(const Stream& s, float decay, bool two_sided, Candidates* sides) {
    const size_t runs = std::min(kSampleRuns, s.count / (4 * kRun)), size = runs * kRun;
    static thread_local std::vector<float> all, part[2];  // kept, as fresh pages cost time
    all.resize(size);
    for (auto& side : part) side.clear();
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
    const Scan scan = GRADWIRE_IN_USE(scan);
    alignas(64) uint32_t index[kScanRoom];
    alignas(64) float value[kScanRoom];
    for (size_t start = 0; start < s.count; start += kScanBlock) {
        const size_t n = std::min(kScanBlock, s.count - start);
        const Lows low{sides[0].low, sides[two_sided].low};
        const Found found = scan(s.part(start, n), decay, low, index, value);
        if (found.done < n) return start + found.done;
        if (!found.count) continue;
        if (two_sided)
            for (int i = 0; i < 2; i++) append_of_sign(sides[i], uint32_t(i), start, index, value, found.count);
        else
            append(sides[0], start, index, value, found.count);
        for (int i = 0; i <= int(two_sided); i++)
            if (sides[i].wanted != kAll && sides[i].count / 4 > std::max(sides[i].wanted, kSpare)) sides[i].prune();
    }
    return s.count;
}

// The candidates of one part behind those of the parts before it.
void append_part(Candidates& c, size_t start, const Candidates& part) {
    c.position.reserve(c.count, c.count + part.count);
    c.value.reserve(c.count, c.count + part.count);
    for (size_t i = 0; i < part.count; i++) c.position.data()[c.count + i] = part.position.data()[i] + int64_t(start);
    if (part.count) std::memcpy(c.value.data() + c.count, part.value.data(), part.count * sizeof(float));
    c.count += part.count;
    c.least_kept = std::min(c.least_kept, part.least_kept);
}

// The same pass by several threads. What is among the largest of all entries is among the largest of its part, with
// the lowest positions first in both; so nothing is missing from the lists of the parts, however they were pruned.
size_t gather_on(int threads, const Stream& s, float decay, bool two_sided, Candidates* sides) {
    const size_t useful = s.in_place() ? 1 : threads_for(s.count * s.entry_bytes(), threads);
    if (useful == 1) return gather(s, decay, two_sided, sides);
    const size_t blocks = (s.count + kScanBlock - 1) / kScanBlock, share = (blocks + 2 * useful - 1) / (2 * useful);
    const size_t size = share * kScanBlock, parts = (s.count + size - 1) / size;
    const auto length = [&](size_t i) { return std::min(size, s.count - i * size); };
    static thread_local std::vector<std::array<Candidates, 2>> kept;
    if (kept.size() < parts) kept.resize(parts);
    auto* const lists = kept.data();  // those of this thread, for all others
    std::vector<size_t> done(parts);
    std::atomic<size_t> next{0};
    on_threads(useful, [&] {
        for (size_t i; (i = next++) < parts;) {
            for (int k = 0; k < 2; k++) {
                Candidates& list = lists[i][k];
                list.count = 0;
                list.wanted = sides[k].wanted;
                list.low = sides[k].low;
                list.least_kept = sides[k].least_kept;
            }
            done[i] = gather(s.part(i * size, length(i)), decay, two_sided, lists[i].data());
        }
    });
    size_t all = 0;
    for (size_t i = 0; i < parts && all == i * size; i++) {
        all += done[i];
        for (int k = 0; k <= int(two_sided); k++) append_part(sides[k], i * size, lists[i][k]);
    }
    for (auto& list : kept)
        for (Candidates& c : list)
            if (c.value.room() > kKept / parts) c = Candidates();
    return all;
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

double Candidates::mean() const { return count ? sum_magnitudes(value.data(), count) / double(count) : 0.0; }

void Candidates::prune() {
    if (count <= wanted) return;
    const Buckets buckets(value.data(), count, wanted, least_kept);
    // Those above the bucket of the k-th stay, those below go, those inside are looked at again: few, but for ties.
    struct Inside {
        uint32_t bits;
        size_t at;  // where it stands among those that stay for now
    };
    std::vector<Inside> inside(buckets.inside + 1);  // one more: each is written before it is known to belong
    int64_t* p = position.data();
    float* v = value.data();
    size_t kept = 0, m = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = magnitude_bits(v[i]), bucket = buckets.of(bits);
        p[kept] = p[i];
        v[kept] = v[i];
        inside[m] = {bits, kept};
        m += bucket == buckets.bucket;
        kept += bucket >= buckets.bucket;
    }
    inside.pop_back();
    const size_t places = wanted - buckets.above;
    const auto first = [](const Inside& a, const Inside& b) {
        return a.bits != b.bits ? a.bits > b.bits : a.at < b.at;
    };
    std::nth_element(inside.begin(), inside.begin() + (places - 1), inside.end(), first);
    least_kept = inside[places - 1].bits;
    low = least_kept + 1;  // later equals are too late
    std::vector<size_t> gone;
    for (size_t i = places; i < inside.size(); i++) gone.push_back(inside[i].at);
    std::sort(gone.begin(), gone.end());
    gone.push_back(kept);
    // Close the holes that they leave.
    count = gone[0];
    for (size_t i = 0; i + 1 < gone.size(); i++) {
        const size_t start = gone[i] + 1, n = gone[i + 1] - start;
        std::memmove(p + count, p + start, n * sizeof(int64_t));
        std::memmove(v + count, v + start, n * sizeof(float));
        count += n;
    }
}

Candidates* scratch() {
    static thread_local Candidates sides[2];
    for (Candidates& c : sides)
        if (c.value.room() > kKept) c = Candidates();
    return sides;
}

size_t select(const Stream& s, float decay, size_t wanted, uint32_t low, bool two_sided, Candidates* sides,
              int threads) {
    const int n = two_sided ? 2 : 1;
    for (int i = 0; i < n; i++) {
        sides[i].count = 0;
        sides[i].wanted = wanted;
        sides[i].low = low;
    }
    if (wanted != kAll && s.count >= kSmall && wanted <= s.count / 4) guess_all(s, decay, two_sided, sides);
    const uint32_t guessed[2] = {sides[0].low, sides[1].low};
    for (int i = 0; i < n; i++) sides[i].least_kept = sides[i].low;
    size_t done = gather_on(threads, s, decay, two_sided, sides);
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
        gather_on(threads, s.memory_out ? written : unwritten, decay, two_sided, sides);
    }
    for (int i = 0; i < n; i++) {
        sides[i].reserve_block();
        if (wanted != kAll) sides[i].prune();
    }
    return s.count;
}

void select_made(size_t count, size_t wanted, size_t block, const Make& make, Candidates& found) {
    found.wanted = wanted;
    found.low = 1;
    if (count >= kSmall && wanted <= count / 4) {
        const size_t runs = std::min(kSampleRuns, count / (4 * kRun));
        std::vector<float> seen(runs * kRun);
        for (size_t r = 0; r < runs; r++) make(r * (count / runs), kRun, seen.data() + r * kRun);
        found.low = guess(seen, wanted, count, seen.size());
    }
    const Scan scan = GRADWIRE_IN_USE(scan);
    alignas(64) uint32_t index[kScanRoom];
    alignas(64) float value[kScanRoom];
    std::vector<float> made(std::min(count, block));
    for (bool again = true; again;) {
        const uint32_t guessed = found.low;
        found.least_kept = guessed;
        found.count = 0;
        for (size_t first = 0; first < count; first += made.size()) {
            const size_t n = std::min(made.size(), count - first);
            make(first, n, made.data());
            for (size_t start = 0; start < n; start += kScanBlock) {
                const Stream part{made.data() + start, nullptr, nullptr, std::min(kScanBlock, n - start), 0};
                append(found, first + start, index, value,
                       scan(part, 1.0f, {found.low, found.low}, index, value).count);
                if (found.count / 2 > std::max(wanted, kScanBlock)) found.prune();
            }
        }
        again = found.count < wanted && guessed > 1;  // too high
        if (again) found.low = 1;
    }
    found.reserve_block();
    found.prune();
}

Found portable_scan(const Stream& s, float decay, Lows low, uint32_t* index, float* value) {
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
    double sums[8] = {}, sum = 0;
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) sums[l] += std::fabs(double(values[i + l]));
    for (int l = 0; i < n; i++, l++) sums[l] += std::fabs(double(values[i]));
    for (double part : sums) sum += part;
    return sum;
}

void scatter_store(float* out, size_t n, const int64_t* positions, size_t count, const float* values, size_t stride,
                   int threads) {
    constexpr size_t kBlock = 4096;  // zeroed and written while it is in the first-level cache
    in_aligned_blocks(n, sizeof(float), threads, [&](size_t first, size_t last) {
        size_t i = size_t(std::lower_bound(positions, positions + count, int64_t(first)) - positions);
        for (size_t start = first; start < last; start += kBlock) {
            const size_t end = std::min(last, start + kBlock);
            std::memset(out + start, 0, (end - start) * sizeof(float));
            for (; i < count && size_t(positions[i]) < end; i++) out[positions[i]] = values[i * stride];
        }
    });
}

namespace {

// Of each place only the cache line counts: many of them are under way at once.
template <class Put>
void at_places(const int64_t* positions, size_t count, float* out, int threads, const Put& put) {
    constexpr size_t kAhead = 32, kMiss = 64;
    in_blocks(count, kMiss, threads, [&](size_t first, size_t last) {
        for (size_t i = first; i < last; i++) {
            if (i + kAhead < last) __builtin_prefetch(out + positions[i + kAhead], 1);
            put(out[positions[i]], i);
        }
    });
}

}  // namespace

void scatter_over(float* out, const int64_t* positions, size_t count, const float* values, size_t stride, int threads) {
    at_places(positions, count, out, threads, [&](float& place, size_t i) { place = values[i * stride]; });
}

void scatter_add(float* out, const int64_t* positions, size_t count, const float* values, size_t stride, int threads) {
    at_places(positions, count, out, threads, [&](float& place, size_t i) { place += values[i * stride]; });
}

}  // namespace gradwire
