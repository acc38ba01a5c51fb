// CO3's conversion: a sample, the GenNorm that fits it, the best step, then symbols and the new error memory.
#include "common.h"

const int kRuns = 1024, kRun = 64, kSample = kRuns * kRun, kPart = 4096, kTile = 8192;
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

// The nearest value of the format to y, as the index of its magnitude; `level` gets the magnitude itself.
__device__ __forceinline__ int nearest(const Format& f, float y, float* level) {
    float magnitude = y < 0 ? (f.sign ? -y : 0.0f) : y;
    magnitude = magnitude > f.largest ? f.largest : magnitude;
    int exponent = int(f2b(magnitude) >> 23) - 127;
    exponent = exponent < f.min_exponent ? f.min_exponent : exponent;
    // Both scales are powers of two within the range of fp32: biases are limited so that they are.
    float up = __uint_as_float(u32(127 + f.mantissa - exponent) << 23);
    float down = __uint_as_float(u32(127 - f.mantissa + exponent) << 23);
    int multiple = __float2int_rn(__fmul_rn(magnitude, up));
    int index = ((exponent - f.min_exponent) << f.mantissa) + multiple;
    *level = __fmul_rn(float(multiple), down);
    if (index > f.top) {
        index = f.top;
        *level = f.largest;
    }
    return index;
}

