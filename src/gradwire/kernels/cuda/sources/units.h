// Entries in units of 1024, one for each warp. A unit puts what it keeps, in order, at the front of its own place in a
// staging area, and says how many that are; when these numbers have been summed up (units.cu), every unit knows where
// its entries go in the result, and copies them there. So results are in order without any warp waiting for another.
#pragma once
#include "common.h"

const int kUnit = 1024;

__device__ __forceinline__ i64 unit_of_warp() { return (i64(blockIdx.x) * blockDim.x + threadIdx.x) >> 5; }

__device__ __forceinline__ int lane_of_thread() { return threadIdx.x & 31; }

__device__ __forceinline__ u32 lanes_below() { return (1u << (threadIdx.x & 31)) - 1; }

__device__ __forceinline__ i64 thread_of_grid() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ __forceinline__ i64 threads_of_grid() { return i64(gridDim.x) * blockDim.x; }

__device__ __forceinline__ bool aligned16(const void* p) { return !(reinterpret_cast<u64>(p) & 15); }

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// N = 4 or 8 entries from i on; zeros beyond the last. `whole` says that loads of 16 bytes are possible here.
template <int N>
__device__ __forceinline__ void load_entries(const float* from, i64 i, i64 count, bool whole, float (&x)[N]) {
    if (whole && i + N <= count) {
        for (int k = 0; k < N; k += 4) {
            float4 four = *reinterpret_cast<const float4*>(from + i + k);
            x[k] = four.x;
            x[k + 1] = four.y;
            x[k + 2] = four.z;
            x[k + 3] = four.w;
        }
    } else {
        for (int k = 0; k < N; k++) x[k] = i + k < count ? from[i + k] : 0.0f;
    }
}

template <int N>
__device__ __forceinline__ void store_entries(float* to, i64 i, i64 count, bool whole, const float (&x)[N]) {
    if (whole && i + N <= count) {
        for (int k = 0; k < N; k += 4)
            *reinterpret_cast<float4*>(to + i + k) = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
    } else {
        for (int k = 0; k < N; k++)
            if (i + k < count) to[i + k] = x[k];
    }
}

// Puts the words of a warp that are kept behind the `filled` ones before them, in the order of lanes; `local` is the
// place of a lane's first word within its unit. Returns how many there are now.
template <int N>
__device__ __forceinline__ u32 stage(const u32 (&words)[N], const bool (&kept)[N], u32 local, u32 filled, u32* values,
                                     u16* locals) {
    u32 votes[N], at = filled, below = lanes_below();
    for (int k = 0; k < N; k++) {
        votes[k] = __ballot_sync(~0u, kept[k]);
        at += __popc(votes[k] & below);
        filled += __popc(votes[k]);
    }
    for (int k = 0; k < N; k++)
        if (kept[k]) {
            values[at] = words[k];
            locals[at] = u16(local + k);
            at++;
        }
    return filled;
}

// How many entries a unit has in the result, given where each unit begins there.
__device__ __forceinline__ u32 length_of(const u32* starts, i64 unit, i64 units, const i64* total) {
    return u32((unit + 1 < units ? i64(starts[unit + 1]) : *total) - starts[unit]);
}
