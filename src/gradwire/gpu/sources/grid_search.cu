// The search for ECQ's grid: a sample, the step that meets the rate on it for each width of the cell of zero, and the
// best of these.
#include "grid_spread.h"

// ── the sample ────────────────────────────────────────────────────────────────────────────────────

// A part of the sample; the last part of a tensor adds up. `Fit.mean_abs` gets the root mean square.
extern "C" __global__ void sample(Job* job, const Where* parts) {
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Fit& fit = job->fits[where.item];
    i64 stratum = t.count / kRuns;
    double nonzero = 0, square = 0;
    for (int k = threadIdx.x; k < kPart; k += blockDim.x) {
        i64 at = i64(where.index) * kPart + k, i = at;
        if (t.count > kSample) {
            u32 run = u32(at / kRun);
            i = i64(run) * stratum + mix(run) % u64(stratum - kRun + 1) + at % kRun;
        }
        if (i >= t.count) break;
        float u = compensated_at(t, i);
        t.sample[at] = u;
        nonzero += u != 0;
        square += double(u) * double(u);
    }
    __shared__ double sums[2];
    double moments[2] = {nonzero, square};
    block_sums<2>(moments, sums);
    double* mine = job->partial + i64(t.first_part + where.index) * 32;
    if (threadIdx.x < 2) mine[threadIdx.x] = sums[threadIdx.x];
    if (!last_block(&fit.parts_done, t.parts)) return;
    for (int j = 0; j < 2; j++)  // a thread for each part, of which there are 64 at most
        moments[j] = threadIdx.x < t.parts ? job->partial[i64(t.first_part + threadIdx.x) * 32 + j] : 0;
    block_sums<2>(moments, sums);
    if (threadIdx.x) return;
    fit.parts_done = 0;
    fit.sampled = int(t.count < kSample ? t.count : kSample);
    fit.nonzero = u64(sums[0]);
    fit.mean_abs = sqrt(sums[1] / double(fit.sampled));
    fit.closer = t.count > kSample && stream_of(job, t).tensors == 1 && fit.nonzero * 64 <= u64(fit.sampled);
}

// Where nearly all of the sample is zero, the new sample are the first numbers of each tile that are not zero, as many
// of each as there is room for, and `Fit.nonzero` counts those of the whole tensor.
__device__ void look_at_tile(Job* job, Where where) {
    const Tensor& t = job->tensors[where.item];
    Fit& fit = job->fits[where.item];
    __shared__ u32 kept;
    i64 begin = i64(where.index) * kTile, end = begin + kTile < t.count ? begin + kTile : t.count;
    u32 room = u32(kSample / t.tiles);
    float* sample = t.sample + i64(where.index) * room;
    if (!threadIdx.x) kept = 0;
    __syncthreads();
    for (i64 base = begin; base < end; base += blockDim.x) {
        i64 i = base + threadIdx.x;
        float u = i < end ? compensated_at(t, i) : 0.0f;
        u64 total, place = block_scan(u != 0, &total) + kept;  // in the order of entries
        if (u != 0 && place < room) sample[place] = u;
        __syncthreads();
        if (!threadIdx.x) kept += u32(total);
        __syncthreads();
    }
    for (u32 k = kept + threadIdx.x; k < room; k += blockDim.x) sample[k] = 0;
    double* mine = job->tile_sums + i64(t.first_tile + where.index) * 4;
    if (!threadIdx.x) mine[0] = kept;
    if (!last_block(&fit.tiles_done, t.tiles)) return;
    double nonzero = 0;  // many tiles: each thread adds up some of them, always the same
    for (int p = threadIdx.x; p < t.tiles; p += blockDim.x) nonzero += job->tile_sums[i64(t.first_tile + p) * 4];
    nonzero = block_sum(nonzero);
    if (threadIdx.x) return;
    fit.tiles_done = 0;
    fit.sampled = int(i64(room) * t.tiles);
    fit.nonzero = u64(nonzero);
    if (!room && fit.nonzero) atomicOr(&job->status->bits, u32(UNUSUAL));
}

