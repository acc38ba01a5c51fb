// Which of several tensors have an entry that is not zero: of nearly all gradients the first few tell.
#include "jobs.h"

struct Span {
    const void* at;
    i64 count;
    i64 itemsize;  // 2 or 4
};

// One block of 256 threads for each tensor.
extern "C" __global__ void find_nonzero(const Span* spans, u8* found) {
    Span span = spans[blockIdx.x];
    int any = 0;
    for (i64 base = 0; base < span.count; base += 4096) {
        for (i64 i = base + threadIdx.x; i < base + 4096 && i < span.count; i += 256)
            any |= span.itemsize == 4 ? (static_cast<const u32*>(span.at)[i] & 0x7fffffffu) != 0
                                      : (static_cast<const u16*>(span.at)[i] & 0x7fffu) != 0;
        any = __syncthreads_or(any);
        if (any) break;
    }
    if (!threadIdx.x) found[blockIdx.x] = u8(any != 0);
}
