// The best levels for a bucket, which a warp has in its registers.
#pragma once
#include "levels_bins.h"
#include "levels_numbers.h"

const float kUsual = 1.329227995784916e36f;  // 2^120: up to here, sums of a bucket are far from overflowing

// Integers in the order of floats.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}

__device__ __forceinline__ float unordered(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : ~0u)); }

// Both without −0.
__device__ __forceinline__ float warp_min(float x) { return unordered(warp_least(ordered(x))) + 0.0f; }

__device__ __forceinline__ float warp_max(float x) { return unordered(warp_most(ordered(x))) + 0.0f; }

// The power of two that brings a range near 1, as far as fp32 has it.
__device__ __forceinline__ float scale_of(float range) {
    int exponent = int(__float_as_uint(range) >> 23);
    return __uint_as_float(u32(exponent < 1 ? 253 : exponent > 253 ? 1 : 254 - exponent) << 23);
}

// Sorts 32·N numbers: thread t gets those of ranks t·N … t·N + N−1. Every comparison puts the smaller one to the lower
// place, since each merge begins with one half mirrored.
template <int N>
__device__ __forceinline__ void warp_sort(float (&x)[N]) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int size = 2; size <= N; size *= 2) {
#pragma unroll
        for (int by = size / 2; by; by /= 2) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                int other = by == size / 2 ? q ^ (size - 1) : q ^ by;
                if (other < q) continue;
                float low = fminf(x[q], x[other]);
                x[other] = fmaxf(x[q], x[other]);
                x[q] = low;
            }
        }
    }
#pragma unroll 1
    for (int lanes = 2; lanes <= 32; lanes *= 2) {
        bool low = !(lane & lanes / 2);
#pragma unroll
        for (int q = 0; q < N / 2; q++) {
            float a = x[q], b = x[N - 1 - q];
            float from_b = __shfl_xor_sync(~0u, b, lanes - 1), from_a = __shfl_xor_sync(~0u, a, lanes - 1);
            x[q] = (a < from_b) == low ? a : from_b;
            x[N - 1 - q] = (b < from_a) == low ? b : from_a;
        }
#pragma unroll 1
        for (int by = lanes / 4; by; by /= 2) {
            bool lower = !(lane & by);
#pragma unroll
            for (int q = 0; q < N; q++) {
                float other = __shfl_xor_sync(~0u, x[q], by);
                x[q] = (x[q] < other) == lower ? x[q] : other;
            }
        }
#pragma unroll
        for (int by = N / 2; by; by /= 2) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                if (q & by) continue;
                float least = fminf(x[q], x[q + by]);
                x[q + by] = fmaxf(x[q], x[q + by]);
                x[q] = least;
            }
        }
    }
}

// Where to split the sorted numbers from 0 to `range`, to within a part of it. With c numbers that add up to S before a
// split, it gains (S − c·mean)²·n/(c·(n−c)).
template <int N>
__device__ __forceinline__ float coarse_split(const float (&x)[N], int n, float range, Bins<N>& bins) {
    const int each = Bins<N>::kEach;
    int lane = threadIdx.x & 31;
    u32 mine[each], both = 0;  // 2^20 for each number, and what they add up to in half parts, which is less
    bins.count(x, 0.0f, range, mine);
    if (!lane) mine[0] -= u32(32 * N - n);  // the padding
#pragma unroll
    for (int j = 0; j < each; j++) both += mine[j] * u32(1 << 20 | 2 * (each * lane + j) + 1);
    u32 upto = warp_scan(both), all = __shfl_sync(~0u, upto, 31), c = (upto - both) >> 20, s = (upto - both) & 0xfffff;
    float mean = float(all & 0xfffff) / float(n), best = 0, best_of = 1;
    int split = Bins<N>::kNumber / 2;
#pragma unroll
    for (int j = 0; j < each; j++) {
        c += mine[j], s += mine[j] * u32(2 * (each * lane + j) + 1);
        float gain = float(s) - float(c) * mean, of = float(c) * float(u32(n) - c);
        gain *= gain;
        if (of > 0 && gain * best_of > best * of) best = gain, best_of = of, split = each * lane + j + 1;
    }
    best /= best_of;
    float most = warp_max(best);
    split = __shfl_sync(~0u, split, __ffs(int(__ballot_sync(~0u, best == most))) - 1);
    return range * (float(split) / float(Bins<N>::kNumber));
}