// Some blocks of 256 threads, for all tiles in turn: hardly any tensor needs it.
extern "C" __global__ void look_closer(Job* job, const Where* tiles, i64 count) {
    __shared__ bool any;
    if (!threadIdx.x) any = false;
    __syncthreads();
    for (i64 i = blockIdx.x + i64(gridDim.x) * threadIdx.x; i < count; i += i64(gridDim.x) * blockDim.x)
        if (job->fits[tiles[i].item].closer) any = true;
    __syncthreads();
    for (i64 i = blockIdx.x; any && i < count; i += gridDim.x) {
        Where where = tiles[i];
        if (job->fits[where.item].closer) look_at_tile(job, where);
    }
}

// Of how many entries of the sample one is searched.
__device__ __forceinline__ i64 stride_of(i64 sampled) {
    return sampled > kSearched ? (sampled + kSearched - 1) / kSearched : 1;
}

// What entry `at` of the sample of a frame of several tensors is, in units of its tensor's scale.
__device__ __noinline__ float sampled_at(const Job* job, const Stream& stream, i64 at) {
    const Tensor* tensors = job->tensors + stream.first_tensor;
    int low = 0, high = stream.tensors - 1;  // the last tensor that does not begin behind
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (tensors[middle].first - tensors->first <= at)
            low = middle;
        else
            high = middle - 1;
    }
    const Tensor& t = tensors[low];
    const Fit& fit = job->fits[stream.first_tensor + low];
    at -= t.first - tensors->first;
    if (t.count > fit.sampled) at = at * fit.sampled / t.count;
    return fit.mean_abs > 0 ? __fdiv_rn(t.sample[at], float(fit.mean_abs)) : 0.0f;
}

struct Staged {  // of a tensor, while its sample is read
    const float* sample;
    i64 first, count;  // in the frame
    float scale;       // 0: it is all zero
    int sampled;
};
const int kStaged = 16 * 256 * 4 / sizeof(Staged);

// The sample of a frame, of which a thread reads entries in ascending order. Tensors are staged in `room`, if they fit.
struct Entries {
    const Job* job;
    const Stream* stream;
    Staged* room;
    const float* sample;  // of the only tensor
    i64 stride;
    int now;              // the tensor of the entry before

    __device__ void stage() {
        const Tensor* tensors = job->tensors + stream->first_tensor;
        const Fit* fits = job->fits + stream->first_tensor;
        int number = stream->tensors;
        sample = number == 1 ? tensors->sample : nullptr;
        for (int k = threadIdx.x; number > 1 && number <= kStaged && k < number; k += blockDim.x)
            room[k] = {tensors[k].sample, tensors[k].first - tensors->first, tensors[k].count, float(fits[k].mean_abs),
                       fits[k].sampled};
        __syncthreads();
    }
    __device__ __noinline__ float of_several(i64 at) {
        if (stream->tensors > kStaged) return sampled_at(job, *stream, at);
        while (at >= room[now].first + room[now].count) now++;
        const Staged& t = room[now];
        at -= t.first;
        if (t.count > t.sampled) at = at * t.sampled / t.count;
        return t.scale > 0 ? __fdiv_rn(t.sample[at], t.scale) : 0.0f;
    }
    __device__ __forceinline__ float operator()(int k) { return sample ? sample[k * stride] : of_several(k * stride); }
};

// ── the search ────────────────────────────────────────────────────────────────────────────────────

__device__ __noinline__ float log_of(double x) { return float(log2(x)); }

__device__ __forceinline__ float step_at(float log) {
    return round_step(double(exp2f(log < -126 ? -126 : log > 126 ? 126 : log)));
}

// Clears what the kernels behind add to, by a block.
__device__ void begin_frame(Scratch& s) {
    int tid = threadIdx.x;
    for (int k = tid; k < kShifts * 256; k += blockDim.x) s.counts[k >> 8][k & 255] = 0;
    if (tid < 32) s.sizes[tid] = 0;
    if (!tid) s.parts_done = s.tiles_done = s.measured = s.listed = 0;
}

