// A few levels in each bucket of entries (codec 4): the levels, the symbols and the new error memory in one pass.
//
// A warp takes a bucket and keeps all its entries in registers, so that gradient and memory are read once. A tile has
// whole buckets, since their size divides a tile's. Padding behind a short bucket is +infinity, which sorts last.
#pragma once
#include "common.h"

const int kTile = 8192, kWarps = 4, kThreads = 32 * kWarps, kFew = 9;
#define kInfinity __uint_as_float(0x7f800000u)
const float kLargest = 8.507059173023462e37f;   // 2^126, the largest magnitude of a level
const float kUsual = 1.329227995784916e36f;     // 2^120: up to here, sums of a bucket are far from overflowing
enum { MAX_NORM, L2_NORM, RANGE };  // methods of the kernels for scaled levels
enum { EXPLICIT = 0, EVEN = 1, SYMMETRIC = 2 };              // kinds of numbers, as on the wire

struct Recipe {  // of `Tensor.format`
    int method, levels, kind, precision, bucket, outward;
};

__device__ __forceinline__ float widened(u16 bits, int dtype) {
    return dtype == FP16 ? half_to_float(bits) : bf16_to_float(bits);
}

// What is coded as one tensor: a tensor, or several of which one has too few entries for levels of its own. Their
// numbers stand at the same place of the frame, which is what tells them.
struct Segment {
    const Tensor* tensors;
    int many;
    i64 count;
    int tile;       // of the segment, that this block works on
    u64 first;      // index of its first entry in the frame
};

__device__ Segment segment_of(const Job* job, Where where) {
    const Tensor* t = job->tensors + where.item;
    const Stream& stream = job->streams[t->stream];
    const Tensor *begin = job->tensors + stream.first_tensor, *end = begin + stream.tensors, *first = t, *last = t + 1;
    while (first > begin && first[-1].step_at == t->step_at) first--;
    Segment s = {first, 0, 0, t->first_tile - first->first_tile + where.index, u64(first->first - begin->first)};
    while (last < end && last->step_at == t->step_at) last++;
    s.many = int(last - first);
    for (const Tensor* p = first; p < last; p++) s.count += p->count;
    return s;
}

// The tensor that holds entry i of a segment; i becomes its index there.
__device__ __forceinline__ const Tensor& tensor_at(const Segment& s, i64* i) {
    const Tensor* t = s.tensors;
    while (*i >= t->count) *i -= t++->count;
    return *t;
}

struct Table {         // of a warp's bucket
    float numbers[256];
    float2 values[256];  // values[k]: what the symbols k and k + 1 stand for
};

// ── numbers of a warp's bucket ────────────────────────────────────────────────────────────────────

// Both without −0: which zero is the smaller may differ between the threads, and all must decide alike.
__device__ __forceinline__ float warp_min(float x) {
    for (int by = 16; by; by >>= 1) x = fminf(x, __shfl_xor_sync(~0u, x, by));
    return x + 0.0f;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int by = 16; by; by >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
    return x + 0.0f;
}

// Integers in the order of floats.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}

__device__ __forceinline__ float unordered(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : ~0u)); }

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

// BinGrad-b: the best two levels of n numbers, the means of both sides of a split of the sorted ones. With numbers that
// are centered, the split after c of them gains S²·n/(c·(n−c)), where S is the sum of these c.
template <int N>
__device__ __forceinline__ void best_two(float (&x)[N], int n, float least, float greatest, float* numbers) {
    int first = (threadIdx.x & 31) * N;
    warp_sort(x);
    float middle = 0.5f * least + 0.5f * greatest, scale = scale_of(greatest - least), mine = 0;
#pragma unroll
    for (int q = 0; q < N; q++)
        if (first + q < n) mine += (x[q] - middle) * scale;
    float upto = warp_scan(mine), sum = upto - mine, mean = __shfl_sync(~0u, upto, 31) / float(n);
    float best = 0, best_of = 1;
    int split = 1;
#pragma unroll
    for (int q = 0; q < N; q++) {
        int c = first + q + 1;
        if (c >= n) continue;
        sum += (x[q] - middle) * scale;
        float s = sum - float(c) * mean, of = float(c) * float(n - c);
        s *= s;
        if (s * best_of > best * of) best = s, best_of = of, split = c;
    }
    best /= best_of;
    for (int by = 16; by; by >>= 1) {
        float other = __shfl_xor_sync(~0u, best, by);
        int where = __shfl_xor_sync(~0u, split, by);
        if (other > best || (other == best && where < split)) best = other, split = where;
    }
    double left = 0, right = 0;
#pragma unroll
    for (int q = 0; q < N; q++) {
        if (first + q < split)
            left += x[q];
        else if (first + q < n)
            right += x[q];
    }
    numbers[0] = __double2float_rn(warp_sum(left) / split);
    numbers[1] = n > 1 ? __double2float_rn(warp_sum(right) / (n - split)) : least;
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
    return 32 * N - int(warp_sum_u32(above[0] + above[1] + above[2] + above[3]));
}

