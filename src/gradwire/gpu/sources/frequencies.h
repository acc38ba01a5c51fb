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
    // One after the other, 1 is taken from the largest, the first of equals. In the end all are at most `level`, the least
    // that does not take too much, and of those that reach it the first ones have given one more.
    if (missing < 0) {
        u32 level = 0;
        u64 excess = u64(-missing), taken;
        for (u32 by = 1u << precision; by; by >>= 1) {
            u64 cost;
            block_scan(f >= level + by ? f - (level + by - 1) : 0, &cost);  // what limiting all to level + by − 1 takes
            if (cost > excess) level += by;
        }
        block_scan(f > level ? f - level : 0, &taken);
        u64 reach, rank = block_scan(f >= level, &reach);
        u32 limited = f < level ? f : level;
        f = f >= level && rank < excess - taken ? limited - 1 : limited;
    }
    frequencies[s] = f;
    __syncthreads();
}
