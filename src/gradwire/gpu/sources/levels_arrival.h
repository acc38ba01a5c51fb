// What the host expects of a frame of levels, from which the kernels know where the numbers of each bucket are.
#pragma once
#include "arrivals.h"

struct LevelsPart {       // of a tensor
    i64 position;         // of its first entry in its segment
    i64 length;           // of the segment
    i64 numbers;          // bytes of numbers in front of those of the segment
};

struct LevelsPlan {       // `Arrival.own`; levels.py makes it
    i64 numbers_bytes;
    int levels, kind, precision;
    int bucket_bits;      // log2 of the entries in a bucket
    i64 side_length;
    __device__ __forceinline__ const u8* side() const {
        return reinterpret_cast<const u8*>(this + 1);
    }  // what the payload begins with
    // Behind the side information, at a multiple of 8 bytes.
    __device__ __forceinline__ const LevelsPart* parts() const {
        return reinterpret_cast<const LevelsPart*>(side() + (side_length + 7) / 8 * 8);
    }
};
