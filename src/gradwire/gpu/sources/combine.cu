// The mean of all ranks, of codecs whose symbols have one value each in a tensor, but for outliers of grids.
#include "apart.h"
#include "combine.h"

struct FromRank {        // what a rank sends for a tile
    const u8* symbols;   // of the tile's first entry; null: it has none
    const float* levels;
    const Listed* listed;
    u32 first, end;      // of the outliers that may be in the tile
    i64 start;           // index of the tile's first entry in the frame
    float step;
    int dtype;
};

__device__ __forceinline__ FromRank look_up(const DecodeJob* job, const Target& target, i64 tile, int rank,
                                            bool apart) {
    FromRank from = {nullptr, nullptr, nullptr, 0, 0, 0, 0, 0};
    if (rank >= job->message_count) return from;
    Source source = target.sources[rank];
    if (source.arrival < 0) return from;
    const Arrival& arrival = job->arrivals[source.arrival];
    from.start = source.first + tile * kCombined;
    from.symbols = arrival.symbols + from.start;
    from.levels = arrival.levels;
    from.step = arrival.steps[source.segment];
    from.dtype = arrival.dtype;
    if (apart && apart_of(arrival).count) {
        const u32* index = index_of(arrival) + from.start / kBucket;  // a tile touches two buckets at most
        from.listed = listed_of(arrival);
        from.first = index[0], from.end = index[2];
    }
    return from;
}

// Puts the values of a rank's outliers in their places of the tile. The thread's first one may have been loaded before.
template <int DTYPE>
__device__ __forceinline__ void place_apart(const FromRank& from, Listed item, float weight, float* apart) {
    for (u32 k = from.first + threadIdx.x; k < from.end; k += 256) {
        if (k >= from.first + 256) item = from.listed[k];
        i64 at = i64(item.position) - from.start;
        if (at < 0 || at >= kCombined) continue;
        float value = received(__fmul_rn(item.level, from.step), from.dtype);
        apart[at] = rounded_to<DTYPE>(weight != 1.0f ? __fmul_rn(value, weight) : value);
    }
}

// FP32 and the other dtypes apart: most gradients are fp32, and need no rounding. `apart` has room for two tiles.
template <int DTYPE, bool APART>
__device__ __forceinline__ void combine_tile(DecodeJob* job, const Target& target, i64 tile, FromRank* ranks,
                                             float* values, float* apart) {
    int tid = threadIdx.x, message_count = job->message_count;
    float weight = job->weight, sum[16];
    int count = entries_of(target, tile);
    bool any = job->adds;
    sums_before<DTYPE>(target, tile, count, any, sum);
    for (int first = 0; first < message_count; first += kAtOnce) {
        int many = message_count - first < kAtOnce ? message_count - first : kAtOnce;
        if (first) __syncthreads();
        if (tid < kAtOnce) ranks[tid] = look_up(job, target, tile, first + tid, APART);
        __syncthreads();
        u32 next[4] = {0, 0, 0, 0};
        Listed item = {0, 0};
        auto fetch = [&](const FromRank& from) {
            if (!from.symbols) return;
            symbols_of_tile(from.symbols, count, next);
            if (APART && from.first + tid < from.end) item = from.listed[from.first + tid];
        };
        fetch(ranks[0]);
        for (int k = 0; k < many; k++) {
            const FromRank& from = ranks[k];
            if (!from.symbols) continue;
            float value = received(__fmul_rn(from.levels[tid], from.step), from.dtype);
            if (weight != 1.0f) value = __fmul_rn(value, weight);
            values[k * kSymbols + tid] = value;
        }
        if (APART) place_apart<DTYPE>(ranks[0], item, weight, apart);
        __syncthreads();
        for (int k = 0; k < many; k++) {
            const FromRank& from = ranks[k];
            u32 mine[4] = {next[0], next[1], next[2], next[3]};
            if (k + 1 < many) fetch(ranks[k + 1]);
            if (APART && k) __syncthreads();  // this rank's outliers are there, and those before are used
            if (from.symbols) {
                const float *value = values + k * kSymbols, *outliers = apart + (k & 1) * kCombined + 4 * tid;
#pragma unroll
                for (int q = 0; q < 16; q++) {
                    u32 symbol = mine[q >> 2] >> 8 * (q & 3) & 255;
                    float v = APART && symbol == kApart ? outliers[1024 * (q >> 2) + (q & 3)] : value[symbol];
                    sum[q] = rounded_to<DTYPE>(any ? __fadd_rn(sum[q], v) : v);
                }
                any = true;
            }
            if (APART && k + 1 < many) place_apart<DTYPE>(ranks[k + 1], item, weight, apart + (k + 1 & 1) * kCombined);
        }
    }
    put_sums<DTYPE>(target, tile, count, sum);
}

// The weighted sum of the values of all ranks, in rank order. One block of 256 threads for each tile.
template <bool APART>
__device__ __forceinline__ void combine_all(DecodeJob* job, const Where* tiles, float* apart) {
    __shared__ FromRank ranks[kAtOnce];
    __shared__ float values[kAtOnce * kSymbols];
    Where where = tiles[blockIdx.x];
    const Target& target = job->targets[where.item];
    if (job->status->bits) return;
    if (target.dtype == FP32)
        combine_tile<FP32, APART>(job, target, where.index, ranks, values, apart);
    else if (target.dtype == FP16)
        combine_tile<FP16, APART>(job, target, where.index, ranks, values, apart);
    else
        combine_tile<BF16, APART>(job, target, where.index, ranks, values, apart);
}

extern "C" __global__ void __launch_bounds__(256, 5) combine(DecodeJob* job, const Where* tiles) {
    combine_all<false>(job, tiles, nullptr);
}

// The same for grids, some of whose entries are listed apart.
extern "C" __global__ void __launch_bounds__(256, 5) combine_grid(DecodeJob* job, const Where* tiles) {
    __shared__ float apart[2 * kCombined];
    combine_all<true>(job, tiles, apart);
}
