// What the kernels that make sparse frames know about a tensor, and tell each other.
#pragma once
#include "gaps.h"

// A block of `gather` has half a tile of the layout, so that others load while it writes; a group is what it is there.
const int kTile = 4096, kGroup = 16, kPart = 1024, kSample = 65536;  // of smaller tensors than that, the sample is all
const int kRun = 4, kRuns = 4096, kSampled = kRun * kRuns;  // it consists of short runs: clusters must not mislead it
const int kLevels = 3;  // the 31 bits of a magnitude, where all entries are looked at in three steps
__constant__ int kShift[kLevels] = {19, 9, 0}, kWidth[kLevels] = {4096, 1024, 512};
const int kFirst = 4096;  // buckets of the first step, for each side
const int kFine = 512;  // buckets between the magnitudes that the k-th is expected between, for each side
const int kChunk = 2048;  // positions that a block codes at a time
const int kClasses = 128;  // more than there are for gaps below 2^31
const u32 kMagnitude = 0x7fffffffu;

enum { HEAD = 0, HOW_LONG = 1, CLASSES = 2, LOW_BITS = 3, VALUES = 4 };  // pieces of the frame

struct Format {  // of `Tensor.format`
    int kind;
    int sides;  // 2: positive and negative entries are chosen apart (SBC)
};

struct Plan {  // at `Tensor.step_at`: what the host knows about the tensor
    i64 room, doubtful;  // candidates, and doubtful ones of them, that there is room for
    u64 parts, tiles, counts, group_counts, sums, doubts, chunks, values, positions, sent;  // arrays in `Tensor.own`
};

struct Tile {
    u32 start, found;  // its candidates
};

struct Chunk {
    u64 start;  // of its low bits
    u32 bits[4];  // how many there are for each m
};

struct Doubt {  // a candidate of which only the exact k-th magnitude tells whether it is sent
    u32 bits, position;
};

struct Selection {  // at `Tensor.own`; of each side, the positive entries (or all) and the negative ones
    u32 least[2];  // from this bit pattern on an entry is a candidate
    u32 upto[2];  // candidates below it are counted, in buckets of 2^shift bit patterns
    u32 shift[2];
    u32 found, negative;  // candidates, and how many of them are negative
    u32 doubts;
    u32 open[2], prefix[2], rank[2];  // while all entries are looked at: the k-th's highest bits, and its rank there
    u32 kth[2], ties[2];  // the k-th magnitude, and how many of those equal to it are sent
    u32 side, sent;
    float value;  // where all sent entries have the same magnitude
    int m;
    u32 spare[5];  // so that the histogram begins at a multiple of 16 bytes
    u32 classes[kClasses];
    u32 histogram[2 * kFine];
};

__device__ __forceinline__ Selection& selection_of(const Tensor& t) { return *static_cast<Selection*>(t.own); }
__device__ __forceinline__ const Plan& plan_of(const Tensor& t) { return *reinterpret_cast<const Plan*>(t.step_at); }
// Entries to send at most: in a warm-up, another number in every message.
__device__ __forceinline__ i64 wanted_of(const Tensor& t) { return i64(t.seed); }
__device__ __forceinline__ const Format& format_of(const Tensor& t) { return *static_cast<const Format*>(t.format); }
template <typename T>
__device__ __forceinline__ T* array_at(const Tensor& t, u64 offset) {
    return reinterpret_cast<T*>(static_cast<u8*>(t.own) + offset);
}
__device__ __forceinline__ int tiles_of(const Tensor& t) { return int((t.count + kTile - 1) / kTile); }
__device__ __forceinline__ int groups_of(const Tensor& t) { return (tiles_of(t) + kGroup - 1) / kGroup; }
// Candidates of each tile above the k-th magnitude (<< 32) and those equal to it. Neither number reaches 2^32.
__device__ __forceinline__ u64* counts_of(const Tensor& t, int side) {
    return array_at<u64>(t, plan_of(t).counts) + i64(side) * tiles_of(t);
}
// The same of each group of tiles; then, of all groups before it.
__device__ __forceinline__ u64* group_counts_of(const Tensor& t, int side) {
    return array_at<u64>(t, plan_of(t).group_counts) + i64(side) * groups_of(t);
}
// The sum of the magnitudes in each group that are sent without a doubt.
__device__ __forceinline__ double* sums_of(const Tensor& t, int side) {
    return array_at<double>(t, plan_of(t).sums) + i64(side) * groups_of(t);
}
