// Frequencies that add up to 2^precision, as docs/wire-format.md defines them: for encoders and decoders alike.
#pragma once
#include "common.h"

// By all threads of a block of 256, one symbol each. As docs/wire-format.md says.
__device__ void normalize(const u64* counts, u32* frequencies, int alphabet, int precision) {
    __shared__ u64 remainder[kSymbols];
    __shared__ u64 total;
    __shared__ i64 missing;
    int s = threadIdx.x;
    u64 all;
    block_scan(s < alphabet ? counts[s] : 0, &all);
    if (!s) total = all;
    __syncthreads();
    u64 count = s < alphabet ? counts[s] : 0, scaled = count << precision, floor = scaled / total;
    u32 f = count ? (floor ? u32(floor) : 1u) : 0u;
    // One is added, so that 0 stands for those that are left out.
    remainder[s] = count && floor ? scaled % total + 1 : 0;
    u64 sum;
    block_scan(f, &sum);
    if (!s) missing = (i64(1) << precision) - i64(sum);
    __syncthreads();
    if (missing > 0) {
        // The rank among the remainders, the first of equals first.
        int rank = 0;
        u64 mine = remainder[s];
        for (int j = 0; j < alphabet; j++) rank += remainder[j] > mine || (remainder[j] == mine && j < s);
        if (s < alphabet && rank < missing) f++;
    }
    frequencies[s] = f;
    __syncthreads();
    for (i64 k = missing; k < 0; k++) {  // 1 is taken from the largest, the first of equals
        if (s < 32) {
            u32 best = 0;
            int at = 0;
            for (int j = s; j < alphabet; j += 32)
                if (frequencies[j] > best) best = frequencies[j], at = j;
            for (int by = 16; by; by >>= 1) {
                u32 other = __shfl_xor_sync(~0u, best, by);
                int other_at = __shfl_xor_sync(~0u, at, by);
                if (other > best || (other == best && other_at < at)) best = other, at = other_at;
            }
            if (!s) frequencies[at]--;
        }
        __syncthreads();
    }
}
