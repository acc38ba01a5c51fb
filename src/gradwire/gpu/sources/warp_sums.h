// Sums over a warp that take one instruction where the GPU has it, or no fp64.
#pragma once
#include "common.h"

__device__ __forceinline__ u32 warp_total(u32 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_add_sync(~0u, x);
#else
    return warp_sum_u32(x);
#endif
}

__device__ __forceinline__ u32 warp_most(u32 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, x);
#else
    for (int by = 16; by; by >>= 1) x = max(x, __shfl_xor_sync(~0u, x, by));
    return x;
#endif
}

__device__ __forceinline__ u32 warp_least(u32 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_min_sync(~0u, x);
#else
    for (int by = 16; by; by >>= 1) x = min(x, __shfl_xor_sync(~0u, x, by));
    return x;
#endif
}

__device__ __forceinline__ float warp_sum_float(float x) {
    for (int by = 16; by; by >>= 1) x += __shfl_xor_sync(~0u, x, by);
    return x;
}