// BinGrad-b: the best two levels of n numbers, the means of both sides of a split. It is moved to the middle between
// the means as long as that changes something: a few times, since it begins near the best.
template <int N>
__device__ __forceinline__ void best_two(const float (&u)[N], int n, float least, float greatest, Bins<N>& bins,
                                         float* numbers) {
    numbers[0] = numbers[1] = least;
    if (!(greatest - least > 0)) return;
    // From 0 to a number near 1, so that no sum is beyond fp32.
    float scale = scale_of(greatest - least), back = __uint_as_float((254u - (__float_as_uint(scale) >> 23)) << 23);
    float range = (greatest - least) * scale, x[N], part[4] = {0, 0, 0, 0};
    if (n == 32 * N) {
#pragma unroll
        for (int q = 0; q < N; q++) x[q] = (u[q] - least) * scale;
    } else {
#pragma unroll
        for (int q = 0; q < N; q++) x[q] = u[q] < kInfinity ? (u[q] - least) * scale : 0.0f;
    }
#pragma unroll
    for (int q = 0; q < N; q++) part[q & 3] += x[q];
    float all = warp_sum_float((part[0] + part[1]) + (part[2] + part[3])), low = 0, high = range;
    float split = coarse_split(x, n, range, bins);
    int before = 0, padding = 32 * N - n;
#pragma unroll 1
    for (int round = 0; round < 6; round++) {
        float sum[4] = {0, 0, 0, 0};
        u32 count[4] = {0, 0, 0, 0};
#pragma unroll
        for (int q = 0; q < N; q++)
            if (x[q] < split) sum[q & 3] += x[q], count[q & 3]++;
        float below = warp_sum_float((sum[0] + sum[1]) + (sum[2] + sum[3]));
        int c = int(warp_total(count[0] + count[1] + count[2] + count[3])) - padding;
        if (c == before || c <= 0 || c >= n) break;
        before = c;
        low = below / float(c), high = (all - below) / float(n - c);
        split = 0.5f * low + 0.5f * high;
    }
    numbers[0] = least + low * back, numbers[1] = least + high * back;
}

// BinGrad-pb: b = (1/n)·Σ_{|v| ≥ b} |v| of n magnitudes.
template <int N>
__device__ __forceinline__ float best_pair(float (&x)[N], int n, float greatest) {
    int first = (threadIdx.x & 31) * N, found = n - 1;
    warp_sort(x);
    float scale = scale_of(greatest), mine = 0;
#pragma unroll
    for (int q = 0; q < N; q++)
        if (first + q < n) mine += x[q] * scale;
    float upto = warp_scan(mine), left = __shfl_sync(~0u, upto, 31) - (upto - mine);
#pragma unroll
    for (int q = 0; q < N; q++) {
        if (first + q >= n) continue;
        if (left <= x[q] * scale * float(n) && first + q < found) found = first + q;
        left -= x[q] * scale;
    }
    for (int by = 16; by; by >>= 1) {
        int other = __shfl_xor_sync(~0u, found, by);
        found = other < found ? other : found;
    }
    double sum = 0;
    float before = 0;  // the largest one below
#pragma unroll
    for (int q = 0; q < N; q++) {
        if (first + q < found)
            before = fmaxf(before, x[q]);
        else if (first + q < n)
            sum += x[q];
    }
    return fmaxf(__double2float_rn(warp_sum(sum) / n), warp_max(before));
}

// Loops over a bucket keep four partial results, so that no instruction waits for the one before. Entries are counted by
// the signs of differences, which takes two instructions each.
__device__ __forceinline__ u32 sign_of(float x) { return __float_as_uint(x) >> 31; }

template <int N>
__device__ __forceinline__ int count_to(const float (&u)[N], float most) {
    u32 above[4] = {0, 0, 0, 0};
#pragma unroll
    for (int q = 0; q < N; q++) above[q & 3] += sign_of(__fsub_rn(most, u[q]));
    return 32 * N - int(warp_total(above[0] + above[1] + above[2] + above[3]));
}

template <int N>
__device__ __forceinline__ u32 count_below(const float (&u)[N], float than) {
    u32 below[4] = {0, 0, 0, 0};
#pragma unroll
    for (int q = 0; q < N; q++) below[q & 3] += sign_of(__fsub_rn(u[q], than));
    return warp_total(below[0] + below[1] + below[2] + below[3]);
}

