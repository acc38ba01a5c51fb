// Buckets of entries, each in the registers of a warp.
//
// A tile has whole buckets, since their size divides a tile's. Padding behind a short bucket is +infinity.
#pragma once
#include "common.h"

const int kTile = 8192, kWarps = 4, kThreads = 32 * kWarps;
#define kInfinity __uint_as_float(0x7f800000u)

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
// Puts a lane's entries into its part of shared memory: four of them, and the next four 32 lanes further on.
template <int N>
__device__ __forceinline__ void keep(const float (&u)[N], float4* mine) {
#pragma unroll
    for (int row = 0; row < N / 4; row++)
        mine[32 * row] = make_float4(u[4 * row], u[4 * row + 1], u[4 * row + 2], u[4 * row + 3]);
}

// Loads a bucket of n entries and pads it. `wide` says that it is whole rows of one tensor `t`, and aligned; others go
// through a lane's part of shared memory. Returns 0, or a NaN if something is not finite.
template <int ROWS>
__device__ __forceinline__ float load_bucket(const Segment& segment, const Tensor& t, i64 begin, int n, bool wide,
                                             float4* mine, float (&u)[4 * ROWS]) {
    int lane = threadIdx.x & 31, dtype = t.dtype;
    float decay = t.decay, bad = 0, wrong[4] = {0, 0, 0, 0};
    if (!wide) {
#pragma unroll 1
        for (int row = 0; row < ROWS; row++) {
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                x[k] = kInfinity;
                int i = 128 * row + 4 * lane + k;
                if (i >= n) continue;
                i64 at = begin + i;
                const Tensor& from = tensor_at(segment, &at);
                x[k] = load(from.gradient, at, dtype);
                bad = __fmaf_rn(x[k], 0.0f, bad);
                if (!from.before) continue;
                float e = from.before[at];
                bad = __fmaf_rn(e, 0.0f, bad);
                x[k] = compensated(x[k], e, from.decay);
            }
            mine[32 * row] = make_float4(x[0], x[1], x[2], x[3]);
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float4 v = mine[32 * row];
            u[4 * row] = v.x, u[4 * row + 1] = v.y, u[4 * row + 2] = v.z, u[4 * row + 3] = v.w;
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
    if (!t.before) {
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            if (128 * row < n)
                for (int k = 0; k < 4; k++) wrong[k] = __fmaf_rn(u[4 * row + k], 0.0f, wrong[k]);
        return (wrong[0] + wrong[1]) + (wrong[2] + wrong[3]);
    }
    // Nothing is used before some rows of the memory are on their way, or each row would wait for the one before.
    const int kAhead = ROWS > 4 ? 2 : 4;  // as many as there are registers for
    const float4* before = reinterpret_cast<const float4*>(t.before + begin) + lane;
#pragma unroll
    for (int top = 0; top < ROWS; top += kAhead) {
        float4 rows[kAhead];
#pragma unroll
        for (int r = 0; r < kAhead; r++) {
            rows[r] = make_float4(0, 0, 0, 0);
            if (128 * (top + r) < n) rows[r] = before[32 * (top + r)];
        }
#pragma unroll
        for (int r = 0; r < kAhead; r++) {
            int row = top + r;
            if (128 * row >= n) continue;
            float e[4] = {rows[r].x, rows[r].y, rows[r].z, rows[r].w};
            for (int k = 0; k < 4; k++) {
                wrong[k] = __fmaf_rn(u[4 * row + k], 0.0f, wrong[k]);
                wrong[k] = __fmaf_rn(e[k], 0.0f, wrong[k]);
                u[4 * row + k] = compensated(u[4 * row + k], e[k], decay);
            }
        }
    }
    return (wrong[0] + wrong[1]) + (wrong[2] + wrong[3]);
}
