// CO3's conversion: a sample, the GenNorm that fits it, the best step, then symbols and the new error memory.
#include "few_counts.h"

const int kRuns = 1024, kRun = 64, kSample = kRuns * kRun, kPart = 1024, kTile = 8192;
const int kOthers = 12, kSteps = kOthers + 1, kScanned = 1 << 14;
const int kBetas = 128;

struct Format {           // of `Tensor.format`
    double ratios[kBetas];  // (E|x|)² / E x² of each β of the grid
    double steps[kBetas];   // the best step, in units of E|x|
    float largest, smallest_scale;
    int min_exponent, mantissa, top, zero, sign, spare;  // top: index of the largest magnitude
    u32 masses[kBetas * 128];
};

__device__ __forceinline__ u32 f2b(float x) { return __float_as_uint(x); }

// What rounding to a signed format takes, in registers.
struct Rounding {
    float largest;
    u32 smallest_bits;  // the exponent bits of the smallest normal number: below it the spacing stays the same
    u32 up_bits;  // minus the exponent bits of a number, this is the power of two that makes it a multiple of 1
    u32 down_bits;  // what the exponent bits exceed those of the spacing by
    int shift;  // from exponent bits to the number of magnitudes below
};

__device__ __forceinline__ Rounding rounding_of(const Format& f) {
    return {f.largest, u32(f.min_exponent + 127) << 23, u32(254 + f.mantissa) << 23, u32(f.mantissa) << 23,
            23 - f.mantissa};
}

// The nearest magnitude of the format to |y|, ties to even, as its index; `level` gets the magnitude itself. The largest
// magnitude is one of the format, so that nothing below it rounds beyond. No branches, and no slow conversions: adding
// 1.5·2^23 rounds a small number to an integer, which then stands in the low bits.
__device__ __forceinline__ u32 nearest(const Rounding& r, float y, float* level) {
    const float magic = 12582912.0f;
    float a = fminf(fabsf(y), r.largest);
    u32 exponent = max(__float_as_uint(a) & 0x7f800000u, r.smallest_bits);
    float rounded = __fadd_rn(__fmul_rn(a, __uint_as_float(r.up_bits - exponent)), magic);
    *level = __fmul_rn(__fadd_rn(rounded, -magic), __uint_as_float(exponent - r.down_bits));
    return ((exponent - r.smallest_bits) >> r.shift) + (__float_as_uint(rounded) & 0xffffu);
}

__device__ __forceinline__ float round_step(double step) {
    float x = __double2float_rn(step < 1.1754943508222875e-38 ? 1.1754943508222875e-38
                                : step > 8.507059173023462e37 ? 8.507059173023462e37
                                                              : step);
    return __uint_as_float((f2b(x) + 0x8000u) & 0xffff0000u);
}

__device__ __forceinline__ void state_step(const Tensor& t, Fit& fit, float step) {
    fit.step = step;
    fit.inverse = __fdiv_rn(1.0f, step);
    if (t.step_at) {
        t.step_at[0] = u8(f2b(step) >> 16);
        t.step_at[1] = u8(f2b(step) >> 24);
    }
}

// The fit by moments; by one thread.
__device__ void fit_moments(const Format& f, Fit& fit, u64 nonzero, double absolute, double square, i64 looked_at) {
    fit.nonzero = nonzero;
    fit.beta = kBetas - 1;
    fit.zero_mass = 0;
    fit.step = 1.0f;
    fit.mean_abs = 0;
    if (!nonzero) return;
    double mean_abs = absolute / double(nonzero), mean_square = square / double(nonzero);
    if (mean_square > 0) {
        double ratio = mean_abs / mean_square * mean_abs;
        int low = 0, high = kBetas - 1;  // the last ratio that is not above
        if (ratio <= f.ratios[0]) {
            fit.beta = 0;
        } else if (ratio < f.ratios[high]) {
            while (high - low > 1) {
                int middle = (low + high) / 2;
                if (f.ratios[middle] <= ratio)
                    low = middle;
                else
                    high = middle;
            }
            double slope = 1.0 / (f.ratios[low + 1] - f.ratios[low]);
            fit.beta = int(rint(slope * (ratio - f.ratios[low]) + low));
        }
    }
    double zeros = 1 - double(nonzero) / double(looked_at);
    int mass = int(rint(zeros * 256));
    fit.zero_mass = mass > 255 ? 255 : mass;
    fit.mean_abs = mean_abs;
    fit.step = round_step(mean_abs * f.steps[fit.beta]);
}