template <int N>
__device__ __forceinline__ float largest_to(const float (&u)[N], float most) {
    float x[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
#pragma unroll
    for (int q = 0; q < N; q++)
        if (u[q] <= most) x[q & 3] = fmaxf(x[q & 3], u[q]);
    return warp_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
}

template <int N>
__device__ __forceinline__ float smallest_above(const float (&u)[N], float than) {
    float x[4] = {kInfinity, kInfinity, kInfinity, kInfinity};
#pragma unroll
    for (int q = 0; q < N; q++)
        if (u[q] > than) x[q & 3] = fminf(x[q & 3], u[q]);
    return warp_min(fminf(fminf(x[0], x[1]), fminf(x[2], x[3])));
}

// ORQ: the best level between two others, the entry of a rank that follows from the sum of what is between them. It is
// found by counting how many are below a guess, in the part of the range where it is (`upto` as Bins has it). `base`
// entries are below the lower one, and `below_high` below the other.
template <int N>
__device__ float best_between(const float (&u)[N], float low, float high, int base, int below_high, const u32* upto,
                              float least, float greatest) {
    // Σ(u − low), where those outside count as 0 or as the whole range.
    float part[4] = {0, 0, 0, 0}, range = __fsub_rn(high, low);
#pragma unroll
    for (int q = 0; q < N; q++) part[q & 3] += fminf(fmaxf(__fsub_rn(u[q], low), 0.0f), range);
    int beyond = 32 * N - below_high, n = below_high - base;
    // In units of the range, as the sum of all may be beyond fp32.
    float sum = warp_sum_float(((part[0] + part[1]) + (part[2] + part[3])) / range) - float(beyond);
    if (n <= 0) return low;
    float rank = ceilf(float(n) - sum) - 1;
    rank = rank > 0 ? rank : 0;
    int wanted = 1 + (rank < float(n - 1) ? int(rank) : n - 1);
    // `few` are up to `below`, less than wanted; `many` are up to `at`, as many as wanted or more.
    u32 below = ordered(low == 0 ? -0.0f : low) - 1, at = ordered(high);
    int few = 0, many = n, bin = 0;
#pragma unroll
    for (int by = Bins<N>::kNumber / 2; by; by /= 2)
        if (int(upto[bin + by]) < base + wanted) bin += by;
    // Its edges, and a little more, since they are rounded.
    float width = (greatest - least) / (float(Bins<N>::kNumber) * 0.99999f);
    u32 from = ordered(least + float(bin) * width * 0.99999f) - 4;
    u32 to = ordered(least + float(bin + 1) * width * 1.00001f) + 4;
    if (bin && from > below && from < at) below = from, few = max(0, int(upto[bin]) - base);
    if (bin < Bins<N>::kNumber - 1 && to < at && to > below) at = to, many = min(n, int(upto[bin + 1]) - base);
    bool interpolate = true;
    for (int round = 0; round < 96 && at - below > 1; round++) {
        if (round > 4 && round & 1) {  // where many are equal, it may be the next one
            float next = smallest_above(u, unordered(below));
            int count = count_to(u, next) - base;
            if (count >= wanted || !(next < high)) return next < high ? next : low;
            below = ordered(next), few = count;
            continue;
        }
        u32 middle = below + (at - below) / 2;
        if (interpolate) {
            float start = unordered(below), share = (float(wanted - few) - 0.5f) / float(many - few);
            u32 guess = ordered(start + share * (unordered(at) - start));
            middle = guess <= below ? below + 1 : guess >= at ? at - 1 : guess;
        }
        float value = unordered(middle);
        int count = count_to(u, value) - base;
        if (count == wanted) return largest_to(u, value);
        if (count + 1 == wanted) return smallest_above(u, value);
        int width = many - few;
        if (count < wanted)
            below = middle, few = count;
        else
            at = middle, many = count;
        interpolate = !interpolate || many - few < width / 4;  // else halving the integers gets further
    }
    return unordered(at);
}

// Which methods a kernel is for, so that none pays for what another does. SIGNS and TWO_MEANS round to nearest.
enum { SCALED, SIGNS, TWO_MEANS, PLUS_MINUS, SEARCHED };

// Finds the numbers of a bucket, and tells whether its entries are of usual size. `below` has room for as many integers.
template <int N, int KIND>
__device__ __forceinline__ bool fit_bucket(const Recipe& recipe, const float (&u)[N], int n, Bins<N>* bins,
                                           float* numbers, int* below) {
    int lane = threadIdx.x & 31;
    float lowest[4] = {kInfinity, kInfinity, kInfinity, kInfinity};
    float highest[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
#pragma unroll
    for (int q = 0; q < N; q++) lowest[q & 3] = fminf(lowest[q & 3], u[q]);
    if (n == 32 * N) {
#pragma unroll
        for (int q = 0; q < N; q++) highest[q & 3] = fmaxf(highest[q & 3], u[q]);
    } else {
#pragma unroll
        for (int q = 0; q < N; q++) highest[q & 3] = fmaxf(highest[q & 3], u[q] < kInfinity ? u[q] : -kInfinity);
    }
    float least = warp_min(fminf(fminf(lowest[0], lowest[1]), fminf(lowest[2], lowest[3])));
    float greatest = warp_max(fmaxf(fmaxf(highest[0], highest[1]), fmaxf(highest[2], highest[3])));
    float magnitude = fmaxf(-least, greatest);
    if (KIND == SIGNS) {
        float sum[4] = {0, 0, 0, 0};
        if (n == 32 * N) {
#pragma unroll
            for (int q = 0; q < N; q++) sum[q & 3] += fabsf(u[q]);
        } else {
#pragma unroll
            for (int q = 0; q < N; q++) sum[q & 3] += u[q] < kInfinity ? fabsf(u[q]) : 0.0f;
        }
        double all = (double(sum[0]) + double(sum[1])) + (double(sum[2]) + double(sum[3]));
        numbers[0] = __double2float_rn(warp_sum(all) / n);
    } else if (KIND == SCALED) {
        numbers[0] = recipe.method == RANGE ? least : magnitude;
        numbers[1] = greatest;
        if (recipe.method == L2_NORM) {
            double sum = 0;
#pragma unroll
            for (int q = 0; q < N; q++) {
                double x = u[q] < kInfinity ? double(u[q]) : 0.0;
                sum += x * x;
            }
            double norm = sqrt(warp_sum(sum));
            norm = norm < double(kLargest) ? norm : double(kLargest);
            float x = __double2float_rn(norm);
            if (double(x) < norm) x = __uint_as_float(__float_as_uint(x) + 1);
            numbers[0] = fmaxf(x, magnitude);  // rounded squares may fall short of the one entry that is not 0
        }
    } else if (KIND == TWO_MEANS) {
        best_two(u, n, least, greatest, *bins, numbers);
    } else if (KIND == PLUS_MINUS) {
        float x[N];
#pragma unroll
        for (int q = 0; q < N; q++) x[q] = fabsf(u[q]);
        numbers[0] = best_pair(x, n, magnitude);
    } else if (n <= recipe.levels) {  // the entries themselves, sorted, and the last of them repeated
#pragma unroll 1
        for (int k = 0; k < recipe.levels; k++) {
            if (!lane) numbers[k] = least;
            if (k + 1 < n) {
                // Equal ones stand as often as there are of them.
                if (count_to(u, least) <= k + 1) least = smallest_above(u, least);
            }
        }
    } else {
        u32 mine[Bins<N>::kEach];
        bins->count(u, least, greatest - least, mine);
        const u32* upto = bins->upto(mine);
        int last = recipe.levels - 1, below_last = int(count_below(u, greatest));
        if (!lane) numbers[0] = least, numbers[last] = greatest, below[0] = 0, below[last] = below_last;
        __syncwarp();
#pragma unroll 1
        for (int span = last; span > 1; span /= 2) {
#pragma unroll 1
            for (int left = 0; left < last; left += span) {
                int right = left + span, middle = left + span / 2;
                float best = best_between(u, numbers[left], numbers[right], below[left], below[right], upto, least,
                                          greatest);
                if (!lane) numbers[middle] = best;
                if (span == 2) continue;  // no other level is between this one and another
                int below_best = int(count_below(u, best));
                if (!lane) below[middle] = below_best;
            }
            __syncwarp();
        }
    }
    __syncwarp();
    return magnitude <= kUsual;
}
