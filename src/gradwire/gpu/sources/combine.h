// What kernels share that make the mean of all ranks: one block of 256 threads for each tile of 4096 entries.
//
// Where things are is read by many lookups, each of which has to wait for the one before. So a block looks up several
// ranks at once, a thread for each, and loads the symbols of the next rank before it uses those of this one.
#pragma once
#include "arrivals.h"

const int kCombined = 4096;  // entries of a tile
const int kAtOnce = 8;       // ranks that are looked up together

template <int DTYPE>
__device__ __forceinline__ float rounded_to(float x) {
    return DTYPE == FP16 ? half_to_float(float_to_half(x)) : DTYPE == BF16 ? bf16_to_float(float_to_bf16(x)) : x;
}

// What is left of a tensor from a tile on, at most a tile.
__device__ __forceinline__ int entries_of(const Target& target, i64 tile) {
    i64 left = target.count - tile * kCombined;
    return left < kCombined ? int(left) : kCombined;
}

__device__ __noinline__ u32 word_at(const u8* symbols, int at, int count) {
    u32 word = 0;
    for (int k = 0; k < 4; k++)
        if (at + k < count) word |= u32(symbols[at + k]) << 8 * k;
    return word;
}

// A thread's symbols of a tile of `count` entries: four from 4·thread on, and from every 1024 behind it; 0 beyond the end.
__device__ __forceinline__ void symbols_of_tile(const u8* symbols, int count, u32* mine) {
    int at = 4 * threadIdx.x;
    bool whole = count == kCombined && !((u64)(symbols) & 3);
#pragma unroll
    for (int h = 0; h < 4; h++)
        mine[h] = whole ? *reinterpret_cast<const u32*>(symbols + at + 1024 * h)
                        : word_at(symbols, at + 1024 * h, count);
}

// What a thread's sixteen entries of a tile hold before they are summed: those of the target if `adds`, and else zero.
template <int DTYPE>
__device__ __forceinline__ void sums_before(const Target& target, i64 tile, int count, bool adds, float* sum) {
    int at = 4 * threadIdx.x;
#pragma unroll
    for (int q = 0; q < 16; q++) sum[q] = 0;
    if (!adds) return;
#pragma unroll
    for (int q = 0; q < 16; q++) {
        int i = at + 1024 * (q >> 2) + (q & 3);
        if (i < count) sum[q] = load(target.out, tile * kCombined + i, DTYPE);
    }
}

// Writes what a thread has summed up.
template <int DTYPE>
__device__ __forceinline__ void put_sums(const Target& target, i64 tile, int count, const float* sum) {
    int at = 4 * threadIdx.x;
    if (DTYPE == FP32 && count == kCombined && !((u64)(target.out) & 15)) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(target.out) + tile * kCombined) + threadIdx.x;
#pragma unroll
        for (int h = 0; h < 4; h++)
            out[256 * h] = make_float4(sum[4 * h], sum[4 * h + 1], sum[4 * h + 2], sum[4 * h + 3]);
        return;
    }
    float* floats = static_cast<float*>(target.out) + tile * kCombined;
    u16* halves = static_cast<u16*>(target.out) + tile * kCombined;
#pragma unroll
    for (int q = 0; q < 16; q++) {
        int i = at + 1024 * (q >> 2) + (q & 3);
        if (i >= count) continue;
        if (DTYPE == FP32)
            floats[i] = sum[q];
        else
            halves[i] = DTYPE == FP16 ? float_to_half(sum[q]) : float_to_bf16(sum[q]);
    }
}
