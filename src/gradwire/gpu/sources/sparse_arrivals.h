// A sparse frame that has arrived: what its kernels keep in `Arrival.own`.
#pragma once
#include "arrivals.h"
#include "gaps.h"

const int kGapChunk = 2048;   // gaps that a block decodes at a time
const int kSparseTile = 4096;   // entries of a tile of the mean

struct GapChunk {
    u64 bits;                 // how many low bits come before it
    u64 first;                // entries of the tensor before it
};

struct SparseArrival {
    u32 count;                // entries that are sent
    int kind, m;
    u32 blocks_done, sound;   // sound: 1 when lengths are right, 2 when positions are
    u32 spare;
    u64 low_bytes;
};

__device__ __forceinline__ SparseArrival& sparse_of(const Arrival& arrival) {
    return *reinterpret_cast<SparseArrival*>(arrival.own);
}

// The arrays behind it; sparse.py knows how much room they take.
__device__ __forceinline__ GapChunk* chunks_of(const Arrival& arrival) {
    return reinterpret_cast<GapChunk*>(arrival.own + 64);
}
__device__ __forceinline__ u32* positions_of(const Arrival& arrival) {
    return reinterpret_cast<u32*>(chunks_of(arrival) + (arrival.most + kGapChunk - 1) / kGapChunk);
}
__device__ __forceinline__ float* values_of(const Arrival& arrival) {
    return reinterpret_cast<float*>(positions_of(arrival) + arrival.most);
}
// The first entry of each tile, and at the end the number of all.
__device__ __forceinline__ u32* firsts_of(const Arrival& arrival) {
    return reinterpret_cast<u32*>(values_of(arrival) + arrival.most);
}
