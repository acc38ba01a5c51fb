// The mean of frames of levels: what a symbol stands for depends on its bucket.
#include "combine.h"
#include "levels_arrival.h"

// A bucket has at least twice as many entries as levels, so a tile needs half its size, and one bucket more at its end.
const int kMostValues = kCombined / 2 + kSymbols;
const float kLargest = 8.507059173023462e37f;  // 2^126
enum { EXPLICIT = 0, EVEN = 1, SYMMETRIC = 2 };

__device__ __forceinline__ float number_at(const u8* at, int precision) {
    u32 bits = at[0] | u32(at[1]) << 8;
    if (precision == FP32) return __uint_as_float(bits | u32(at[2]) << 16 | u32(at[3]) << 24);
    return precision == FP16 ? half_to_float(u16(bits)) : bf16_to_float(u16(bits));
}

// Number k of a bucket that sends `used` of them. One that no frame may have clears `sound`.
__device__ __forceinline__ float sound_number(const u8* numbers, int k, int used, int precision, bool* sound) {
    k = k < used ? k : used - 1;
    float x = number_at(numbers + k * (precision == FP32 ? 4 : 2), precision);
    *sound = *sound && fabsf(x) <= kLargest && __float_as_uint(x) != 0x80000000u;
    return x;
}

// What symbol k of a bucket of n entries stands for.
__device__ __forceinline__ float level_of(const LevelsPlan& plan, const u8* numbers, i64 n, int k, bool* sound) {
    int s = plan.levels, width = plan.kind == EXPLICIT ? s : plan.kind == EVEN ? 2 : 1;
    int used = n < 2 ? 2 : n < width ? int(n) : width;
    used = used < width ? used : width;
    if (plan.kind == EXPLICIT) {
        float x = sound_number(numbers, k, used, plan.precision, sound);
        if (k) *sound = *sound && sound_number(numbers, k - 1, used, plan.precision, sound) <= x;
        return x;
    }
    float first = sound_number(numbers, 0, used, plan.precision, sound);
    float last = sound_number(numbers, width - 1, used, plan.precision, sound);
    double low = plan.kind == SYMMETRIC ? -double(first) : double(first), high = last;
    *sound = *sound && low <= high;
    return __double2float_rn((low * double(s - 1 - k) + high * double(k)) / double(s - 1));
}

struct FromRank {            // what a rank sends for a tile
    const u8* symbols;       // of the tile's first entry; null: it has none
    const u8* numbers;       // of the tile's first bucket
    const LevelsPlan* plan;
    i64 left;                // entries of the segment from this bucket on
    int many;                // values of all symbols, in all buckets of the tile
    int place;               // of the tile's first entry in the bucket
    int shift, levels, dtype, spare;
};

__device__ __forceinline__ FromRank look_up(const DecodeJob* job, const Target& target, i64 tile, int rank) {
    FromRank from = {nullptr, nullptr, nullptr, 0, 0, 0, 0, 0, 0, 0};
    if (rank >= job->message_count) return from;
    Source source = target.sources[rank];
    if (source.arrival < 0) return from;
    const Arrival& arrival = job->arrivals[source.arrival];
    const LevelsPlan& plan = *reinterpret_cast<const LevelsPlan*>(arrival.own);
    const LevelsPart part = plan.parts()[source.segment];
    i64 begin = tile * kCombined, end = begin + kCombined < target.count ? begin + kCombined : target.count;
    int item = (plan.kind == EXPLICIT ? plan.levels : plan.kind == EVEN ? 2 : 1) * (plan.precision == FP32 ? 4 : 2);
    i64 first = (part.position + begin) >> plan.bucket_bits, last = (part.position + end - 1) >> plan.bucket_bits;
    from.symbols = arrival.symbols + source.first + begin;
    from.numbers = arrival.rest + part.numbers + first * item;
    from.plan = &plan;
    from.left = part.length - (first << plan.bucket_bits);
    from.many = int(last - first + 1) * plan.levels;
    from.place = int(part.position + begin - (first << plan.bucket_bits));
    from.shift = plan.bucket_bits, from.levels = plan.levels, from.dtype = arrival.dtype;
    return from;
}

