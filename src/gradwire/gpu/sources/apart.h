// The outliers of an arrived grid frame, in the scratch of the arrival.
//
// Their codes have no marks between them, so that many threads have to find out where codes begin: each takes a piece
// of the bits and begins at its first bit, which is wrong for most, but wrong starts run into right ones after a few
// codes. Where a piece ends is where the next begins: this is repeated until nothing changes (outliers.cu).
#pragma once
#include "arrivals.h"

const u64 kPieceBits = 256;
const int kBucket = 4096;  // entries of the frame for each place of the index
const u32 kApart = 255;  // the symbol that marks an outlier; no grid has so many

struct CodePiece {  // of the bits of all codes
    u64 entry, exit, first_exit;  // where its first code begins, and the first code behind it; as found at first
    u64 span;  // entries up to its last outlier, then those before its first
    u32 count, rank;  // its outliers, and how many come before
};

struct Listed {
    u32 position;  // in the frame
    float level;  // what it stands for at step 1
};

struct Apart {
    const u8* codes;
    u64 count, bits;  // outliers; bits of their codes
    u32 pieces;
    int a, b, largest, offset_count, spare;
    float offsets[16];
};

__device__ __forceinline__ u64 room_apart(i64 count) { return 16 + u64(count) / 16; }

__device__ __forceinline__ Apart& apart_of(const Arrival& arrival) { return *reinterpret_cast<Apart*>(arrival.own); }

__device__ __forceinline__ Listed* listed_of(const Arrival& arrival) {
    return reinterpret_cast<Listed*>(arrival.own + 256);
}

// Which outlier is the first in each bucket.
__device__ __forceinline__ u32* index_of(const Arrival& arrival) {
    return reinterpret_cast<u32*>(listed_of(arrival) + room_apart(arrival.count));
}

__device__ __forceinline__ u64 buckets_of(const Arrival& arrival) { return (u64(arrival.count) / kBucket / 2 + 2) * 2; }

__device__ __forceinline__ CodePiece* pieces_of(const Arrival& arrival) {
    return reinterpret_cast<CodePiece*>(index_of(arrival) + buckets_of(arrival));
}

// Bytes of a list that there is room for.
__device__ __forceinline__ u64 code_room(i64 count) { return 64 + 8 * room_apart(count); }
