// Whether a tensor has an entry that is not zero: of nearly all gradients the first few tell.
#pragma once
#include "jobs.h"

// The same for all threads of a block of 256. Entries have 2 or 4 bytes.
__device__ __forceinline__ bool has_nonzero(const void* at, i64 count, bool wide) {
    int any = 0;
    for (i64 base = 0; base < count; base += 4096) {
        for (i64 i = base + threadIdx.x; i < base + 4096 && i < count; i += 256)
            any |= wide ? (static_cast<const u32*>(at)[i] & 0x7fffffffu) != 0
                        : (static_cast<const u16*>(at)[i] & 0x7fffu) != 0;
        any = __syncthreads_or(any);
        if (any) break;
    }
    return any != 0;
}