// Value j of those that a rank's symbols stand for in a tile.
__device__ __forceinline__ float value_at(const FromRank& from, int j, float weight, bool* sound) {
    const LevelsPlan& plan = *from.plan;
    int s = from.levels, b = j / s, k = j - b * s;
    int item = (plan.kind == EXPLICIT ? s : plan.kind == EVEN ? 2 : 1) * (plan.precision == FP32 ? 4 : 2);
    i64 left = from.left - (i64(b) << from.shift), n = left < i64(1) << from.shift ? left : i64(1) << from.shift;
    float value = received(level_of(plan, from.numbers + b * item, n, k, sound), from.dtype);
    return weight != 1.0f ? __fmul_rn(value, weight) : value;
}

template <int DTYPE>
__device__ __forceinline__ void combine_tile(DecodeJob* job, const Target& target, i64 tile, FromRank* ranks,
                                             float* values) {
    int tid = threadIdx.x, message_count = job->message_count;
    float weight = job->weight, sum[16];
    int count = entries_of(target, tile);
    bool any = job->adds, sound = true;
    sums_before<DTYPE>(target, tile, count, any, sum);
    for (int first = 0, many = 0; first < message_count; first += many) {
        if (first) __syncthreads();
        if (tid < kAtOnce) ranks[tid] = look_up(job, target, tile, first + tid);
        __syncthreads();
        u32 next[4] = {0, 0, 0, 0};
        if (ranks[0].symbols) symbols_of_tile(ranks[0].symbols, count, next);
        int used = 0;  // values of as many ranks as there is room for
        for (many = 0; many < kAtOnce && first + many < message_count; many++) {
            if (used + ranks[many].many > kMostValues) break;
            used += ranks[many].many;
        }
        for (int j = tid; j < used; j += 256) {
            int k = 0, at = j;
            while (at >= ranks[k].many) at -= ranks[k++].many;
            values[j] = value_at(ranks[k], at, weight, &sound);
        }
        __syncthreads();
        const float* value = values;
        for (int k = 0; k < many; k++) {
            const FromRank& from = ranks[k];
            u32 mine[4] = {next[0], next[1], next[2], next[3]};
            if (k + 1 < many && ranks[k + 1].symbols) symbols_of_tile(ranks[k + 1].symbols, count, next);
            if (!from.symbols) continue;
            int place = from.place + 4 * tid, s = from.levels, shift = from.shift, last = from.many - 1;
            if (!(place & 3)) {  // all four of a word are in the same bucket, as a rule
#pragma unroll
                for (int h = 0; h < 4; h++) {
                    int bucket = ((place + 1024 * h) >> shift) * s;
                    const float* of_bucket = value + (bucket < last ? bucket : 0);  // entries beyond the end have none
#pragma unroll
                    for (int q = 4 * h; q < 4 * h + 4; q++) {
                        float v = of_bucket[mine[h] >> 8 * (q & 3) & 255];
                        sum[q] = rounded_to<DTYPE>(any ? __fadd_rn(sum[q], v) : v);
                    }
                }
            } else {
#pragma unroll
                for (int q = 0; q < 16; q++) {
                    int bucket = ((place + 1024 * (q >> 2) + (q & 3)) >> shift) * s;
                    float v = value[(bucket < last ? bucket : 0) + int(mine[q >> 2] >> 8 * (q & 3) & 255)];
                    sum[q] = rounded_to<DTYPE>(any ? __fadd_rn(sum[q], v) : v);
                }
            }
            value += from.many;
            any = true;
        }
    }
    if (!sound) atomicOr(&job->status->bits, u32(UNUSUAL));
    put_sums<DTYPE>(target, tile, count, sum);
}

// The weighted sum of the values of all ranks, in rank order. One block of 256 threads for each tile.
extern "C" __global__ void __launch_bounds__(256, 5) combine_levels(DecodeJob* job, const Where* tiles) {
    __shared__ FromRank ranks[kAtOnce];
    __shared__ float values[kMostValues + kSymbols];  // a symbol that no level has reads behind the last of them
    Where where = tiles[blockIdx.x];
    const Target& target = job->targets[where.item];
    if (job->status->bits) return;
    if (target.dtype == FP32)
        combine_tile<FP32>(job, target, where.index, ranks, values);
    else if (target.dtype == FP16)
        combine_tile<FP16>(job, target, where.index, ranks, values);
    else
        combine_tile<BF16>(job, target, where.index, ranks, values);
}
