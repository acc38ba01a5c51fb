// The mean of frames of levels: what a symbol stands for depends on its bucket.
#include "levels_arrival.h"

const int kCombined = 4096;  // entries of a tile
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

template <int DTYPE>
__device__ __forceinline__ float rounded(float x) {
    return DTYPE == FP16 ? half_to_float(float_to_half(x)) : DTYPE == BF16 ? bf16_to_float(float_to_bf16(x)) : x;
}

template <int DTYPE>
__device__ __forceinline__ void combine_tile(DecodeJob* job, const Target& target, i64 tile, float* values) {
    int tid = threadIdx.x;
    float weight = job->weight, sum[16];
    i64 from = tile * kCombined, end = from + kCombined < target.count ? from + kCombined : target.count;
    i64 begin = from + 4 * tid;
    bool any = job->adds, sound = true;
    sum_so_far<DTYPE>(target, begin, end, any, sum);
    for (int rank = 0; rank < job->message_count; rank++) {
        Source source = target.sources[rank];
        if (source.arrival < 0) continue;
        const Arrival& arrival = job->arrivals[source.arrival];
        const LevelsPlan& plan = *reinterpret_cast<const LevelsPlan*>(arrival.own);
        const LevelsPart part = plan.parts()[source.segment];
        const u8* symbols = arrival.symbols + source.first + begin;
        u32 mine[4];
        load_symbols(symbols, begin, end, mine);
        int shift = plan.bucket_bits, s = plan.levels;
        int item = (plan.kind == EXPLICIT ? s : plan.kind == EVEN ? 2 : 1) * (plan.precision == FP32 ? 4 : 2);
        i64 first = (part.position + from) >> shift, last = (part.position + end - 1) >> shift;
        int many = int(last - first + 1) * s;
        __syncthreads();
        for (int j = tid; j < many; j += 256) {
            int b = j / s, k = j - b * s;
            i64 left = part.length - ((first + b) << shift), n = left < i64(1) << shift ? left : i64(1) << shift;
            float value = received(level_of(plan, arrival.rest + part.numbers + (first + b) * item, n, k, &sound),
                                   arrival.dtype);
            values[j] = weight != 1.0f ? __fmul_rn(value, weight) : value;
        }
        __syncthreads();
        // Entries from here on are counted from the beginning of the first bucket.
        int place = int(part.position + begin - (first << shift));
#pragma unroll
        for (int k = 0; k < 16; k++) {
            int bucket = (place + 1024 * (k >> 2) + (k & 3)) >> shift;
            int at = bucket * s + int(mine[k >> 2] >> 8 * (k & 3) & 255);
            float v = values[at < many ? at : 0];
            sum[k] = rounded<DTYPE>(any ? __fadd_rn(sum[k], v) : v);
        }
        any = true;
    }
    if (!sound) atomicOr(&job->status->bits, u32(UNUSUAL));
    bool aligned = !((u64)(target.out) & 15);
#pragma unroll
    for (int h = 0; h < 4; h++) {
        i64 i = begin + 1024 * h;
        if (DTYPE == FP32 && aligned && i + 4 <= end) {
            *reinterpret_cast<float4*>(static_cast<float*>(target.out) +
                                       i) = make_float4(sum[4 * h], sum[4 * h + 1], sum[4 * h + 2], sum[4 * h + 3]);
            continue;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (i + k >= end) continue;
            float x = sum[4 * h + k];
            if (DTYPE == FP32)
                static_cast<float*>(target.out)[i + k] = x;
            else
                static_cast<u16*>(target.out)[i + k] = DTYPE == FP16 ? float_to_half(x) : float_to_bf16(x);
        }
    }
}

// The weighted sum of the values of all ranks, in rank order. One block of 256 threads for each tile.
extern "C" __global__ void __launch_bounds__(256) combine_levels(DecodeJob* job, const Where* tiles) {
    __shared__ float values[kMostValues];
    Where where = tiles[blockIdx.x];
    const Target& target = job->targets[where.item];
    if (job->status->bits) return;
    if (target.dtype == FP32)
        combine_tile<FP32>(job, target, where.index, values);
    else if (target.dtype == FP16)
        combine_tile<FP16>(job, target, where.index, values);
    else
        combine_tile<BF16>(job, target, where.index, values);
}