// Where entry `at` of the sample is in the tensor: runs of 64, one at a hashed place in each of 1024 equal strata.
__device__ __forceinline__ i64 sampled_entry(const Tensor& t, i64 at) {
    if (t.count <= kSample) return at;
    i64 stratum = t.count / kRuns;
    u32 run = u32(at / kRun);
    u64 choices = u64(stratum - kRun + 1);
    u64 start = choices >> 32 ? mix(run) % choices : mix(run) % u32(choices);
    return i64(run) * stratum + i64(start) + at % kRun;
}

// Moments of a part of the sample; the last part of a tensor fits it. Blocks of 256 threads.
extern "C" __global__ void sample(Job* job, const Where* parts) {
    __shared__ double sums[3];
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    double moments[3] = {0, 0, 0};
#pragma unroll
    for (int k = threadIdx.x; k < kPart; k += 256) {
        i64 at = i64(where.index) * kPart + k;
        if (at < t.count) {
            float u = compensated_at(t, sampled_entry(t, at));
            t.sample[at] = u;
            double x = fabs(double(u));
            moments[0] += u != 0;
            moments[1] += x;
            moments[2] += x * x;
        }
    }
    block_sums<3>(moments, sums);
    double* mine = job->partial + i64(t.first_part + where.index) * 32;
    if (threadIdx.x < 3) mine[threadIdx.x] = sums[threadIdx.x];
    if (!last_block(&fit.parts_done, t.parts)) return;
    for (int j = 0; j < 3; j++)  // a thread for each part, of which there are 64 at most
        moments[j] = threadIdx.x < t.parts ? job->partial[i64(t.first_part + threadIdx.x) * 32 + j] : 0;
    block_sums<3>(moments, sums);
    if (threadIdx.x) return;
    fit.parts_done = 0;
    fit.sampled = int(t.count < kSample ? t.count : kSample);
    fit_moments(f, fit, u64(sums[0]), sums[1], sums[2], fit.sampled);
    fit.closer = t.count > kSample && (!fit.nonzero || fit.zero_mass > 250);
    if (fit.closer) job->status->closer = 1;
}

// Where nearly all of the sample is zero, all entries are looked at: their moments, and as the new sample the first
// numbers of each tile that are not zero, as many of each as there is room for.
__device__ void look_at_tile(Job* job, Where where) {
    __shared__ u32 kept;
    const Tensor& t = job->tensors[where.item];
    Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    i64 begin = i64(where.index) * kTile, end = begin + kTile < t.count ? begin + kTile : t.count;
    u32 room = u32(kSample / t.tiles);
    float* sample = t.sample + i64(where.index) * room;
    double nonzero = 0, absolute = 0, square = 0;
    if (!threadIdx.x) kept = 0;
    __syncthreads();
    for (i64 base = begin; base < end; base += blockDim.x) {
        i64 i = base + threadIdx.x;
        float u = i < end ? compensated_at(t, i) : 0.0f;
        double x = fabs(double(u));
        nonzero += u != 0;
        absolute += x;
        square += x * x;
        u64 total;
        u64 place = block_scan(u != 0, &total) + kept;  // in the order of entries
        if (u != 0 && place < room) sample[place] = u;
        __syncthreads();
        if (!threadIdx.x) kept += u32(total);
        __syncthreads();
    }
    nonzero = block_sum(nonzero);
    absolute = block_sum(absolute);
    square = block_sum(square);
    for (u32 k = kept + threadIdx.x; k < room; k += blockDim.x) sample[k] = 0;
    double* mine = job->tile_sums + i64(t.first_tile + where.index) * 4;
    if (!threadIdx.x) mine[0] = nonzero, mine[1] = absolute, mine[2] = square;
    if (!last_block(&fit.tiles_done, t.tiles)) return;
    // Many tiles: each thread adds up some of them, always the same.
    double sums[3] = {0, 0, 0};
    for (int p = threadIdx.x; p < t.tiles; p += blockDim.x)
        for (int j = 0; j < 3; j++) sums[j] += job->tile_sums[i64(t.first_tile + p) * 4 + j];
    for (int j = 0; j < 3; j++) sums[j] = block_sum(sums[j]);
    if (threadIdx.x) return;
    fit.tiles_done = 0;
    fit.sampled = int(i64(room) * t.tiles);
    fit_moments(f, fit, u64(sums[0]), sums[1], sums[2], t.count);
}