__device__ __forceinline__ float round_step(double step) {
    float x = __double2float_rn(step < 1.1754943508222875e-38 ? 1.1754943508222875e-38
                                : step > 8.507059173023462e37 ? 8.507059173023462e37 : step);
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
                if (f.ratios[middle] <= ratio) low = middle; else high = middle;
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

// Moments of a part of the sample; the last part of a tensor fits it.
extern "C" __global__ void sample(Job* job, const Where* parts) {
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    i64 stratum = t.count / kRuns;
    double nonzero = 0, absolute = 0, square = 0;
    for (int k = threadIdx.x; k < kPart; k += blockDim.x) {
        i64 at = i64(where.index) * kPart + k, i = at;
        if (t.count > kSample) {
            u32 run = u32(at / kRun);
            i = i64(run) * stratum + mix(run) % u64(stratum - kRun + 1) + at % kRun;
        }
        if (i >= t.count) break;
        float u = compensated_at(t, i);
        t.sample[at] = u;
        double x = fabs(double(u));
        nonzero += u != 0;
        absolute += x;
        square += x * x;
    }
    nonzero = block_sum(nonzero);
    absolute = block_sum(absolute);
    square = block_sum(square);
    double* mine = job->partial + i64(t.first_part + where.index) * 32;
    if (!threadIdx.x) mine[0] = nonzero, mine[1] = absolute, mine[2] = square;
    if (!last_block(&fit.parts_done, t.parts) || threadIdx.x) return;
    fit.parts_done = 0;
    nonzero = absolute = square = 0;
    for (int p = 0; p < t.parts; p++) {
        const double* sums = job->partial + i64(t.first_part + p) * 32;
        nonzero += sums[0];
        absolute += sums[1];
        square += sums[2];
    }
    fit.sampled = int(t.count < kSample ? t.count : kSample);
    fit_moments(f, fit, u64(nonzero), absolute, square, fit.sampled);
    fit.closer = t.count > kSample && (!fit.nonzero || fit.zero_mass > 250);
}

// Where nearly all of the sample is zero, all entries are looked at: their moments, and as the new sample the first
// numbers of each tile that are not zero, as many of each as there is room for.
extern "C" __global__ void look_closer(Job* job, const Where* tiles) {
    Where where = tiles[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Fit& fit = job->fits[where.item];
    if (!fit.closer) return;
    const Format& f = *static_cast<const Format*>(t.format);
    __shared__ u32 kept;
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

// Squared errors of nearby steps. A part of the sample proposes a step and all of it decides.
extern "C" __global__ void try_steps(Job* job, const Where* parts) {
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    double whole[kSteps], some[kSteps];
    float steps[kSteps], inverses[kSteps];
    for (int j = 0; j < kSteps; j++) {
        int quarter = j == 0 ? 0 : j <= 8 ? j - 9 : j - 8;  // −8 … −1, 1 … 4
        steps[j] = j ? round_step(double(fit.step) * exp2(quarter / 4.0)) : fit.step;
        inverses[j] = __fdiv_rn(1.0f, steps[j]);
        whole[j] = some[j] = 0;
    }
    int stride = fit.sampled / kScanned > 1 ? fit.sampled / kScanned : 1;
    for (int k = threadIdx.x; k < kPart; k += blockDim.x) {
        int at = where.index * kPart + k;
        if (at >= fit.sampled) break;
        float u = t.sample[at];
        if (u == 0) continue;
        bool proposes = at % stride == 0;
        for (int j = 0; j < kSteps; j++) {
            float level;
            float y = __fmul_rn(u, inverses[j]);
            nearest(f, y, &level);
            double error = double(u) - (y < 0 ? -1.0 : 1.0) * double(level) * double(steps[j]);
            whole[j] += error * error;
            if (proposes) some[j] += error * error;
        }
    }
    double* mine = job->partial + i64(t.first_part + where.index) * 32;
    for (int j = 0; j < kSteps; j++) {
        double a = block_sum(whole[j]), b = block_sum(some[j]);
        if (!threadIdx.x) mine[j] = a, mine[kSteps + j] = b;
    }
    if (!last_block(&fit.parts_done, t.parts) || threadIdx.x) return;
    fit.parts_done = 0;
    for (int j = 0; j < kSteps; j++) {
        whole[j] = some[j] = 0;
        for (int p = 0; p < t.parts; p++) {
            const double* sums = job->partial + i64(t.first_part + p) * 32;
            whole[j] += sums[j];
            some[j] += sums[kSteps + j];
        }
    }
    int best = 1;
    for (int j = 2; j < kSteps; j++)
        if (some[j] < some[best]) best = j;
    state_step(t, fit, fit.nonzero && whole[best] < whole[0] * 0.98 ? steps[best] : fit.step);
}

// Symbols of u = g + decay·e, how often each comes, and e ← u − value(symbol): one pass over all tensors.
extern "C" __global__ void __launch_bounds__(256) convert(Job* job, const Where* tiles) {
    __shared__ u32 counts[16 * 256];  // by thread for small alphabets, so that nobody waits for another
    Where where = tiles[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    Format local;
    local.largest = f.largest;
    local.min_exponent = f.min_exponent;
    local.mantissa = f.mantissa;
    local.top = f.top;
    local.sign = f.sign;
    int zero = f.zero, alphabet = job->streams[t.stream].alphabet, tid = threadIdx.x;
    bool few = alphabet <= 16;
    for (int s = 0; s < (few ? alphabet : 1); s++) counts[s * 256 + tid] = 0;
    __syncthreads();
    float step = fit.step, inverse = fit.inverse, decay = t.decay;
    i64 begin = i64(where.index) * kTile, end = begin + kTile < t.count ? begin + kTile : t.count;
    const float* gradient = static_cast<const float*>(t.gradient);
    u8* symbols = job->symbols + t.first;
    bool finite = true;
    bool wide = t.dtype == FP32 && !((u64)(gradient) & 15) && !((u64)(t.before) & 15) && !((u64)(t.after) & 15);
    for (i64 i = begin + 4 * tid; i < end; i += 1024) {
        float g[4], e[4] = {0, 0, 0, 0};
        bool whole = i + 4 <= end;
        if (wide && whole) {
            float4 v = *reinterpret_cast<const float4*>(gradient + i);
            g[0] = v.x, g[1] = v.y, g[2] = v.z, g[3] = v.w;
            if (t.before) {
                float4 w = *reinterpret_cast<const float4*>(t.before + i);
                e[0] = w.x, e[1] = w.y, e[2] = w.z, e[3] = w.w;
            }
        } else {
            for (int k = 0; k < 4; k++) {
                g[k] = i + k < end ? load(t.gradient, i + k, t.dtype) : 0.0f;
                if (t.before) e[k] = i + k < end ? t.before[i + k] : 0.0f;
            }
        }
        u32 packed = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            finite &= is_finite(g[k]);
            float u = t.before ? compensated(g[k], e[k], decay) : g[k], level;
            float y = __fmul_rn(u, inverse);
            int index = nearest(local, y, &level);
            bool negative = y < 0;
            float value = received(__fmul_rn(negative ? -level : level, step), t.dtype);
            e[k] = __fsub_rn(u, value);
            u32 symbol = u32(zero + (negative ? -index : index));
            packed |= symbol << 8 * k;
            if (few && i + k < end) counts[symbol * 256 + tid]++;
            if (!few && i + k < end) atomicAdd(&counts[symbol], 1u);
        }
        if (whole) {
            *reinterpret_cast<u32*>(symbols + i) = packed;
        } else {
            for (int k = 0; k < 4 && i + k < end; k++) symbols[i + k] = u8(packed >> 8 * k);
        }
        if (t.after && wide && whole) {
            *reinterpret_cast<float4*>(t.after + i) = make_float4(e[0], e[1], e[2], e[3]);
        } else if (t.after) {
            for (int k = 0; k < 4 && i + k < end; k++) t.after[i + k] = e[k];
        }
    }
    if (!finite) atomicOr(&job->status->bits, u32(NONFINITE));
    __syncthreads();
    u64* total = job->streams[t.stream].counts;
    if (few) {
        for (int s = tid >> 5; s < alphabet; s += 8) {
            u32 sum = 0;
            for (int j = tid & 31; j < 256; j += 32) sum += counts[s * 256 + j];
            sum = warp_sum_u32(sum);
            if (!(tid & 31) && sum) atomicAdd(total + s, u64(sum));
        }
    } else if (tid < alphabet && counts[tid]) {
        atomicAdd(total + tid, u64(counts[tid]));
    }
}