template <int N>
__device__ __forceinline__ float largest_to(const float (&u)[N], float most) {
    float x[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
#pragma unroll
    for (int q = 0; q < N; q++) x[q & 3] = fmaxf(x[q & 3], u[q] <= most ? u[q] : -kInfinity);
    return warp_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
}

template <int N>
__device__ __forceinline__ float smallest_above(const float (&u)[N], float than) {
    float x[4] = {kInfinity, kInfinity, kInfinity, kInfinity};
#pragma unroll
    for (int q = 0; q < N; q++) x[q & 3] = fminf(x[q & 3], u[q] > than ? u[q] : kInfinity);
    return warp_min(fminf(fminf(x[0], x[1]), fminf(x[2], x[3])));
}

// ORQ: the best level between two others, the entry of a rank that follows from the sum of what is between them. It is
// found by counting how many are below a guess.
template <int N>
__device__ float best_between(const float (&u)[N], float low, float high) {
    // Σ(u − low), where those outside count as 0 or as the whole range.
    float part[4] = {0, 0, 0, 0}, range = __fsub_rn(high, low);
    u32 under[4] = {0, 0, 0, 0}, below_high[4] = {0, 0, 0, 0};
#pragma unroll
    for (int q = 0; q < N; q++) {
        float above = __fsub_rn(u[q], low);
        under[q & 3] += sign_of(above);
        below_high[q & 3] += sign_of(__fsub_rn(u[q], high));
        part[q & 3] += fminf(fmaxf(above, 0.0f), range);
    }
    int base = int(warp_sum_u32(under[0] + under[1] + under[2] + under[3]));
    int beyond = 32 * N - int(warp_sum_u32(below_high[0] + below_high[1] + below_high[2] + below_high[3]));
    int n = 32 * N - base - beyond;
    double sum = warp_sum((double(part[0]) + double(part[1])) + (double(part[2]) + double(part[3])));
    sum -= double(beyond) * double(range);
    if (n <= 0) return low;
    double rank = ceil(double(n) - sum / double(range)) - 1;
    rank = rank > 0 ? rank : 0;
    int wanted = 1 + (rank < n - 1 ? int(rank) : n - 1);
    // `few` are up to `below`, less than wanted; `many` are up to `at`, as many as wanted or more.
    u32 below = ordered(low == 0 ? -0.0f : low) - 1, at = ordered(high);
    int few = 0, many = n;
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

// ── rounding of numbers ───────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ float to_type(float x, int type) { return received(x, type) + 0.0f; }  // no −0

// The least number of this type that is not below x.
__device__ __forceinline__ float up_to_type(float x, int type) {
    float y = received(x, type);
    if (type == FP32 || y >= x) return y;
    u32 bits = type == FP16 ? float_to_half(y) : float_to_bf16(y);
    bits = y > 0 ? bits + 1 : y < 0 ? bits - 1 : 1;
    float next = type == FP16 ? half_to_float(u16(bits)) : bf16_to_float(u16(bits));
    return is_finite(next) ? next : y;
}

// Away from all entries, so that none is outside; first to the tensor's dtype, to which the receiver rounds.
__device__ __forceinline__ float outward(float x, int dtype, int precision) {
    return up_to_type(up_to_type(x, dtype), precision) + 0.0f;
}

__device__ __forceinline__ void put_number(u8* at, float x, int precision) {
    u32 bits = precision == FP32 ? __float_as_uint(x) : precision == FP16 ? float_to_half(x) : float_to_bf16(x);
    at[0] = u8(bits), at[1] = u8(bits >> 8);
    if (precision == FP32) at[2] = u8(bits >> 16), at[3] = u8(bits >> 24);
}

// Rounds the numbers of a bucket of n entries and writes them to the frame. By a warp, whose own table this is.
__device__ __forceinline__ void state_numbers(Job* job, const Recipe& recipe, int dtype, int n, Table& table, u8* at) {
    int lane = threadIdx.x & 31, s = recipe.levels, precision = recipe.precision;
    int width = recipe.kind == EXPLICIT ? s : recipe.kind == EVEN ? 2 : 1;
    float limit = dtype == FP16 ? 65504.0f : kLargest;
    int used = n < 2 ? 2 : n;
    used = used < width ? used : width;
    int last = n - 1 < 1 ? 1 : n - 1;  // a small bucket repeats its last level
    last = last < width - 1 ? last : width - 1;
    float final = limited(table.numbers[width - 1], limit);
    __syncwarp();
#pragma unroll 1
    for (int k = lane; k < width; k += 32) {
        float x = limited(table.numbers[k], limit), y = to_type(x, precision);
        if (recipe.outward && k >= last) y = outward(final, dtype, precision);
        if (recipe.outward && k < last && !k) y = -outward(-x, dtype, precision) + 0.0f;
        table.numbers[k] = y;
        if (precision == FP16 && !(fabsf(x) <= 65504.0f)) atomicOr(&job->status->bits, u32(UNUSUAL));
        if (k < used) put_number(at + k * (precision == FP32 ? 4 : 2), y, precision);
    }
    __syncwarp();
}

// What a receiver gets for symbol k.
__device__ __forceinline__ float value_of(const Recipe& recipe, const Table& table, int dtype, int k) {
    int s = recipe.levels;
    float level = table.numbers[recipe.kind == EXPLICIT ? k : 0];
    if (recipe.kind != EXPLICIT) {
        double low = recipe.kind == SYMMETRIC ? -double(level) : double(level);
        double high = recipe.kind == SYMMETRIC ? double(level) : double(table.numbers[1]);
        level = __double2float_rn((low * double(s - 1 - k) + high * double(k)) / double(s - 1));
    }
    return received(level, dtype);
}

// States the values on both sides of each threshold, which are the inner values, up to the next power of two.
__device__ __forceinline__ void state_values(const Recipe& recipe, Table& table, int dtype, int thresholds) {
    int s = recipe.levels;
#pragma unroll 1
    for (int k = threadIdx.x & 31; k < s || k < thresholds; k += 32) {
        float value = k < s ? value_of(recipe, table, dtype, k) : 0.0f;
        if (k < thresholds) table.values[k].x = k < s - 1 ? value : kInfinity;
        if (k && k < s) table.values[k - 1].y = value;
    }
    __syncwarp();
}

// Which methods a kernel is for, so that none pays for what another does. SIGNS and TWO_MEANS round to nearest.
enum { SCALED, SIGNS, TWO_MEANS, PLUS_MINUS, SEARCHED };

// Finds the numbers of a bucket, and tells whether its entries are of usual size.
template <int N, int KIND>
__device__ __forceinline__ bool fit_bucket(const Recipe& recipe, const float (&u)[N], int n, float* numbers) {
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
        double sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int q = 0; q < N; q++) sum[q & 3] += double(u[q] < kInfinity ? fabsf(u[q]) : 0.0f);
        numbers[0] = __double2float_rn(warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / n);
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
    } else if (KIND == TWO_MEANS || KIND == PLUS_MINUS) {
        float x[N];
#pragma unroll
        for (int q = 0; q < N; q++) x[q] = KIND == PLUS_MINUS ? fabsf(u[q]) : u[q];
        if (KIND == PLUS_MINUS)
            numbers[0] = best_pair(x, n, magnitude);
        else
            best_two(x, n, least, greatest, numbers);
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
        if (!lane) numbers[0] = least, numbers[recipe.levels - 1] = greatest;
        __syncwarp();
#pragma unroll 1
        for (int span = recipe.levels - 1; span > 1; span /= 2) {
#pragma unroll 1
            for (int left = 0; left < recipe.levels - 1; left += span) {
                float best = best_between(u, numbers[left], numbers[left + span]);
                if (!lane) numbers[left + span / 2] = best;
            }
            __syncwarp();
        }
    }
    __syncwarp();
    return magnitude <= kUsual;
}

