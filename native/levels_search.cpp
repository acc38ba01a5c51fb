// The best levels of a bucket: ORQ's greedy search by counting, the others on sorted entries.
//
// Traps:
// - Results must equal the reference to the last bit: prefix sums add one entry after the other in fp64, and every
//   expression has the reference's order of operations.
// - Where entries are sorted, it is as integers of the same order, byte by byte: exact.
// - BinGrad-b needs few of a bucket's entries in order, as long as its sums are exact, whatever their order: where the
//   exponents of its entries are near enough for fp64. It sorts the rest as the reference does. Where a kernel sorts all
//   entries of small buckets in registers, that is faster than to find out which are needed.
#include <algorithm>
#include <limits>
#include <vector>

#include "levels_loops.h"
#include "levels_select.h"

namespace gradwire {

const LevelKernels portable_levels = GRADWIRE_LEVEL_KERNELS(assign_loop, spread_loop, take_between_loop<AppendOneByOne>,
                                                            count_parts_loop, take_part_loop<AppendOneByOne>, nullptr);

const LevelKernels& level_kernels() { return GRADWIRE_IN_USE(levels); }

namespace {

// One bucket, and room for what is computed of it.
struct Bucket {
    size_t n = 0;
    std::vector<float> u, inside;
    std::vector<uint32_t> keys, other, choices;
    std::vector<double> x, sums, squares, least, best, found;
    std::vector<uint8_t> bins;
    std::vector<double> inverses;  // for the splits of `split_entries` entries
    std::vector<SplitPlace> places;
    size_t split_entries = 0;

    void resize(size_t size) {
        n = size;
        u.resize(n);
        inside.resize(n + kFew);
        keys.resize(n);
        other.resize(n);
        x.resize(n);
        sums.resize(n + 1);
    }
};

uint32_t ordered(float v) {
    const uint32_t b = as_bits(v);
    return b ^ (uint32_t(int32_t(b) >> 31) | 0x80000000u);
}

float unordered(uint32_t key) { return as_float(key ^ (~uint32_t(int32_t(key) >> 31) | 0x80000000u)); }

void sort(Bucket& t) {
    const size_t n = t.n;
    for (size_t i = 0; i < n; i++) t.keys[i] = ordered(t.u[i]);
    if (n < 128) {
        std::sort(t.keys.begin(), t.keys.end());
    } else {
        uint32_t counts[4][256] = {};
        for (uint32_t key : t.keys)
            for (int pass = 0; pass < 4; pass++) counts[pass][key >> 8 * pass & 255]++;
        for (int pass = 0; pass < 4; pass++) {
            uint32_t *c = counts[pass], at = 0;
            if (c[t.keys[0] >> 8 * pass & 255] == n) continue;  // all have the same byte
            for (int d = 0; d < 256; d++) {
                const uint32_t many = c[d];
                c[d] = at;
                at += many;
            }
            for (uint32_t key : t.keys) t.other[c[key >> 8 * pass & 255]++] = key;
            t.keys.swap(t.other);
        }
    }
    for (size_t i = 0; i < n; i++) t.u[i] = unordered(t.keys[i]);
}

void add_up(Bucket& t) {
    t.sums[0] = 0;
    for (size_t i = 0; i < t.n; i++) {
        t.x[i] = t.u[i];
        t.sums[i + 1] = t.sums[i] + t.x[i];
    }
}

// The best level between two others.
float best_between(const LevelKernels& kernels, Bucket& t, float low, float high) {
    size_t n;
    const double total = kernels.take_between(t.u.data(), t.n, low, high, t.inside.data(), n);
    if (!n) return low;
    const double below = double(n) - (total - double(n) * low) / (double(high) - low);
    const double rank = std::min(std::max(0.0, std::ceil(below) - 1), double(n - 1));
    return select(kernels, t.inside.data(), n, low, high, size_t(rank));
}

void orq_greedy(const LevelKernels& kernels, Bucket& t, int levels, bool polished, float* out) {
    kernels.extremes(t.u.data(), t.n, out[0], out[levels - 1]);
    for (int span = levels - 1; span > 1; span /= 2)
        for (int left = 0; left < levels - 1; left += span)
            out[left + span / 2] = best_between(kernels, t, out[left], out[left + span]);
    if (!polished) return;
    for (int first : {2, 1})
        for (int k = first; k < levels - 1; k += 2) out[k] = best_between(kernels, t, out[k - 1], out[k + 1]);
}

// Dynamic programming, halving the range of j: the best i grows with it.
void solve(const LevelKernels& kernels, Bucket& t, const Costs& costs, uint32_t* choice, ptrdiff_t low, ptrdiff_t high,
           size_t first, size_t end) {
    if (low > high) return;
    const size_t j = size_t(low + high) / 2;
    const size_t at = kernels.cheapest(costs, j, first, std::min(end, j), t.best[j]);
    choice[j] = uint32_t(at);
    solve(kernels, t, costs, choice, low, ptrdiff_t(j) - 1, first, at);
    solve(kernels, t, costs, choice, ptrdiff_t(j) + 1, high, at, end);
}

void orq_exact(const LevelKernels& kernels, Bucket& t, int levels, float* out) {
    const size_t n = t.n;
    t.squares.resize(n + 1);
    t.least.resize(n);
    t.best.resize(n);
    t.found.resize(n);
    t.choices.resize(n * size_t(levels - 2));
    const double first = t.u[0];
    t.sums[0] = t.squares[0] = 0;
    for (size_t i = 0; i < n; i++) {
        t.x[i] = t.u[i] - first;
        t.sums[i + 1] = t.sums[i] + t.x[i];
        t.squares[i + 1] = t.squares[i] + t.x[i] * t.x[i];
    }
    for (size_t j = 0; j < n; j++)
        t.best[j] = (t.x[j] + t.x[0]) * (t.sums[j + 1] - t.sums[0]) - double(j + 1) * (t.x[0] * t.x[j]) -
                    (t.squares[j + 1] - t.squares[0]);
    for (int layer = 0; layer < levels - 2; layer++) {
        t.least.swap(t.best);
        const Costs costs{t.x.data(), t.sums.data(), t.squares.data(), t.least.data(), t.found.data()};
        const ptrdiff_t last = ptrdiff_t(n) - 1;  // of the last layer only its last entry matters
        solve(kernels, t, costs, t.choices.data() + n * size_t(layer), layer == levels - 3 ? last : 0, last, 0, n - 1);
    }
    size_t j = n - 1;
    for (int k = levels - 1; k > 0; k--) {
        out[k] = t.u[j];
        if (k > 1) j = t.choices[n * size_t(k - 2) + j];
    }
    out[0] = t.u[0];
}

// What is gained by a split after c of n sorted entries that add up to `total`, the first c to `left`.
double gain(double left, double c, double total, double n) {
    const double right = total - left;
    return left * left / c + right * right / (n - c);
}

// The best split so far: the first of those that gain most.
struct Split {
    double total = 0, most = -1, left = 0;
    size_t count = 1;

