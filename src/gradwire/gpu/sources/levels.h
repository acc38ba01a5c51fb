// A few levels in each bucket of entries (codec 4): the levels, the symbols and the new error memory in one pass.
//
// A warp takes a bucket and has all its entries in registers while it looks for levels, so that gradient and memory are
// read once. Then they wait in shared memory until it is their turn to be converted: the fewer registers a warp needs,
// the more warps work while others wait.
#pragma once
#include "levels_fit.h"

const int kFew = 9;

__device__ __forceinline__ u32 one_at(u32 bit) {  // 0 beyond the highest
#ifdef GRADWIRE_ON_CPU
    return bit < 32 ? 1u << bit : 0;
#else
    u32 x;
    asm("shl.b32 %0, 1, %1;" : "=r"(x) : "r"(bit));
    return x;
#endif
}

// How often each of the first eight symbols comes, of one thread and up to 255 of them: 4 bits for each, moved to 8 bits
// before they overflow. What is not counted here is the ninth.
struct FewCounts {
    u32 low, even, odd;
    __device__ __forceinline__ void add(u32 four_times_symbol) { low += one_at(four_times_symbol); }
    __device__ __forceinline__ void widen() {
        even += low & 0x0f0f0f0fu;
        odd += low >> 4 & 0x0f0f0f0fu;
        low = 0;
    }
    // Adds what a warp has counted to `counts`, begins again, and returns how many there were.
    __device__ __forceinline__ u32 move_to(u32* counts) {
        u32 all = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u32 sum = warp_sum_u32((k & 1 ? odd : even) >> 4 * (k & ~1) & 255);
            if (!(threadIdx.x & 31) && sum) atomicAdd(&counts[k], sum);
            all += sum;
        }
        even = odd = 0;
        return all;
    }
};

