// Counts of small alphabets, which conversions keep in registers.
#pragma once
#include "common.h"

// How often each symbol comes, of one thread: 4 bits for each of up to 16 symbols, moved to 8 bits before they overflow.
struct FewCounts {
    u64 low, even, odd;
    __device__ __forceinline__ void add(u32 symbol) { low += u64(1) << 4 * symbol; }
    __device__ __forceinline__ void widen() {
        const u64 mask = 0x0f0f0f0f0f0f0f0full;
        even += low & mask;
        odd += low >> 4 & mask;
        low = 0;
    }
    __device__ __forceinline__ u32 of(int symbol) const {
        return u32((symbol & 1 ? odd : even) >> 8 * (symbol >> 1)) & 255;
    }
};