// The step at the wanted rate or error, for one width of the cell of zero: 16 warps try a step each, and again between
// those of which one is too small and the next is not.
extern "C" __global__ void __launch_bounds__(kSearchers) search(Job* job, const Where* parts) {
    const int warps = kSearchers / 32;
    __shared__ Spread spread;
    __shared__ __attribute__((aligned(16))) Cells cells[warps][256];
    __shared__ double sums[4];
    __shared__ float logs[warps], excesses[warps];
    __shared__ u32 tops[warps];
    Where where = parts[blockIdx.x / kShifts];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    if (where.index || where.item != stream.first_tensor) return;
    int index = blockIdx.x % kShifts, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    Scratch& s = scratch_of(job, t);
    if (!index) begin_frame(s);
    i64 all = stream.tensors == 1 ? fit.sampled : stream.count, stride = stride_of(all);
    int many = int((all + stride - 1) / stride);
    Entries entries = {job, &stream, reinterpret_cast<Staged*>(cells), nullptr, stride, 0};
    entries.stage();
    double moments[4] = {0, 0, 0, 0};  // magnitudes, squares, those that are not zero, entries of tensors that are not
    u32 top = 0;
#pragma unroll 4
    for (int k = tid; k < many; k += kSearchers) {
        float u = entries(k);
        moments[0] += fabs(double(u));
        moments[1] += double(u) * double(u);
        moments[2] += u != 0;
        top = max(top, __float_as_uint(u) & 0x7fffffffu);
    }
    for (int k = tid; stream.tensors > 1 && k < stream.tensors; k += kSearchers)
        if (job->fits[stream.first_tensor + k].mean_abs > 0)
            moments[3] += double(job->tensors[stream.first_tensor + k].count);
    block_sums<4>(moments, sums);
    top = warp_most(top);
    if (!lane) tops[warp] = top;
    __syncthreads();
    for (int k = 0; k < warps; k++) top = max(top, tops[k]);
    double sum = sums[0], square = sums[1], nonzero = sums[2], total = double(many);
    if (!index && !tid) s.total = sums[3];
    if (stream.tensors > 1) total *= sums[3] / double(stream.count);
    if (fit.closer) total = nonzero * double(t.count) / double(fit.nonzero);
    if (!(sum > 0) || top >= 0x7f800000u) {  // all entries are zero, or one is not finite
        if (!tid) s.steps[index] = 1.0f, s.slopes[index] = 0.0f;
        return;
    }
    if (total < nonzero) total = nonzero;
    entries.now = 0;
    spread_out(spread, many, entries, top);
    float count = float(stream.count), shift = shift_of(index), rate = float(f.rate), log_square = log_of(square);
    float wanted = f.nmse > 0 ? log_of(f.nmse) + log_square : 0;  // of the squared error, if that is the target
    // From a step that leaves next to no error (an outlier has 24 bits) to one that leaves only zeros. Between them, for
    // GenNorm entries the step at a rate R is about E|x|·2^(2−R).
    float finest = (log_square - log_of(nonzero)) / 2 - 18.5f, coarsest = log_of(__uint_as_float(top)) + 1.5f;
    float guess = log_of(sum / total) + 2 - (f.nmse > 0 ? 1 : rate), low = finest, high = coarsest, slope = 0.8f;
    const float around[warps] = {0, -5, -3, -2, -1.25f, -0.75f, -0.4f, -0.15f, 0.1f, 0.35f, 0.65f, 1, 1.5f, 2.5f, 4, 0};
    float excess_low = kTooMuch, excess_high = -kTooMuch;
    bool reached = true;
#pragma unroll 1
    for (int round = 0; round < 6; round++) {
        float log = low + (high - low) * float(warp + 1) / float(warps + 1);
        if (!round) {
            log = warp == 0 ? finest : warp == warps - 1 ? coarsest : guess + around[warp];
            log = log < finest ? finest : log > coarsest ? coarsest : log;
        }
        float step = step_at(log);
        count_cells(spread, step, shift, cells[warp]);
        int largest;
        Measured measured = measure(cells[warp], float(total), count, &largest);
        float excess = excess_of(measured, rate, count);
        if (f.nmse > 0 && excess < kTooMuch) excess = (wanted - log2f(error_of(spread, step, shift))) / 2 - log2f(step);
        __syncthreads();
        if (!lane) logs[warp] = log, excesses[warp] = excess;
        __syncthreads();
#pragma unroll 1
        for (int k = warps - 1; k >= 0; k--) {  // from the largest step down to the first that is too small
            if (excesses[k] > 0 && logs[k] < high) {
                low = logs[k], excess_low = excesses[k];
                break;
            }
            if (excesses[k] <= 0) high = logs[k], excess_high = excesses[k];
            if (!k && !round) reached = false;
        }
        if (!reached || high - low < 0.012f) break;
        if (excess_low < kTooMuch && excess_high > -kTooMuch && high - low > 0.02f)
            slope = (excess_low - excess_high) / (high - low);
    }
    if (tid) return;
    float log = high;
    if (reached && excess_low < kTooMuch && excess_high > -kTooMuch)  // between the two, where it is about 0
        log = high - (high - low) * (-excess_high / (excess_low - excess_high));
    s.steps[index] = step_at(log);
    s.slopes[index] = reached && excess_low < kTooMuch ? slope : 0.0f;  // 0: it must not become smaller
}