// ── the pass ──────────────────────────────────────────────────────────────────────────────────────

// Loads a bucket of n entries and pads it. `wide` says that it is whole rows of one tensor, and aligned. Returns 0, or a
// NaN if something is not finite.
template <int ROWS>
__device__ __forceinline__ float load_bucket(const Segment& segment, i64 begin, int n, bool wide,
                                             float (&u)[4 * ROWS]) {
    const Tensor& t = *segment.tensors;
    int lane = threadIdx.x & 31, dtype = t.dtype;
    float decay = t.decay, bad = 0, wrong[4] = {0, 0, 0, 0};
    if (!wide) {
        // Row by row from the last one on; those that are there move up, so that this code is there only once.
#pragma unroll 1
        for (int row = ROWS - 1; row >= 0; row--) {
#pragma unroll
            for (int q = 4 * ROWS - 1; q >= 4; q--) u[q] = u[q - 4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u[k] = kInfinity;
                int i = 128 * row + 4 * lane + k;
                if (i >= n) continue;
                i64 at = begin + i;
                const Tensor& from = tensor_at(segment, &at);
                u[k] = load(from.gradient, at, dtype);
                bad = __fmaf_rn(u[k], 0.0f, bad);
                if (!from.before) continue;
                float e = from.before[at];
                bad = __fmaf_rn(e, 0.0f, bad);
                u[k] = compensated(u[k], e, from.decay);
            }
        }
        return bad;
    }
    if (dtype == FP32) {
        const float4* gradient = reinterpret_cast<const float4*>(static_cast<const float*>(t.gradient) + begin) + lane;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float4 v = make_float4(kInfinity, kInfinity, kInfinity, kInfinity);
            if (128 * row < n) v = gradient[32 * row];
            u[4 * row] = v.x, u[4 * row + 1] = v.y, u[4 * row + 2] = v.z, u[4 * row + 3] = v.w;
        }
    } else {
        const uint2* gradient = reinterpret_cast<const uint2*>(static_cast<const u16*>(t.gradient) + begin) + lane;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            u32 infinity = dtype == FP16 ? 0x7c007c00u : 0x7f807f80u;
            uint2 v = make_uint2(infinity, infinity);
            if (128 * row < n) v = gradient[32 * row];
            u[4 * row] = widened(u16(v.x), dtype), u[4 * row + 1] = widened(u16(v.x >> 16), dtype);
            u[4 * row + 2] = widened(u16(v.y), dtype), u[4 * row + 3] = widened(u16(v.y >> 16), dtype);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        if (128 * row < n)
            for (int k = 0; k < 4; k++) wrong[k] = __fmaf_rn(u[4 * row + k], 0.0f, wrong[k]);
    if (t.before) {
        const float4* before = reinterpret_cast<const float4*>(t.before + begin) + lane;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (128 * row >= n) continue;
            float4 v = before[32 * row];
            float e[4] = {v.x, v.y, v.z, v.w};
            for (int k = 0; k < 4; k++) {
                wrong[k] = __fmaf_rn(e[k], 0.0f, wrong[k]);
                u[4 * row + k] = compensated(u[4 * row + k], e[k], decay);
            }
        }
    }
    return (wrong[0] + wrong[1]) + (wrong[2] + wrong[3]);
}

