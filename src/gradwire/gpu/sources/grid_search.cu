// The search for ECQ's grid: a sample, the step that meets the rate on it for each width of the cell of zero, and the
// best of these.
#include "grid_rate.h"

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
    nonzero = block_sum(nonzero);
    square = block_sum(square);
    double* mine = job->partial + i64(t.first_part + where.index) * 32;
    if (!threadIdx.x) mine[0] = nonzero, mine[1] = square;
    if (!last_block(&fit.parts_done, t.parts) || threadIdx.x) return;
    fit.parts_done = 0;
    nonzero = square = 0;
    for (int p = 0; p < t.parts; p++) {
        const double* sums = job->partial + i64(t.first_part + p) * 32;
        nonzero += sums[0];
        square += sums[1];
    }
    fit.sampled = int(t.count < kSample ? t.count : kSample);
    fit.nonzero = u64(nonzero);
    fit.mean_abs = sqrt(square / double(fit.sampled));
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
    for (i64 i = blockIdx.x; i < count; i += gridDim.x) {
        Where where = tiles[i];
        if (job->fits[where.item].closer) look_at_tile(job, where);
    }
}

// Of how many entries of the sample one is searched.
__device__ __forceinline__ i64 stride_of(i64 sampled) {
    return sampled > kSearched ? (sampled + kSearched - 1) / kSearched : 1;
}

