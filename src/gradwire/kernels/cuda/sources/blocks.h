// Blocks of words: their bits in a bitmap, and their cells in a sketch (docs/homomorphic.md). Numbers of lanes are powers
// of two.
#pragma once
#include "units.h"

const u32 kGolden = 0x9e3779b9u, kOther = 0x85ebca6bu;

__device__ __forceinline__ u32 block_of(i64 position, i64 lanes) {
    return u32(u64(position) >> (__ffs(int(lanes)) - 1));
}

// A word of a bitmap, without the bits of blocks that there are not.
__device__ __forceinline__ u32 bits_below(const u32* bitmap, i64 word, i64 blocks) {
    i64 rest = blocks - word * 32;
    if (rest <= 0) return 0;
    return rest >= 32 ? bitmap[word] : bitmap[word] & ((1u << rest) - 1);
}

// How many words the blocks of these bits have; the last block of a message may have less than the others.
__device__ __forceinline__ u32 words_marked(u32 bits, i64 word, i64 blocks, i64 words, i64 lanes) {
    u32 count = __popc(bits) * u32(lanes);
    i64 last = blocks - 1 - word * 32;
    if (last >= 0 && last < 32 && bits >> last & 1) count -= u32(blocks * lanes - words);
    return count;
}

struct Hashes {
    u32 key, added, starts, segment_log;

    __device__ __forceinline__ Hashes(i64 segments, i64 segment_log, i64 seed) {
        key = mix(u32(seed) ^ kGolden);
        added = mix(key + kOther);
        starts = u32(segments - 3);
        this->segment_log = u32(segment_log);
    }

    __device__ __forceinline__ void cells_of(u32 block, u32 (&cells)[4]) const {
        u32 x = mix(block ^ key) + added, low = (1u << segment_log) - 1;
        u32 start = __umulhi(mix(x), starts), b = mix(x ^ kGolden), c = mix(x + kOther);
        cells[0] = (start << segment_log) + (b & low);
        cells[1] = ((start + 1) << segment_log) + (b >> 16 & low);
        cells[2] = ((start + 2) << segment_log) + (c & low);
        cells[3] = ((start + 3) << segment_log) + (c >> 16 & low);
    }
};
