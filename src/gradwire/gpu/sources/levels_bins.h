// How the entries of a bucket are spread over its range: where a search for levels begins.
#pragma once
#include "levels_load.h"
#include "warp_sums.h"

__device__ __forceinline__ u32 one_in_byte(u32 k) {  // of the four in turn
#ifdef GRADWIRE_ON_CPU
    return 1u << 8 * (k & 3);
#else
    u32 x;
    asm("shf.l.wrap.b32 %0, 0, 1, %1;" : "=r"(x) : "r"(8 * k));
    return x;
#endif
}

// Counts of a warp's entries in equal parts of their range. Every lane has a byte for each part, four of them in a word,
// so that no two lanes ever add to the same word, or to words of the same bank.
template <int N>
struct Bins {
    static const int kRows = N > 32 ? 64 : 32, kNumber = 4 * kRows, kEach = kNumber / 32;
    uint4 words[8 * kRows];

    // Counts an entry in the part that it is in, or the last one. Integers from 2^23 on stand as they are in a float's
    // lowest bits.
    static __device__ __forceinline__ void add(u32* of_lane, float part) {
        u32 bin = __float_as_uint(__fadd_rd(fminf(part, float(kNumber - 1)), 8388608.0f));
        atomicAdd(&of_lane[(bin & (kNumber - 4)) << 3], one_in_byte(bin));
    }

    // Counts x − least, from 0 to `range`; then mine[j] is the count of part lane·kEach + j. What is not finite counts
    // in the last part.
    __device__ __forceinline__ void count(const float (&x)[N], float least, float range, u32* mine) {
        int lane = threadIdx.x & 31;
        u32* all = reinterpret_cast<u32*>(words);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kRows / 4; k++) words[32 * k + lane] = make_uint4(0, 0, 0, 0);
        __syncwarp();
        // In two steps where the reciprocal of a tiny range is beyond fp32.
        const float up = 1.8446744073709552e19f;
        if (range < 1e-30f) {
            float scale = float(kNumber) * 0.99999f / (range * up);
#pragma unroll
            for (int q = 0; q < N; q++) add(all + lane, (x[q] - least) * up * scale);
        } else {
            float scale = float(kNumber) * 0.99999f / range;
#pragma unroll
            for (int q = 0; q < N; q++) add(all + lane, (x[q] - least) * scale);
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < kEach / 4; r++) {
            u32 even = 0, odd = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                uint4 four = words[8 * (lane * (kEach / 4) + r) + ((j + lane) & 7)];
                u32 a = four.x + four.y, b = four.z + four.w;
                if (N <= 32) {
                    a += b;
                } else {
                    even += b & 0x00ff00ffu;
                    odd += b >> 8 & 0x00ff00ffu;
                }
                even += a & 0x00ff00ffu;
                odd += a >> 8 & 0x00ff00ffu;
            }
            mine[4 * r] = even & 0xffff, mine[4 * r + 1] = odd & 0xffff;
            mine[4 * r + 2] = even >> 16, mine[4 * r + 3] = odd >> 16;
        }
        __syncwarp();
    }

    // In the place of the counts: how many entries come before each part, and at the end all.
    __device__ __forceinline__ const u32* upto(const u32* mine) {
        int lane = threadIdx.x & 31;
        u32* sums = reinterpret_cast<u32*>(words);
        u32 all = 0;
#pragma unroll
        for (int j = 0; j < kEach; j++) all += mine[j];
        u32 before = warp_scan(all) - all;
#pragma unroll
        for (int j = 0; j < kEach; j++) {
            sums[lane * kEach + j] = before;
            before += mine[j];
        }
        if (lane == 31) sums[kNumber] = before;
        __syncwarp();
        return sums;
    }
};