// What entry `at` of the frame's sample is, in units of its tensor's scale.
__device__ float sampled_at(const Job* job, const Stream& stream, i64 at) {
    const Tensor* tensors = job->tensors + stream.first_tensor;
    if (stream.tensors == 1) return tensors->sample[at];
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

// Exclusive sum over all threads of a block, in fp64.
__device__ double scan_of_block(double x) {
    __shared__ double sums[32];
    double inclusive = warp_scan(x), before = 0;
    __syncthreads();
    if ((threadIdx.x & 31) == 31) sums[threadIdx.x >> 5] = inclusive;
    __syncthreads();
    for (u32 w = 0; w < threadIdx.x >> 5; w++) before += sums[w];
    return before + (inclusive - x);
}

// Sorts entries of the frame's sample by magnitude, kSorted in a block. The first block clears what others add to.
extern "C" __global__ void sort(Job* job, const Where* parts) {
    __shared__ u32 keys[kSorted];
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    // A frame has at least as many parts as pieces that are sorted.
    int sort = t.first_part + where.index - first_of(job, t).first_part, tid = threadIdx.x;
    if (sort >= sorts_of(stream)) return;
    Scratch& s = scratch_of(job, t);
    if (!sort) {
        for (int k = tid; k < kShifts * 256; k += blockDim.x) s.counts[k >> 8][k & 255] = 0;
        if (tid < 32) s.sizes[tid] = 0;
        if (!tid) s.parts_done = s.tiles_done = s.measured = s.listed = 0;
        double total = 0;  // tensors that are all zero do not count
        for (int k = tid; stream.tensors > 1 && k < stream.tensors; k += blockDim.x)
            if (job->fits[stream.first_tensor + k].mean_abs > 0)
                total += double(job->tensors[stream.first_tensor + k].count);
        total = block_sum(total);
        if (!tid) s.total = total;
    }
    i64 all = stream.tensors == 1 ? job->fits[stream.first_tensor].sampled : stream.count;
    i64 stride = stride_of(all);
    int size = 32;  // a power of two that has room for all
    while (size < kSorted && (i64(sort) * kSorted + size) * stride < all) size *= 2;
    double sum = 0, square = 0, nonzero = 0;
    i64 reach = (all + stride - 1) / stride - i64(sort) * kSorted;
    if (!tid) s.entries[sort] = u32(reach < 0 ? 0 : reach < kSorted ? reach : kSorted);
    for (int k = tid; k < size; k += blockDim.x) {
        i64 at = (i64(sort) * kSorted + k) * stride;
        u32 key = ~0u;
        if (at < all) {
            float u = sampled_at(job, stream, at);
            u32 bits = __float_as_uint(u);
            key = bits << 1 | bits >> 31;
            sum += fabs(double(u));
            square += double(u) * double(u);
            nonzero += u != 0;
        }
        keys[k] = key;
    }
    sum = block_sum(sum);
    square = block_sum(square);
    nonzero = block_sum(nonzero);
    if (!tid) s.sums[sort] = sum, s.squares[sort] = square, s.nonzero[sort] = u32(nonzero);
    for (int span = 2; span <= size; span *= 2) {
        for (int by = span / 2; by; by /= 2) {
            __syncthreads();
            for (int k = tid; k < size / 2; k += blockDim.x) {
                int i = 2 * k - (k & (by - 1)), j = i + by;
                u32 x = keys[i], y = keys[j];
                if ((x > y) != ((i & span) != 0)) keys[i] = y, keys[j] = x;
            }
        }
    }
    __syncthreads();
    u32* out = keys_of(s) + sort * kSorted;
    u16* negatives = negatives_of(s, stream) + sort * (kSorted + 8);
    int each = kSorted / int(blockDim.x);
    u64 mine = 0, of_all;
    for (int k = tid * each; k < (tid + 1) * each; k++) mine += k < size && keys[k] != ~0u && (keys[k] & 1);
    u64 before = block_scan(mine, &of_all);
    for (int k = tid * each; k < (tid + 1) * each; k++) {
        negatives[k] = u16(before);
        before += k < size && keys[k] != ~0u && (keys[k] & 1);
    }
    if (!tid) negatives[kSorted] = u16(of_all);
    for (int k = tid; k < kSorted; k += blockDim.x) out[k] = k < size ? keys[k] : ~0u;
    if (static_cast<const Format*>(t.format)->nmse == 0) return;
    double *first = sums_of(s, stream) + sort * 2 * (kSorted + 8), *second = first + kSorted + 8, all1 = 0, all2 = 0;
    auto value = [&](int k) { return k < size && keys[k] != ~0u ? double(__uint_as_float(keys[k] >> 1)) : 0.0; };
    for (int k = tid * each; k < (tid + 1) * each; k++) all1 += value(k), all2 += value(k) * value(k);
    all1 = scan_of_block(all1), all2 = scan_of_block(all2);
    for (int k = tid * each; k < (tid + 1) * each; k++) {
        first[k] = all1, second[k] = all2;
        all1 += value(k), all2 += value(k) * value(k);
    }
    if (tid == int(blockDim.x) - 1) first[kSorted] = all1, second[kSorted] = all2;
}

// ── the search ────────────────────────────────────────────────────────────────────────────────────

struct Above {               // of a warp's grid: what lies at or above the edges of the cells 1 … 128
    u32 all[130], negative[130];
    double first[130], second[130];  // sums of magnitudes and squares, if the target is an error
};

// Counts the cells of a grid in the sorted sample, by a warp. No entry is above `top`.
__device__ void count_cells(Scratch& s, const Stream& stream, float step, float shift, float top, bool with_sums,
                            Cells* cells, Above& above) {
    int lane = threadIdx.x & 31, sorts = sorts_of(stream);
    const u32* keys = keys_of(s);
    const u16* negatives = negatives_of(s, stream);
    for (int j = 1 + lane; j <= kCells + 1; j += 32) {
        float edge = __fmul_rn(__fsub_rn(float(j), shift), step);
        u32 key = __float_as_uint(edge) << 1, negative = 0, all = 0;
        double first = 0, second = 0;
        if (edge <= top) {
            int at[kSorts] = {0, 0, 0, 0};
            for (int by = kSorted; by; by /= 2)
#pragma unroll
                for (int r = 0; r < kSorts; r++)
                    if (r < sorts && at[r] + by <= kSorted && keys[r * kSorted + at[r] + by - 1] < key) at[r] += by;
            for (int r = 0; r < sorts; r++) {
                all += s.entries[r] > u32(at[r]) ? s.entries[r] - u32(at[r]) : 0;
                negative += u32(negatives[r * (kSorted + 8) + kSorted]) - negatives[r * (kSorted + 8) + at[r]];
                if (with_sums) {
                    const double *sums = sums_of(s, stream) + r * 2 * (kSorted + 8), *squares = sums + kSorted + 8;
                    first += sums[kSorted] - sums[at[r]];
                    second += squares[kSorted] - squares[at[r]];
                }
            }
        }
        above.all[j] = all, above.negative[j] = negative;
        if (with_sums) above.first[j] = first, above.second[j] = second;
    }
    __syncwarp();
    for (int j = 1 + lane; j <= kCells; j += 32) {
        u32 all = above.all[j] - above.all[j + 1], negative = above.negative[j] - above.negative[j + 1];
        cells[j - 1] = all - negative;
        cells[127 + j] = negative;
    }
    if (!lane) cells[127] = above.all[kCells + 1];
    __syncwarp();
}

// The squared error of a grid whose cells were counted with sums; `square` is that of sending nothing. By a warp.
__device__ double error_of(const Above& above, double step, double square) {
    int lane = threadIdx.x & 31;
    double error = 0, excess[2] = {0, 0}, number[2] = {0, 0};
    for (int j = 1 + lane; j <= kCells; j += 32) {
        double n = double(above.all[j] - above.all[j + 1]), first = (above.first[j] - above.first[j + 1]) / step;
        error += (above.second[j] - above.second[j + 1]) / step / step - 2 * j * first + double(j) * j * n;
        excess[j > 1] += first - j * n;
        number[j > 1] += n;
    }
    error = warp_sum(error) + above.all[kCells + 1] / 12.0;
    for (int k = 0; k < 2; k++) {  // every magnitude is where its entries are in the mean
        excess[k] = warp_sum(excess[k]);
        number[k] = warp_sum(number[k]);
        if (number[k] > 0) error -= excess[k] * excess[k] / number[k];
    }
    error = (error < 0 ? 0 : error) * step * step + (square - above.second[1]);
    return error > 1e-300 ? error : 1e-300;
}

// The step at the wanted rate or error, for one width of the cell of zero: 8 warps try a step each, and again between those of
// which one is too small and the next is not.
extern "C" __global__ void __launch_bounds__(256) search(Job* job, const Where* parts) {
    __shared__ Cells cells[8][256];
    __shared__ Above above[8];
    __shared__ double logs[8], excesses[8];
    Where where = parts[blockIdx.x / kShifts];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    if (where.index || where.item != stream.first_tensor) return;
    int index = blockIdx.x % kShifts, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, sorts = sorts_of(stream);
    const Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    Scratch& s = scratch_of(job, t);
    double sum = 0, square = 0, nonzero = 0, total = 0;
    float top = 0;
    i64 all = stream.tensors == 1 ? fit.sampled : stream.count, stride = stride_of(all);
    for (int r = 0; r < sorts; r++) { sum += s.sums[r], square += s.squares[r], nonzero += s.nonzero[r]; }
    total = double((all + stride - 1) / stride);
    if (stream.tensors > 1) total *= s.total / double(stream.count);
    if (fit.closer) total = nonzero * double(t.count) / double(fit.nonzero);
    if (!(sum > 0)) {  // all entries are zero
        if (!threadIdx.x) s.steps[index] = 1.0f, s.slopes[index] = 0.0f;
        return;
    }
    if (total < nonzero) total = nonzero;
    for (int r = 0; r < sorts; r++) {
        float last = s.entries[r] ? __uint_as_float(keys_of(s)[r * kSorted + s.entries[r] - 1] >> 1) : 0.0f;
        top = last > top ? last : top;
    }
    double mean = sum / total, count = double(stream.count), shift = shift_of(index);
    // From a step that leaves next to no error (an outlier has 24 bits) to one that leaves only zeros. Between them, for
    // GenNorm entries the step at a rate R is about E|x|·2^(2−R).
    double finest = log2(sqrt(square / nonzero)) - 18.5, coarsest = log2(double(top)) + 1.5;
    double guess = log2(mean) + 2 - (f.nmse > 0 ? 1 : f.rate), low = finest, high = coarsest, slope = 0.8;
    const double around[8] = {0, -5, -2.5, -1, -0.25, 0.5, 2, 0};
    double excess_low = 1e300, excess_high = -1e300;
    bool reached = true;
    for (int round = 0; round < 7; round++) {
        double log = low + (high - low) * (warp + 1) / 9;
        if (!round) {
            log = warp == 0 ? finest : warp == 7 ? coarsest : guess + around[warp];
            log = log < finest ? finest : log > coarsest ? coarsest : log;
        }
        float step = round_step(exp2(log < -126 ? -126 : log > 126 ? 126 : log));
        count_cells(s, stream, step, float(shift), top, f.nmse > 0, cells[warp], above[warp]);
        int largest;
        Measured measured = measure(cells[warp], total, count, &largest);
        double excess = excess_of(measured, f.rate, count);
        if (f.nmse > 0 && excess < 1e299) excess = log2(f.nmse * square / error_of(above[warp], step, square)) / 2;
        __syncthreads();
        if (!lane) logs[warp] = log, excesses[warp] = excess;
        __syncthreads();
        for (int k = 7; k >= 0; k--) {  // from the largest step down to the first that is too small
            if (excesses[k] > 0 && logs[k] < high) {
                low = logs[k], excess_low = excesses[k];
                break;
            }
            if (excesses[k] <= 0) high = logs[k], excess_high = excesses[k];
            if (!k && !round) reached = false;
        }
        if (!reached || high - low < 0.003) break;
        if (excess_low < 1e299 && excess_high > -1e299 && high - low > 0.02)
            slope = (excess_low - excess_high) / (high - low);
    }
    if (threadIdx.x) return;
    double log = high;
    if (reached && excess_low < 1e299 && excess_high > -1e299)  // between the two, where it is about 0
        log = high - (high - low) * (-excess_high / (excess_low - excess_high));
    log = log < -126 ? -126 : log > 126 ? 126 : log;
    s.steps[index] = round_step(exp2(log));
    s.slopes[index] = reached && excess_low < 1e299 ? float(slope) : 0.0f;  // 0: it must not become smaller
}

// ── the choice, by the whole sample ───────────────────────────────────────────────────────────────

__device__ void state_grid(Job* job, const Stream& stream, Scratch& s, const double* sums, const Cells* cells) {
    double numbers[2] = {double(cells[0]) + double(cells[128]), 0};
    for (int k = 1; k < kCells; k++) numbers[1] += double(cells[k]) + double(cells[128 + k]);
    Frame& frame = job->frames[job->tensors[stream.first_tensor].frame];
    u8* side = const_cast<u8*>(frame.piece[0].bytes);
    side[0] = u8(s.largest);
    for (int k = 0; k < 2; k++) {
        double d = numbers[k] > 0 ? rint(256 * sums[1 + k] / numbers[k]) : 0.0;
        int offset = d > 127 ? 127 : d > -128 ? int(d) : -128;
        s.offset[k] = float(offset) / 256.0f;
        side[2 + k] = u8(offset);
    }
    Stream& mine = job->streams[job->tensors[stream.first_tensor].stream];
    mine.alphabet = 2 * s.largest + 1;
    mine.zero = s.largest;
}

// Cells and errors of the grids that the search found; the last block of a frame chooses among them.
extern "C" __global__ void __launch_bounds__(256) compare(Job* job, const Where* parts) {
    __shared__ Cells counts[kShifts][256];
    __shared__ double totals[kShifts][3], scores[kShifts], excesses[kShifts];
    __shared__ int sizes[kShifts];
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    const Fit& fit = job->fits[where.item];
    const Format& f = *static_cast<const Format*>(t.format);
    Scratch& s = scratch_of(job, t);
    int tid = threadIdx.x;
    for (int k = tid; k < kShifts * 256; k += blockDim.x) counts[k >> 8][k & 255] = 0;
    float inverses[kShifts];
    double left_over[3 * kShifts + 1];  // squared errors, how far above 1 and above all others, and entries
#pragma unroll
    for (int k = 0; k < kShifts; k++) inverses[k] = __fdiv_rn(1.0f, step_of(s.steps[k], stream, fit));
#pragma unroll
    for (int k = 0; k <= 3 * kShifts; k++) left_over[k] = 0;
    __syncthreads();
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
    __shared__ double sums_of_block[3 * kShifts + 1];
    block_sums<3 * kShifts + 1>(left_over, sums_of_block);
    double* mine = job->partial + i64(t.first_part + where.index) * 32;
    if (tid <= 3 * kShifts) mine[tid] = sums_of_block[tid];
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
    double count = double(stream.count);
    if (warp < kShifts) {
        double sums[3] = {0, 0, 0}, numbers[2] = {0, 0};
        for (int p = lane; p < part_count; p += 32)
            for (int k = 0; k < 3; k++) sums[k] += job->partial[i64(first_part + p) * 32 + 3 * warp + k];
        for (int k = lane; k < kCells; k += 32)
            numbers[k > 0] += double(counts[warp][k]) + double(counts[warp][128 + k]);
        double error = 0;
        for (int k = 0; k < 3; k++) sums[k] = warp_sum(sums[k]);
        error = sums[0];
        for (int k = 0; k < 2; k++) {  // every magnitude is where its entries are in the mean
            numbers[k] = warp_sum(numbers[k]);
            if (numbers[k] > 0) error -= sums[1 + k] * sums[1 + k] / numbers[k];
        }
        if (error < 0) error = 0;
        error *= double(s.steps[warp]) * double(s.steps[warp]);
        int largest;
        Measured m = measure(counts[warp], total > 1 ? total : 1, count, &largest);
        if (!lane) {
            for (int k = 0; k < 3; k++) totals[warp][k] = sums[k];
            sizes[warp] = largest ? largest : kCells;
            excesses[warp] = excess_of(m, f.rate, count);
            double energy = stream.tensors == 1 ? total * fit.mean_abs * fit.mean_abs : total;
            if (f.nmse > 0)
                excesses[warp] = fit.closer ? 0.0 : log2(f.nmse * energy / (error > 1e-300 ? error : 1e-300)) / 2;
            // At one bit an entry for a factor of four in the error.
            scores[warp] = m.bits / count + log2(error > 1e-300 ? error : 1e-300) / 2;
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
        if (total > kSearched && s.slopes[best] > 0.1f && excesses[best] < 1e299) {
            change = excesses[best] / double(s.slopes[best]);
            change = change > 0.1 ? 0.1 : change > -0.1 ? change : -0.1;
        }
        s.largest = sizes[best];
        s.shift = shift_of(best);
        s.step = change != 0 ? round_step(double(s.steps[best]) * exp2(change)) : s.steps[best];
        u32 beyond = counts[best][127];
        bool none = !any && !totals[best][0] && !beyond;  // only zeros
        for (int k = 0; k < kCells && none; k++) none = !counts[best][k] && !counts[best][128 + k];
        if (none) s.largest = 1;
        state_grid(job, stream, s, totals[best], counts[best]);
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
