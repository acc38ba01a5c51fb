// Numbers, sums over a block, and the generator of docs/wire-format.md.
#pragma once
#include "jobs.h"

const float kFloatMax = 3.4028234663852886e38f;

#ifndef GRADWIRE_ON_CPU
__device__ __forceinline__ float half_to_float(u16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
__device__ __forceinline__ u16 float_to_half(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
#endif

// A store to the device's memory, if `wanted`. It is no branch, and the compiler need not keep it in order with loads
// from shared memory: a coder would otherwise wait at every byte that it writes.
template <int OFFSET>
__device__ __forceinline__ void store_byte_if(bool wanted, u8* at, u32 x) {
#ifdef GRADWIRE_ON_CPU
    if (wanted) at[OFFSET] = u8(x);
#else
    asm volatile("{ .reg .pred wanted; setp.ne.u32 wanted, %2, 0; @wanted st.global.u8 [%0+%3], %1; }" ::"l"(at),
                 "r"(x), "r"(u32(wanted)), "n"(OFFSET));
#endif
}

// The same of two bytes, at an even address.
__device__ __forceinline__ void store_pair(u8* at, u32 x) {
#ifdef GRADWIRE_ON_CPU
    at[0] = u8(x), at[1] = u8(x >> 8);
#else
    asm volatile("{ .reg .b16 pair; cvt.u16.u32 pair, %1; st.global.u16 [%0], pair; }" ::"l"(at), "r"(x));
#endif
}

// The low half of a times the lowest byte of b, plus the high half of a times the byte after it, plus c.
__device__ __forceinline__ u32 dot_of_two(u32 a, u32 b, u32 c) {
#ifdef GRADWIRE_ON_CPU
    return (a & 65535) * (b & 255) + (a >> 16) * (b >> 8 & 255) + c;
#else
    u32 sum;
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#endif
}

__device__ __forceinline__ float bf16_to_float(u16 b) { return __uint_as_float(u32(b) << 16); }

__device__ __forceinline__ u16 float_to_bf16(float x) {  // of numbers that are not NaN
    u32 bits = __float_as_uint(x);
    return u16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Limits a number that is not NaN.
__device__ __forceinline__ float limited(float x, float most) { return fminf(fmaxf(x, -most), most); }

// The value that a receiver decodes: limited and rounded to the tensor's dtype.
__device__ __forceinline__ float received(float x, int dtype) {
    if (dtype == FP16) return half_to_float(float_to_half(limited(x, 65504.0f)));
    if (dtype == BF16) return bf16_to_float(float_to_bf16(limited(x, 3.3895313892515355e38f)));
    return limited(x, kFloatMax);
}

__device__ __forceinline__ float load(const void* tensor, i64 i, int dtype) {
    if (dtype == FP32) return static_cast<const float*>(tensor)[i];
    u16 bits = static_cast<const u16*>(tensor)[i];
    return dtype == FP16 ? half_to_float(bits) : bf16_to_float(bits);
}

// g + decay·e, each operation rounded. It is finite only if both are: what is limited does not tell, as a NaN is lost.
__device__ __forceinline__ float sum_of(float g, float e, float decay) { return __fadd_rn(g, __fmul_rn(e, decay)); }

// u = g + decay·e, within the range of fp32.
__device__ __forceinline__ float compensated(float g, float e, float decay) {
    return limited(sum_of(g, e, decay), kFloatMax);
}

__device__ __forceinline__ float compensated_at(const Tensor& t, i64 i) {
    float g = load(t.gradient, i, t.dtype);
    return t.before ? compensated(g, t.before[i], t.decay) : g;
}

__device__ __forceinline__ u32 mix(u32 x) {
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    return x ^ x >> 15;
}

// 24 random bits for entry i, as docs/wire-format.md defines them.
__device__ __forceinline__ u32 random24(u64 seed, u64 i) {
    u32 k1 = mix(u32(seed) ^ 0x9e3779b9u ^ mix(u32(i >> 32)));
    u32 k2 = mix(k1 ^ u32(seed >> 32));
    return mix(mix(u32(i) ^ k1) + k2) >> 8;
}

__device__ __forceinline__ double warp_sum(double x) {
    for (int by = 16; by; by >>= 1) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

__device__ __forceinline__ u32 warp_sum_u32(u32 x) {
    for (int by = 16; by; by >>= 1) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

// Inclusive sum over the lanes of a warp.
template <typename T>
__device__ __forceinline__ T warp_scan(T x) {
    int lane = threadIdx.x & 31;
    for (int by = 1; by < 32; by <<= 1) {
        T y = __shfl_up_sync(~0u, x, by);
        if (lane >= by) x += y;
    }
    return x;
}

// The sum over all threads of a block (whole warps, at most 32 of them), for thread 0; always in the same order.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double sums[32];
    x = warp_sum(x);
    __syncthreads();
    if (!(threadIdx.x & 31)) sums[threadIdx.x >> 5] = x;
    __syncthreads();
    double total = 0;
    if (!threadIdx.x)
        for (u32 w = 0; w < blockDim.x >> 5; w++) total += sums[w];
    return total;
}

// The sums of several numbers over a block of up to 16 warps, in `sums` (for all threads), always in the same order.
template <int N>
__device__ __forceinline__ void block_sums(const double* x, double* sums) {
    __shared__ double of_warps[16 * N];
    int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) {
        double sum = warp_sum(x[j]);
        if (!(threadIdx.x & 31)) of_warps[warp * N + j] = sum;
    }
    __syncthreads();
    if (threadIdx.x < N) {
        double sum = 0;
        for (int w = 0; w < warps; w++) sum += of_warps[w * N + threadIdx.x];
        sums[threadIdx.x] = sum;
    }
    __syncthreads();
}

// Exclusive sum over all threads of a block; `total` gets the whole.
__device__ __forceinline__ u64 block_scan(u64 x, u64* total) {
    __shared__ u64 sums[32];
    u64 inclusive = warp_scan(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 31) sums[threadIdx.x >> 5] = inclusive;
    __syncthreads();
    u64 before = 0, all = 0;
    for (u32 w = 0; w < blockDim.x >> 5; w++) {
        if (w < threadIdx.x >> 5) before += sums[w];
        all += sums[w];
    }
    *total = all;
    return before + inclusive - x;
}

// Sums of what comes before each of n items; every thread of the block has some that lie side by side.
template <typename Get, typename Put>
__device__ u64 scan_items(i64 n, Get get, Put put) {
    i64 per = (n + blockDim.x - 1) / blockDim.x, begin = per * threadIdx.x, end = begin + per < n ? begin + per : n;
    u64 sum = 0, total;
#pragma unroll 8
    for (i64 i = begin; i < end; i++) sum += get(i);
    u64 before = block_scan(sum, &total);
    for (i64 i = begin; i < end; i++) {
        u64 x = get(i);
        put(i, before);
        before += x;
    }
    __syncthreads();
    return total;
}

// Counts a finished block; true for all threads of the last one of `total`, which then sees what the others wrote.
__device__ __forceinline__ bool last_block(u32* done, u32 total) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (!threadIdx.x) last = atomicAdd(done, 1u) == total - 1;
    __syncthreads();
    __threadfence();
    return last;
}

__device__ __forceinline__ int put_varint(u8* out, u64 x) {
    int n = 0;
    while (x >= 128) {
        out[n++] = u8(x | 128);
        x >>= 7;
    }
    out[n++] = u8(x);
    return n;
}

__device__ __forceinline__ int varint_length(u64 x) {
    int n = 1;
    while (x >= 128) {
        x >>= 7;
        n++;
    }
    return n;
}