template <int ROWS, int KIND>
__device__ __forceinline__ void convert(Job* job, const Where* tiles) {
    __shared__ u32 counts[kSymbols];
    const int N = 4 * ROWS;
    const bool stochastic = KIND != SIGNS && KIND != TWO_MEANS;
    const bool binary = KIND != SCALED && KIND != SEARCHED;  // always two levels
    __shared__ float all_numbers[kWarps][KIND == SEARCHED ? kSymbols : 2];
    __shared__ float2 all_values[kWarps][binary ? 1 : kSymbols];
    // Where the search needs all entries up to its end, they take the place of the bins after it.
    const int place = KIND == TWO_MEANS ? sizeof(Bins<N>) / 16 : 0;
    __shared__ uint4 scratch[kWarps][KIND == SEARCHED ? sizeof(Bins<N>) / 16 : place + 32 * ROWS];
    __shared__ Segment segment;
    __shared__ Tensor t;  // the first one of the segment
    __shared__ Recipe recipe;
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    if (!tid) {
        segment = segment_of(job, tiles[blockIdx.x]);
        t = *segment.tensors;
        recipe = *static_cast<const Recipe*>(t.format);
    }
    for (int k = tid; k < kSymbols; k += kThreads) counts[k] = 0;
    __syncthreads();
    if (i64(segment.tile) * kTile >= segment.count) return;
    int s = recipe.levels, dtype = t.dtype;
    bool few = s <= kFew;
    float* numbers = all_numbers[warp];
    Bins<N>* bins = reinterpret_cast<Bins<N>*>(scratch[warp]);
    float4* mine = reinterpret_cast<float4*>(scratch[warp] + place) + lane;
    u8* symbols = job->symbols + t.first;
    int width = (recipe.kind == EXPLICIT ? s : recipe.kind == EVEN ? 2 : 1) * (recipe.precision == FP32 ? 4 : 2);
    int bucket = recipe.bucket, bits = __ffs(bucket) - 1, buckets = kTile >> bits, thresholds = 1;
    while (thresholds < s - 1) thresholds *= 2;
    bool aligned = segment.many == 1 && !((u64)(t.gradient) & (dtype == FP32 ? 15 : 7)) && !((u64)(t.before) & 15) &&
                   !((u64)(t.after) & 15) && !((u64)(symbols) & 3);
    u32 ones = 0, slots = 0, entries = 0, ninth = 0;
    FewCounts counted = {0, 0, 0};
    float bad = 0;
    bool usual = true;
#pragma unroll 1
    for (int b = warp; b < buckets; b += kWarps) {
        i64 begin = i64(segment.tile) * kTile + i64(b) * bucket;
        if (begin >= segment.count) break;
        int n = int(segment.count - begin < bucket ? segment.count - begin : bucket);
        bool wide = aligned && !(n & 127);
        float u[N];
        bad += load_bucket<ROWS>(segment, t, begin, n, wide, mine, u);
        if (KIND != SEARCHED) keep(u, mine);
        int* below = reinterpret_cast<int*>(all_values[warp]);  // there are no values yet
        usual = fit_bucket<N, KIND>(recipe, u, n, bins, numbers, below) && usual;
        if (KIND == SEARCHED) keep(u, mine);
        state_numbers(job, recipe, dtype, n, numbers, t.step_at + (begin >> bits) * width);
        state_values(recipe, numbers, all_values[warp], dtype, thresholds);
        u64 index = segment.first + u64(begin);
        u32 k1 = mix(u32(t.seed) ^ 0x9e3779b9u ^ mix(u32(index >> 32))), k2 = mix(k1 ^ u32(t.seed >> 32));
        float low = all_values[warp][0].x, high = all_values[warp][0].y, gap = __fsub_rn(high, low);
        float middle = __double2float_rn((double(low) + double(high)) / 2), median = all_values[warp][thresholds / 2].x;
        u32 start = place_of(all_values[warp], 0), half = place_of(all_values[warp], thresholds / 2);
        entries += n;
        // Two rows at a time.
#pragma unroll 1
        for (int first = 0; first < n; first += 256) {
            float x[8];
            u32 at[8];  // where its value is; in the end eight times the symbol
            u32 packed[2];
#pragma unroll
            for (int row = 0; row < 2; row++) {
                float4 four = mine[first / 4 + 32 * row];
                x[4 * row] = four.x, x[4 * row + 1] = four.y, x[4 * row + 2] = four.z, x[4 * row + 3] = four.w;
            }
            slots += 256;
            if (first + 256 > n) {  // from here on padding belongs to the first symbol
#pragma unroll
                for (int q = 0; q < 8; q++)
                    if (first + 128 * (q / 4) + 4 * lane + q % 4 >= n) x[q] = -kInfinity;
            }
            if (!binary) {
#pragma unroll
                for (int q = 0; q < 8; q++) at[q] = x[q] >= median ? half : start;
#pragma unroll 1
                for (u32 by = 2 * thresholds; by >= 8; by >>= 1) {
#pragma unroll
                    for (int q = 0; q < 8; q++) {
                        u32 next = at[q] + by;
                        if (x[q] >= float_at(all_values[warp], next)) at[q] = next;
                    }
                }
            }
#pragma unroll
            for (int q = 0; q < 8; q++) {
                float under = low, over = high, difference = gap;
                if (!binary) {
                    float2 both = pair_at(all_values[warp], at[q]);
                    under = both.x, over = both.y, difference = __fsub_rn(over, under);
                }
                bool up = x[q] >= middle;
                if (stochastic) {
                    u32 i = u32(index) + u32(first + 128 * (q / 4) + 4 * lane + q % 4);
                    float r = float(mix(mix(i ^ k1) + k2) >> 8) * 5.9604644775390625e-8f;
                    up = __fmul_rn(r, difference) < __fsub_rn(x[q], under);
                }
                x[q] = __fsub_rn(x[q], up ? over : under);
                if (binary) {
                    ones += up;
                    packed[q / 4] = q % 4 ? packed[q / 4] + (u32(up) << 8 * (q % 4)) : u32(up);
                } else {
                    at[q] += up ? 8 - start : -start;
                    packed[q / 4] = q % 4 ? packed[q / 4] + (at[q] << (8 * (q % 4) - 3)) : at[q] >> 3;
                }
            }
            if (!binary && few) {
#pragma unroll
                for (int q = 0; q < 8; q++) counted.add(at[q] >> 1);
                counted.widen();
            } else if (!binary) {
#pragma unroll
                for (int q = 0; q < 8; q++) atomicAdd(&counts[at[q] >> 3], 1u);
            }
            if (wide) {
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    if (first + 128 * row >= n) continue;
                    i64 at = begin + first + 128 * row + 4 * lane;
                    *reinterpret_cast<u32*>(symbols + at) = packed[row];
                    if (t.after)
                        *reinterpret_cast<float4*>(t.after + at) = make_float4(x[4 * row], x[4 * row + 1],
                                                                               x[4 * row + 2], x[4 * row + 3]);
                }
                continue;
            }
#pragma unroll
            for (int q = 0; q < 8; q++) {
                int i = first + 128 * (q / 4) + 4 * lane + q % 4;
                if (i >= n) continue;
                i64 at = begin + i;
                symbols[at] = u8(packed[q / 4] >> 8 * (q % 4));
                const Tensor& to = tensor_at(segment, &at);
                if (to.after) to.after[at] = x[q];
            }
        }
        // Small buckets are mostly padding, of which there may be too much to count.
        if (!binary && few && b + 8 * kWarps < buckets) ninth -= counted.move_to(counts);
        __syncwarp();
    }
    if (bad != 0) atomicOr(&job->status->bits, u32(NONFINITE));  // a NaN is not 0
    if (!usual) atomicOr(&job->status->bits, u32(UNUSUAL));
    u64* total = job->streams[t.stream].counts;
    __syncthreads();
    if (binary) {
        ones = warp_sum_u32(ones);
        if (!lane) atomicAdd(&counts[0], entries - ones), atomicAdd(&counts[1], ones);
    } else {
        if (few) {
            ninth -= counted.move_to(counts);
            if (!lane) atomicAdd(&counts[kFew - 1], slots + ninth);
        }
        if (!lane) atomicAdd(&counts[0], entries - slots);  // without the padding
    }
    __syncthreads();
    for (int k = tid; k < s; k += kThreads)
        if (counts[k]) atomicAdd(total + k, u64(counts[k]));
}
