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
    // One after the other, 1 is taken from the largest, the first of equals; as long as it stays the largest, at once.
    for (i64 excess = -missing; excess > 0;) {
        __shared__ u32 taken;
        if (s < 32) {
            u32 best = 0, second = 0;  // the largest of this lane, and the largest of the others
            int at = 0, second_at = 0;
            for (int j = s; j < alphabet; j += 32) {
                u32 f_j = frequencies[j];
                if (f_j > best)
                    second = best, second_at = at, best = f_j, at = j;
                else if (f_j > second)
                    second = f_j, second_at = j;
            }
            for (int by = 16; by; by >>= 1) {
                u32 other = __shfl_xor_sync(~0u, best, by), other_second = __shfl_xor_sync(~0u, second, by);
                int other_at = __shfl_xor_sync(~0u, at, by), other_second_at = __shfl_xor_sync(~0u, second_at, by);
                bool theirs = other > best || (other == best && other_at < at);
                u32 loser = theirs ? best : other, seconds = theirs ? other_second : second;
                int loser_at = theirs ? at : other_at, seconds_at = theirs ? other_second_at : second_at;
                if (theirs) best = other, at = other_at;
                bool loser_wins = loser > seconds || (loser == seconds && loser_at < seconds_at);
                second = loser_wins ? loser : seconds;
                second_at = loser_wins ? loser_at : seconds_at;
            }
            // It is the largest as long as it is above the second, and also when it is equal and comes first.
            u32 room = best - second + (at < second_at ? 1 : 0);
            room = room ? room : 1;
            if (!s) {
                taken = u32(excess < i64(room) ? excess : i64(room));
                frequencies[at] = best - taken;
            }
        }
        __syncthreads();
        excess -= taken;
        __syncthreads();
    }
}