    void consider(size_t c, double sum, size_t n) {
        const double gained = gain(sum, double(c), total, double(n));
        if (gained > most || (gained == most && c < count)) most = gained, count = c, left = sum;
    }
};

// Whether any sum of n entries with these bit patterns of magnitudes is exact in fp64: it is a multiple of the last bit
// of the least, and below 2^53 times that.
bool sums_are_exact(uint32_t least, uint32_t most, size_t n) {
    int doublings = 0;
    while (size_t(1) << doublings < n) doublings++;
    return int(most >> 23) - std::max(1, int(least >> 23)) + 24 + doublings <= 53;
}

// A part of a bucket's entries, in ascending order of parts: how many they are and what they add up to.
struct Bin {
    double sum;
    uint32_t count;
};

constexpr int kBins = 64;
constexpr double kReach = 3;  // of the inner bins, in mean magnitudes
constexpr double kWider = 1e-3, kLarger = 1 + 1e-9;

// The most that a split inside a bin could gain. Prefix sums of sorted entries from `low` to `high` lie in the triangle
// between both ends and the place where a line of slope `low` from the one meets a line of slope `high` from the other;
// and a function that is convex is largest in a corner.
double most_inside(const Bin& before, const Bin& end, double low, double high, double total, double n) {
    const double count = end.count - before.count, sum = end.sum - before.sum;
    const double lows = (high * count - sum) / (high - low);
    const double c = before.count + lows, left = before.sum + low * lows;
    return c > 0 && c < n ? gain(left, c, total, n) : kInfinity;
}

// The best split of a bucket whose sums are exact, without sorting it: entries are counted in bins, and only bins in
// which a split could gain more than one between bins are sorted. False, if bins cannot tell the entries apart.
bool split_by_bins(const LevelKernels& kernels, Bucket& t, float low, float high, double magnitude, Split& best) {
    const size_t n = t.n;
    const float* u = t.u.data();
    size_t count;
    best.total = kernels.take_between(u, n, -kInfinity, kInfinity, nullptr, count);
    // Bins of the same width around the mean, and at each end one for all that is further away.
    const double center = best.total / double(n), reach = kReach * (magnitude + std::fabs(center));
    const float first = float(std::max(double(low), center - reach)),
                last = float(std::min(double(high), center + reach));
    const float scale = float(kBins - 2) / (last - first), width = (last - first) / float(kBins - 2);
    if (!(scale > 0 && scale < kInfinity && width > 0)) return false;
    t.bins.resize(n);
    kernels.bin_numbers(u, n, first, scale, kBins - 1, t.bins.data());
    Bin bins[2][kBins] = {};  // in turn, so that an addition need not wait for the last one
    for (size_t i = 0; i < n; i++) {
        Bin& bin = bins[i & 1][t.bins[i]];
        bin.sum += u[i];
        bin.count++;
    }
    Bin before[kBins + 1] = {};
    for (int b = 0; b < kBins; b++) {
        const Bin all = {bins[0][b].sum + bins[1][b].sum, bins[0][b].count + bins[1][b].count};
        const Bin end = before[b + 1] = {before[b].sum + all.sum, before[b].count + all.count};
        if (all.count && end.count < n) best.consider(end.count, end.sum, n);
    }
    // Entries of bins that are sorted are put there; all others to one place that nobody reads.
    uint32_t at[kBins], step[kBins], sorted = 0;
    for (int b = 0; b < kBins; b++) {
        // A little wider and larger than they are: in fp32 and fp64 they are rounded.
        const double from = b == 0 ? low : double(first) + (b - 1 - kWider) * double(width);
        const double to = b == kBins - 1 ? high : double(first) + (b + kWider) * double(width);
        const uint32_t many = before[b + 1].count - before[b].count;
        const double most = most_inside(before[b], before[b + 1], std::max(from, double(low)),
                                        std::min(to, double(high)), best.total, double(n));
        step[b] = many > 1 && !(most * kLarger < best.most);
        at[b] = step[b] ? sorted : uint32_t(n);
        if (step[b]) sorted += many;
    }
    t.keys.resize(n + 1);
    for (size_t i = 0; i < n; i++) {
        uint32_t& place = at[t.bins[i]];
        t.keys[place] = ordered(u[i]);
        place += step[t.bins[i]];
    }
    for (int b = 0; b < kBins; b++) {
        if (!step[b]) continue;
        const auto end = t.keys.begin() + ptrdiff_t(at[b]);
        Bin sum = before[b];
        auto key = end - ptrdiff_t(before[b + 1].count - before[b].count);
        std::sort(key, end);
        for (; key + 1 != end; ++key) {
            sum = {sum.sum + double(unordered(*key)), sum.count + 1};
            best.consider(sum.count, sum.sum, n);
        }
    }
    return true;
}

// The best split, by a kernel that sorts in registers.
void split_in_registers(const LevelKernels& kernels, Bucket& t, bool exact, Split& best) {
    const size_t n = t.n;
    if (t.split_entries != n) {
        t.split_entries = n;
        t.places.resize(kSplitMost);
        t.inverses.assign(2 * kSplitMost, 0.0);
        for (size_t c = 1; c < n; c++) {
            t.inverses[split_at(c)] = 1 / double(c);
            t.inverses[kSplitMost + split_at(c)] = 1 / double(n - c);
        }
    }
    const size_t count = kernels.splits(t.u.data(), n, exact, t.inverses.data(), best.total, t.places.data());
    for (size_t i = 0; i < count; i++) best.consider(t.places[i].count, t.places[i].left, n);
}

void bingrad_two(const LevelKernels& kernels, Bucket& t, float* out) {
    const size_t n = t.n;
    float low, high;
    kernels.extremes(t.u.data(), n, low, high);
    out[0] = out[1] = low;
    if (low == high) return;
    uint32_t least, most;
    const double magnitude = double(kernels.magnitudes(t.u.data(), n, least, most)) / double(n);
    Split best;
    const bool exact = sums_are_exact(least, most, n);
    if (kernels.splits && n >= kSplitLeast && n <= kSplitMost) {
        split_in_registers(kernels, t, exact, best);
    } else if (!exact || !split_by_bins(kernels, t, low, high, magnitude, best)) {
        sort(t);
        add_up(t);
        best.total = t.sums[n];
        for (size_t c = 1; c < n; c++) best.consider(c, t.sums[c], n);
    }
    out[0] = float(best.left / double(best.count));
    out[1] = float((best.total - best.left) / double(n - best.count));
}

float bingrad_pair(const Bucket& t) {
    size_t c = 0;
    double mean = t.sums[t.n] / double(t.n);
    while (!(mean <= t.x[c]) && c + 1 < t.n) {
        c++;
        mean = (t.sums[t.n] - t.sums[c]) / double(t.n);
    }
    return float(c && t.x[c - 1] > mean ? t.x[c - 1] : mean);
}

}  // namespace

void search_levels(const Stream& s, float decay, Buckets b, const float* limits, int levels, Search method,
                   float* out) {
    const LevelKernels& kernels = level_kernels();
    Bucket t;
    const bool pair = method == Search::pair;
    const int width = pair ? 1 : levels;
    for (size_t i = 0; i < b.count; i++, out += width) {
        const size_t start = size_t(b.starts[i]);
        t.resize(size_t(b.starts[i + 1]) - start);
        kernels.load(s, decay, start, t.n, limits ? limits[i] : kInfinity, t.u.data());
        if (pair)
            for (float& v : t.u) v = std::fabs(v);
        const bool few = !pair && t.n <= size_t(levels);
        const bool greedy = method == Search::greedy || method == Search::polished;
        if (method == Search::exact || pair || few) sort(t);
        if (pair) add_up(t);
        if (few)
            for (int k = 0; k < levels; k++) out[k] = t.u[std::min(size_t(k), t.n - 1)];
        else if (greedy)
            orq_greedy(kernels, t, levels, method == Search::polished, out);
        else if (method == Search::exact)
            orq_exact(kernels, t, levels, out);
        else if (method == Search::two)
            bingrad_two(kernels, t, out);
        else
            out[0] = bingrad_pair(t);
        for (int k = 0; k < width; k++) out[k] += 0.0f;  // no -0
    }
}

}  // namespace gradwire
