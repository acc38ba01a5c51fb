// Numbers of entries become places: exclusive sums over all units (units.h), by one block.
#include "units.h"

const int kEach = 16;  // units of a thread at a time

extern "C" __global__ void sum_up(u32* counts, i64 units, i64* total) {
    u64 before = 0;
    for (i64 start = 0; start < units; start += i64(blockDim.x) * kEach) {
        i64 first = start + i64(threadIdx.x) * kEach;
        u32 own[kEach];
        u64 sum = 0, all;
        for (int k = 0; k < kEach; k++) {
            own[k] = first + k < units ? counts[first + k] : 0;
            sum += own[k];
        }
        u64 at = before + block_scan(sum, &all);
        for (int k = 0; k < kEach; k++) {
            if (first + k < units) counts[first + k] = u32(at);
            at += own[k];
        }
        before += all;
    }
    if (!threadIdx.x) *total = i64(before);
}