__device__ __forceinline__ u32 one_at(u32 bit) {  // 0 beyond the highest
#ifdef GRADWIRE_ON_CPU
    return bit < 32 ? 1u << bit : 0;
#else
    u32 x;
    asm("shl.b32 %0, 1, %1;" : "=r"(x) : "r"(bit));
    return x;
#endif
}

// How often each of the first eight symbols comes, of one thread and up to 255 of them: 4 bits for each, moved to 8 bits
// before they overflow. What is not counted here is the ninth.
struct FewCounts {
    u32 low, even, odd;
    __device__ __forceinline__ void add(u32 symbol) { low += one_at(4 * symbol); }
    __device__ __forceinline__ void widen() {
        even += low & 0x0f0f0f0fu;
        odd += low >> 4 & 0x0f0f0f0fu;
        low = 0;
    }
    // Adds what a warp has counted to `counts`, begins again, and returns how many there were.
    __device__ __forceinline__ u32 move_to(u32* counts) {
        u32 all = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u32 sum = warp_sum_u32((k & 1 ? odd : even) >> 4 * (k & ~1) & 255);
            if (!(threadIdx.x & 31) && sum) atomicAdd(&counts[k], sum);
            all += sum;
        }
        even = odd = 0;
        return all;
    }
};

template <int ROWS, int KIND>
__device__ __forceinline__ void convert(Job* job, const Where* tiles) {
    __shared__ u32 counts[kSymbols];
    __shared__ Table tables[kWarps];
    const int N = 4 * ROWS;
    const bool stochastic = KIND != SIGNS && KIND != TWO_MEANS;
    const bool binary = KIND != SCALED && KIND != SEARCHED;  // always two levels
    Segment segment = segment_of(job, tiles[blockIdx.x]);
    if (i64(segment.tile) * kTile >= segment.count) return;
    const Tensor& t = *segment.tensors;
    const Recipe recipe = *static_cast<const Recipe*>(t.format);
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, s = recipe.levels, dtype = t.dtype;
    bool few = s <= kFew;
    for (int k = tid; k < kSymbols; k += kThreads) counts[k] = 0;
    __syncthreads();
    Table& table = tables[warp];
    u8* symbols = job->symbols + t.first;
    int width = (recipe.kind == EXPLICIT ? s : recipe.kind == EVEN ? 2 : 1) * (recipe.precision == FP32 ? 4 : 2);
    int thresholds = 1;
    while (thresholds < s - 1) thresholds *= 2;
    bool aligned = segment.many == 1 && !((u64)(t.gradient) & (dtype == FP32 ? 15 : 7)) && !((u64)(t.before) & 15) &&
                   !((u64)(t.after) & 15) && !((u64)(symbols) & 3);
    u32 ones = 0, slots = 0, entries = 0, ninth = 0;
    FewCounts counted = {0, 0, 0};
    float bad = 0;
    bool usual = true;
#pragma unroll 1
    for (int b = warp; b < kTile / recipe.bucket; b += kWarps) {
        i64 begin = i64(segment.tile) * kTile + i64(b) * recipe.bucket;
        if (begin >= segment.count) break;
        int n = int(segment.count - begin < recipe.bucket ? segment.count - begin : recipe.bucket);
        bool wide = aligned && !(n & 127);
        float u[N];
        bad += load_bucket<ROWS>(segment, begin, n, wide, u);
        usual = fit_bucket<N, KIND>(recipe, u, n, table.numbers) && usual;
        state_numbers(job, recipe, dtype, n, table, t.step_at + (begin / recipe.bucket) * width);
        state_values(recipe, table, dtype, thresholds);
        u64 index = segment.first + u64(begin);
        u32 k1 = mix(u32(t.seed) ^ 0x9e3779b9u ^ mix(u32(index >> 32))), k2 = mix(k1 ^ u32(t.seed >> 32));
        float low = table.values[0].x, high = table.values[0].y, gap = __fsub_rn(high, low);
        float middle = __double2float_rn((double(low) + double(high)) / 2), median = table.values[thresholds / 2].x;
        const char* values = reinterpret_cast<const char*>(table.values);
        entries += n;
        // Four rows at a time; then the others move up, so that this code is there only once.
#pragma unroll 1
        for (int first = 0; first < n; first += 512) {
            float x[16];
            u32 at[16];  // eight times the symbol: where its value is
            u32 packed[4];
#pragma unroll
            for (int q = 0; q < 16; q++) x[q] = u[q];
#pragma unroll
            for (int q = 0; q + 16 < N; q++) u[q] = u[q + 16];
            slots += 512;
            if (first + 512 > n) {  // from here on padding belongs to the first symbol
#pragma unroll
                for (int q = 0; q < 16; q++)
                    if (first + 128 * (q / 4) + 4 * lane + q % 4 >= n) x[q] = -kInfinity;
            }
            if (!binary) {
                u32 half = thresholds > 1 ? 4 * thresholds : 0;
#pragma unroll
                for (int q = 0; q < 16; q++) at[q] = x[q] >= median ? half : 0;
#pragma unroll 1
                for (u32 by = half / 2; by >= 8; by >>= 1) {
#pragma unroll
                    for (int q = 0; q < 16; q++) {
                        u32 next = at[q] + by;
                        if (x[q] >= *reinterpret_cast<const float*>(values + next)) at[q] = next;
                    }
                }
            }
#pragma unroll
            for (int q = 0; q < 16; q++) {
                float under = low, over = high, difference = gap;
                if (!binary) {
                    float2 both = *reinterpret_cast<const float2*>(values + at[q]);
                    under = both.x, over = both.y, difference = __fsub_rn(over, under);
                }
                bool up = x[q] >= middle;
                if (stochastic) {
                    u32 i = u32(index) + u32(first + 128 * (q / 4) + 4 * lane + q % 4);
                    float r = float(mix(mix(i ^ k1) + k2) >> 8) * 5.9604644775390625e-8f;
                    up = __fmul_rn(r, difference) < __fsub_rn(x[q], under);
                }
                x[q] = __fsub_rn(x[q], up ? over : under);
                if (binary) {
                    ones += up;
                    packed[q / 4] = q % 4 ? packed[q / 4] + (u32(up) << 8 * (q % 4)) : u32(up);
                } else {
                    at[q] += up ? 8 : 0;
                    packed[q / 4] = q % 4 ? packed[q / 4] + (at[q] << (8 * (q % 4) - 3)) : at[q] >> 3;
                }
            }
            if (!binary && few) {
#pragma unroll
                for (int q = 0; q < 16; q++) {
                    counted.add(at[q] >> 3);
                    if (q == 7 || q == 15) counted.widen();
                }
            } else if (!binary) {
#pragma unroll
                for (int q = 0; q < 16; q++) atomicAdd(&counts[at[q] >> 3], 1u);
            }
            if (wide) {
#pragma unroll
                for (int row = 0; row < 4; row++) {
                    if (first + 128 * row >= n) continue;
                    i64 at = begin + first + 128 * row + 4 * lane;
                    *reinterpret_cast<u32*>(symbols + at) = packed[row];
                    if (t.after)
                        *reinterpret_cast<float4*>(t.after + at) = make_float4(x[4 * row], x[4 * row + 1],
                                                                               x[4 * row + 2], x[4 * row + 3]);
                }
                continue;
            }
#pragma unroll
            for (int q = 0; q < 16; q++) {
                int i = first + 128 * (q / 4) + 4 * lane + q % 4;
                if (i >= n) continue;
                i64 at = begin + i;
                symbols[at] = u8(packed[q / 4] >> 8 * (q % 4));
                const Tensor& to = tensor_at(segment, &at);
                if (to.after) to.after[at] = x[q];
            }
        }
        // Small buckets are mostly padding, of which there may be too much to count.
        if (!binary && few && b + 8 * kWarps < kTile / recipe.bucket) ninth -= counted.move_to(counts);
        __syncwarp();
    }
    if (bad != 0) atomicOr(&job->status->bits, u32(NONFINITE));  // a NaN is not 0
    if (!usual) atomicOr(&job->status->bits, u32(UNUSUAL));
    u64* total = job->streams[t.stream].counts;
    __syncthreads();
    if (binary) {
        ones = warp_sum_u32(ones);
        if (!lane) atomicAdd(&counts[0], entries - ones), atomicAdd(&counts[1], ones);
    } else {
        if (few) {
            ninth -= counted.move_to(counts);
            if (!lane) atomicAdd(&counts[kFew - 1], slots + ninth);
        }
        if (!lane) atomicAdd(&counts[0], entries - slots);  // without the padding
    }
    __syncthreads();
    for (int k = tid; k < s; k += kThreads)
        if (counts[k]) atomicAdd(total + k, u64(counts[k]));
}
