// How the magnitudes of a frame's sample are spread: counts in narrow parts, 64 for each factor of two. From these the
// cells of any grid are counted without going through the sample again.
#pragma once
#include "grid_rate.h"

const int kFineBits = 17;             // of a float, within a part
const int kParts = 40 * 64;           // the last one has the largest magnitude; what is below all is in the first
const int kSearchers = 512;           // threads of a block that searches

struct Spread {
    u32 above[kParts + 1];            // entries in this part and those above; << 16: how many of them are negative
    u32 least[kParts], most[kParts];  // magnitudes in each part, as bits
    int base;                         // what the first part is called as the high bits of a float
};

// By all threads of a block: `get` returns an entry of the sample, of which there are `many`, and `top` has the bits of
// the largest magnitude.
template <typename Get>
__device__ __forceinline__ void spread_out(Spread& spread, int many, Get get, u32 top) {
    int tid = threadIdx.x, base = int(top >> kFineBits) - (kParts - 1);
    const int each = kParts / kSearchers;
    static_assert(each * kSearchers == kParts, "every thread adds up as many");
    for (int k = tid; k < kParts; k += kSearchers) spread.above[k] = 0, spread.least[k] = ~0u, spread.most[k] = 0;
    if (!tid) spread.above[kParts] = 0, spread.base = base;
    __syncthreads();
#pragma unroll 4
    for (int k = tid; k < many; k += kSearchers) {
        u32 bits = __float_as_uint(get(k)), magnitude = bits & 0x7fffffffu;
        if (!magnitude) continue;
        int part = max(int(magnitude >> kFineBits) - base, 0);
        atomicAdd(&spread.above[part], 1u | bits >> 31 << 16);
        atomicMin(&spread.least[part], magnitude);
        atomicMax(&spread.most[part], magnitude);
    }
    __syncthreads();
    u32 sum = 0;  // from the last part down
    for (int k = 0; k < each; k++) sum += spread.above[kParts - 1 - (tid * each + k)];
    u64 all, before = block_scan(sum, &all);
    sum = u32(before);
    for (int k = 0; k < each; k++) {
        u32& here = spread.above[kParts - 1 - (tid * each + k)];
        here = sum += here;
    }
    __syncthreads();
}

// How many entries are at `edge` or above, and << 16 how many of them are negative. Within a part they are taken to be
// evenly spread between its least and its largest one.
__device__ __forceinline__ u32 at_or_above(const Spread& spread, float edge) {
    u32 bits = __float_as_uint(edge);
    int part = max(int(bits >> kFineBits) - spread.base, 0);
    if (part >= kParts) return 0;
    u32 here = spread.above[part], beyond = spread.above[part + 1], within = here - beyond;
    u32 least = spread.least[part], most = spread.most[part];
    if (bits <= least) return here;
    if (bits > most) return beyond;
    float number = float(within & 0xffff), share = float(most - bits) / float(most - least);
    float reached = 1 + rintf(share * (number - 2)), negative = rintf(float(within >> 16) * (reached / number));
    return beyond + u32(reached) + (u32(negative) << 16);
}

// Counts the cells of a grid, by a warp.
__device__ __forceinline__ void count_cells(const Spread& spread, float step, float shift, Cells* cells) {
    int lane = threadIdx.x & 31;
    u32 above[5];
#pragma unroll
    for (int k = 0; k < 4; k++)
        above[k] = at_or_above(spread, __fmul_rn(__fsub_rn(float(32 * k + lane + 1), shift), step));
    above[4] = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 next = __shfl_down_sync(~0u, above[k], 1), first = __shfl_sync(~0u, above[k + 1], 0);
        u32 within = above[k] - (lane < 31 ? next : first), j = u32(32 * k + lane);
        if (j < kCells) cells[j] = (within & 0xffff) - (within >> 16), cells[128 + j] = within >> 16;
        if (j == kCells) cells[kCells] = above[k] & 0xffff;  // all beyond
    }
    __syncwarp();
}

// The squared error of a grid, in units of the squared step. By a warp.
__device__ __noinline__ float error_of(const Spread& spread, float step, float shift) {
    int lane = threadIdx.x & 31;
    float error = 0, excess[2] = {0, 0};
    u32 number[2] = {0, 0};
    for (int part = lane; part < kParts; part += 32) {
        u32 n = (spread.above[part] - spread.above[part + 1]) & 0xffff;
        if (!n) continue;
        float least = __fdiv_rn(__uint_as_float(spread.least[part]), step);
        float most = __fdiv_rn(__uint_as_float(spread.most[part]), step);
        float middle = 0.5f * least + 0.5f * most, width = most - least, m = magnitude_of(middle, shift);
        float left = middle - m;
        if (m > kCells || width > 1) {
            error += float(n) / 12;  // evenly spread
            continue;
        }
        error += float(n) * (left * left + (n > 2 ? width * width / 12 : n > 1 ? width * width / 4 : 0.0f));
        if (m > 0) excess[m > 1] += float(n) * left, number[m > 1] += n;
    }
    error = warp_sum_float(error);
    for (int k = 0; k < 2; k++) {  // every magnitude is where its entries are in the mean
        float sum = warp_sum_float(excess[k]), n = float(warp_total(number[k]));
        if (n > 0) error -= sum * sum / n;
    }
    return fmaxf(error, 1e-30f);
}