// Some blocks of 256 threads, for all tiles in turn: hardly any tensor needs it.
extern "C" __global__ void look_closer(Job* job, const Where* tiles, i64 count) {
    if (!job->status->closer) return;
    for (i64 i = blockIdx.x; i < count; i += gridDim.x) {
        Where where = tiles[i];
        if (job->fits[where.item].closer) look_at_tile(job, where);
    }
}

// Squared errors of nearby steps. A part of the sample proposes a step and all of it decides. Blocks of 256 threads.
extern "C" __global__ void try_steps(Job* job, const Where* parts) {
    __shared__ double sums[2 * kSteps];
    __shared__ float steps[kSteps], inverses[kSteps];
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Fit& fit = job->fits[where.item];
    const Rounding rounding = rounding_of(*static_cast<const Format*>(t.format));
    if (threadIdx.x < kSteps) {
        int j = threadIdx.x, quarter = j <= 8 ? j - 9 : j - 8;  // −8 … −1, 1 … 4
        steps[j] = j ? round_step(double(fit.step) * exp2(quarter / 4.0)) : fit.step;
        inverses[j] = __fdiv_rn(1.0f, steps[j]);
    }
    __syncthreads();
    double errors[2 * kSteps];  // on all of the sample, and on the part that proposes
    for (int j = 0; j < 2 * kSteps; j++) errors[j] = 0;
    // Zeros cost no error at any step, so that only the others count: of a few numbers all propose.
    int stride = int(fit.nonzero < u64(fit.sampled) ? fit.nonzero : u64(fit.sampled)) / kScanned;
    stride = stride > 1 ? stride : 1;
    for (int k = threadIdx.x; k < kPart; k += 256) {
        int at = where.index * kPart + k;
        float u = at < fit.sampled ? t.sample[at] : 0.0f;
        if (u == 0) continue;
        bool proposes = at % stride == 0;
#pragma unroll
        for (int j = 0; j < kSteps; j++) {
            float level;
            nearest(rounding, __fmul_rn(u, inverses[j]), &level);
            double error = fabs(double(u)) - double(level) * double(steps[j]);
            errors[j] += error * error;
            if (proposes) errors[kSteps + j] += error * error;
        }
    }
    block_sums<2 * kSteps>(errors, sums);
    double* mine = job->partial + i64(t.first_part + where.index) * 32;
    if (threadIdx.x < 2 * kSteps) mine[threadIdx.x] = sums[threadIdx.x];
    if (!last_block(&fit.parts_done, t.parts)) return;
    if (threadIdx.x < 2 * kSteps) {
        double sum = 0;
        for (int p = 0; p < t.parts; p++) sum += job->partial[i64(t.first_part + p) * 32 + threadIdx.x];
        sums[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x) return;
    fit.parts_done = 0;
    int best = 1;
    for (int j = 2; j < kSteps; j++)
        if (sums[kSteps + j] < sums[kSteps + best]) best = j;
    state_step(t, fit, fit.nonzero && sums[best] < sums[0] * 0.98 ? steps[best] : fit.step);
}

// Symbols of u = g + decay·e, how often each comes, and e ← u − value(symbol): one pass over a tile of a tensor.
// FEW: the alphabet has up to 16 symbols. WIDE: fp32 at addresses that are multiples of 16.
template <bool FEW, bool WIDE>
__device__ __forceinline__ void convert_tile(Job* job, Where where, u32* counts) {
    const Tensor& t = job->tensors[where.item];
    const Fit& fit = job->fits[where.item];
    const Format& format = *static_cast<const Format*>(t.format);
    const Rounding rounding = rounding_of(format);
    const float step = fit.step, inverse = fit.inverse, decay = t.decay;
    const u32 zero = u32(format.zero);
    const int dtype = WIDE ? FP32 : t.dtype;
    const float *gradient = static_cast<const float*>(t.gradient), *before = t.before;
    float* after = t.after;
    u8* symbols = job->symbols + t.first;
    const bool words = !((u64)(symbols) & 3);  // segments begin anywhere
    i64 begin = i64(where.index) * kTile, end = begin + kTile < t.count ? begin + kTile : t.count;
    u32 largest_bits = 0;  // of |g + decay·e|: beyond those of the finite numbers if one is not finite
    FewCounts few = {0, 0, 0};
    for (i64 base = begin; base < end; base += 2048) {
        float g[8], e[8];
        // Both groups of four are loaded before the first is used.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            i64 i = base + 1024 * h + 4 * threadIdx.x;
            if (WIDE && i + 4 <= end) {
                float4 v = *reinterpret_cast<const float4*>(gradient + i);
                g[4 * h] = v.x, g[4 * h + 1] = v.y, g[4 * h + 2] = v.z, g[4 * h + 3] = v.w;
                float4 w = before ? *reinterpret_cast<const float4*>(before + i) : make_float4(0, 0, 0, 0);
                e[4 * h] = w.x, e[4 * h + 1] = w.y, e[4 * h + 2] = w.z, e[4 * h + 3] = w.w;
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    bool here = i + k < end;
                    g[4 * h + k] = here ? load(t.gradient, i + k, dtype) : 0.0f;
                    e[4 * h + k] = here && before ? before[i + k] : 0.0f;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            i64 i = base + 1024 * h + 4 * threadIdx.x;
            if (i >= end) break;
            bool whole = i + 4 <= end;
            u32 packed = 0;
            float left[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float sum = before ? sum_of(g[4 * h + k], e[4 * h + k], decay) : g[4 * h + k], level;
                largest_bits = max(largest_bits, __float_as_uint(sum) & 0x7fffffffu);
                float u = before ? limited(sum, kFloatMax) : sum;
                float y = __fmul_rn(u, inverse);
                u32 index = nearest(rounding, y, &level), sign = __float_as_uint(y) & 0x80000000u;
                float value = received(__fmul_rn(level, step), dtype);
                left[k] = __fsub_rn(u, __uint_as_float(__float_as_uint(value) | sign));
                u32 symbol = sign ? zero - index : zero + index;
                packed |= symbol << 8 * k;
                if (FEW && (whole || i + k < end)) few.add(symbol);
                if (!FEW && (whole || i + k < end)) atomicAdd(&counts[symbol], 1u);
            }
            if (whole && words) {
                *reinterpret_cast<u32*>(symbols + i) = packed;
            } else {
                for (int k = 0; k < 4 && i + k < end; k++) symbols[i + k] = u8(packed >> 8 * k);
            }
            if (WIDE && whole && after) {
                *reinterpret_cast<float4*>(after + i) = make_float4(left[0], left[1], left[2], left[3]);
            } else if (after) {
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (i + k < end) after[i + k] = left[k];
            }
        }
        if (FEW) few.widen();  // after eight entries
    }
    if (largest_bits >= 0x7f800000u) atomicOr(&job->status->bits, u32(NONFINITE));
    if (FEW) {
        int alphabet = job->streams[t.stream].alphabet;
#pragma unroll
        for (int s = 0; s < 16; s++) {
            if (s >= alphabet) break;
            u32 sum = warp_sum_u32(few.of(s));
            if (!(threadIdx.x & 31) && sum) atomicAdd(&counts[s], sum);
        }
    }
}

// One block of 256 threads for each tile.
extern "C" __global__ void __launch_bounds__(256) convert(Job* job, const Where* tiles) {
    __shared__ u32 counts[kSymbols];
    Where where = tiles[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Stream& stream = job->streams[t.stream];
    counts[threadIdx.x] = 0;
    __syncthreads();
    bool wide = t.dtype == FP32 && !(((u64)(t.gradient) | (u64)(t.before) | (u64)(t.after)) & 15);
    bool few = stream.alphabet <= 16;
    if (few && wide)
        convert_tile<true, true>(job, where, counts);
    else if (few)
        convert_tile<true, false>(job, where, counts);
    else if (wide)
        convert_tile<false, true>(job, where, counts);
    else
        convert_tile<false, false>(job, where, counts);
    __syncthreads();
    if (counts[threadIdx.x]) atomicAdd(stream.counts + threadIdx.x, u64(counts[threadIdx.x]));
}