// ── the choice, by the whole sample ───────────────────────────────────────────────────────────────

__device__ void state_grid(Job* job, const Stream& stream, Scratch& s, const double* sums, const u32* numbers) {
    Frame& frame = job->frames[job->tensors[stream.first_tensor].frame];
    u8* side = const_cast<u8*>(frame.piece[0].bytes);
    side[0] = u8(s.largest);
    for (int k = 0; k < 2; k++) {
        double d = numbers[k] ? rint(256 * sums[1 + k] / numbers[k]) : 0.0;
        int offset = d > 127 ? 127 : d > -128 ? int(d) : -128;
        s.offset[k] = float(offset) / 256.0f;
        side[2 + k] = u8(offset);
    }
    Stream& mine = job->streams[job->tensors[stream.first_tensor].stream];
    mine.alphabet = 2 * s.largest + 1;
    mine.zero = s.largest;
}

const int kSums = 3 * kShifts + 1;

// Cells and errors of the grids that the search found; the last block of a frame chooses among them.
extern "C" __global__ void __launch_bounds__(256) compare(Job* job, const Where* parts) {
    __shared__ Cells counts[kShifts][256];
    __shared__ double totals[kShifts][3];
    __shared__ float scores[kShifts], excesses[kShifts];
    __shared__ int sizes[kShifts];
    __shared__ u32 numbers[kShifts][2];  // entries at 1 and at larger magnitudes
    __shared__ float of_warps[8][kSums];
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    const Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    Scratch& s = scratch_of(job, t);
    int tid = threadIdx.x;
    for (int k = tid; k < kShifts * 256; k += blockDim.x) counts[k >> 8][k & 255] = 0;
    float inverses[kShifts];
    float left_over[kSums];  // squared errors, how far above 1 and above all others, and entries
#pragma unroll
    for (int k = 0; k < kShifts; k++) inverses[k] = __fdiv_rn(1.0f, step_of(s.steps[k], stream, fit));
#pragma unroll
    for (int k = 0; k < kSums; k++) left_over[k] = 0;
    __syncthreads();
#pragma unroll 1
    for (int at = where.index * kPart + tid; at < (where.index + 1) * kPart && at < fit.sampled; at += blockDim.x) {
        float u = t.sample[at];
        if (u == 0) continue;
        left_over[3 * kShifts] += 1;
#pragma unroll
        for (int k = 0; k < kShifts; k++) {
            float y = __fmul_rn(u, inverses[k]), m = magnitude_of(y, shift_of(k)), left = __fsub_rn(fabsf(y), m);
            int j = int(m);
            left_over[3 * k] += j <= kCells ? left * left : 1.0f / 12;
            if (j == 1) left_over[3 * k + 1] += left;
            if (j > 1 && j <= kCells) left_over[3 * k + 2] += left;
            if (j) atomicAdd(&counts[k][j > kCells ? 127 : y < 0 ? 127 + j : j - 1], 1u);
        }
    }
    // Through shared memory: sums over warps would be longer than all the rest.
    __shared__ float all_left[256][kSums];
#pragma unroll
    for (int k = 0; k < kSums; k++) all_left[tid][k] = left_over[k];
    __syncthreads();
    double* mine = job->partial + i64(t.first_part + where.index) * 32;
    if (tid < kSums * 8) {
        float sum = 0;
#pragma unroll 8
        for (int k = 0; k < 32; k++) sum += all_left[32 * (tid / kSums) + k][tid % kSums];
        of_warps[tid / kSums][tid % kSums] = sum;
    }
    __syncthreads();
    if (tid < kSums) {
        double sum = 0;
        for (int w = 0; w < 8; w++) sum += double(of_warps[w][tid]);
        mine[tid] = sum;
    }
    for (int k = tid; k < kShifts * 256; k += blockDim.x)
        if (counts[k >> 8][k & 255]) atomicAdd(&s.counts[k >> 8][k & 255], counts[k >> 8][k & 255]);
    const Tensor& last = job->tensors[stream.first_tensor + stream.tensors - 1];
    int first_part = first_of(job, t).first_part, part_count = last.first_part + last.parts - first_part;
    if (!last_block(&s.parts_done, part_count)) return;
    int warp = tid >> 5, lane = tid & 31;
    double total = stream.tensors == 1 ? double(fit.sampled) : s.total;
    if (fit.closer) {
        double nonzero = 0;
        for (int p = 0; p < part_count; p++) nonzero += job->partial[i64(first_part + p) * 32 + 21];
        total = nonzero * double(t.count) / double(fit.nonzero ? fit.nonzero : 1);
    }
    for (int k = tid; k < kShifts * 256; k += blockDim.x) counts[k >> 8][k & 255] = s.counts[k >> 8][k & 255];
    __syncthreads();
    float count = float(stream.count);
    if (warp < kShifts) {
        double sums[3] = {0, 0, 0};
        u32 first = 0, others = 0;
        for (int p = lane; p < part_count; p += 32)
            for (int k = 0; k < 3; k++) sums[k] += job->partial[i64(first_part + p) * 32 + 3 * warp + k];
        for (int k = lane; k < kCells; k += 32) (k ? others : first) += counts[warp][k] + counts[warp][128 + k];
#pragma unroll 1
        for (int k = 0; k < 3; k++) sums[k] = warp_sum(sums[k]);
        double error = sums[0];
        first = warp_total(first), others = warp_total(others);
        if (first) error -= sums[1] * sums[1] / first;  // every magnitude is where its entries are in the mean
        if (others) error -= sums[2] * sums[2] / others;
        // In units of the step, so that logarithms in fp32 will do.
        float log_error = log2f(fmaxf(float(error), 1e-30f)), log_step = log2f(s.steps[warp]);
        int largest;
        Measured m = measure(counts[warp], total > 1 ? float(total) : 1.0f, count, &largest);
        if (!lane) {
            for (int k = 0; k < 3; k++) totals[warp][k] = sums[k];
            numbers[warp][0] = first, numbers[warp][1] = others;
            sizes[warp] = largest ? largest : kCells;
            excesses[warp] = excess_of(m, float(f.rate), count);
            if (f.nmse > 0) {
                float energy = log_of(total) + (stream.tensors == 1 ? 2 * log_of(fit.mean_abs) : 0.0f);
                excesses[warp] = fit.closer ? 0.0f : (log_of(f.nmse) + energy - log_error) / 2 - log_step;
            }
            // At one bit an entry for a factor of four in the error.
            scores[warp] = m.bits / count + log_error / 2 + log_step;
        }
    }
    __syncthreads();
    if (!tid) {
        int best = 0;
        bool any = false;
        for (int k = 0; k < kShifts; k++) {
            any |= s.slopes[k] != 0 || s.steps[k] != 1.0f;
            if (scores[k] < scores[best]) best = k;
        }
        double change = 0;
        if (total > kSearched && s.slopes[best] > 0.1f && excesses[best] < kTooMuch) {
            change = excesses[best] / double(s.slopes[best]);
            change = change > 0.1 ? 0.1 : change > -0.1 ? change : -0.1;
        }
        s.largest = sizes[best];
        s.shift = shift_of(best);
        s.step = change != 0 ? round_step(double(s.steps[best]) * exp2(change)) : s.steps[best];
        if (!any && !totals[best][0] && !(counts[best][127] + numbers[best][0] + numbers[best][1]))
            s.largest = 1;  // only zeros
        state_grid(job, stream, s, totals[best], numbers[best]);
    }
    __syncthreads();
    for (int k = tid; k < stream.tensors; k += blockDim.x) {
        const Tensor& other = job->tensors[stream.first_tensor + k];
        Fit& its = job->fits[stream.first_tensor + k];
        its.step = step_of(s.step, stream, its);
        its.inverse = __fdiv_rn(1.0f, its.step);
        other.step_at[0] = u8(__float_as_uint(its.step) >> 16);
        other.step_at[1] = u8(__float_as_uint(its.step) >> 24);
    }
}
