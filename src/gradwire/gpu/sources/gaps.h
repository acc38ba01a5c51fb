// What sparse frames are made of: kinds of values, and classes of gaps.
#pragma once
#include "common.h"

enum { ONE_VALUE = 0, ONE_MAGNITUDE = 1, AS_FP32 = 2, AS_FP16 = 3, AS_BF16 = 4 };  // how values travel, as on the wire

// The class of a gap, and how many low bits it leaves open.
__device__ __forceinline__ u32 class_of(u32 gap, int m, int* low) {
    *low = 0;
    if (gap >> m == 0) return gap;
    *low = 31 - __clz(int(gap)) - m;
    return (u32(*low) << m) + (gap >> *low);
}
