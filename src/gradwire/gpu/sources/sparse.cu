// Sparse frames: the entries with the largest magnitudes, found without sorting and in one pass over all entries.
//
// A sample tells about how large the k-th magnitude is. The pass over all entries writes u = g + decay·e and picks out
// the candidates, a few more than k. Among these the k-th is found exactly, some bits at a time. The ones that are sent
// are then written in ascending order of position, with their values; sparse_gaps.cu codes the positions.
#include "sparse.h"

// ── parts of a selection ──────────────────────────────────────────────────────────────────────────

// The bucket of the wanted-th largest, from 1 on, and its rank there; by all threads of a block. `total` gets the number
// of all; where that is not enough, the result is −1.
__device__ int find(const u32* histogram, int width, u64 wanted, u32* rank, u64* total) {
    __shared__ int bucket;
    __shared__ u32 inside;
    int per = width / int(blockDim.x) > 1 ? width / int(blockDim.x) : 1, tid = threadIdx.x;
    int top = width - 1 - tid * per;
    u64 sum = 0;
    if (top >= 0)
        for (int k = 0; k < per; k++) sum += histogram[top - k];
    if (!tid) bucket = -1;
    u64 before = block_scan(sum, total);
    if (before < wanted && wanted <= before + sum) {
        int at = top;
        while (before + histogram[at] < wanted) before += histogram[at--];
        bucket = at;
        inside = u32(wanted - before);
    }
    __syncthreads();
    *rank = inside;
    int result = bucket;
    __syncthreads();
    return result;
}

// What the histogram of a level says about one side's k-th magnitude; by all threads of a block.
__device__ void settle(Selection& s, int side, int level, const u32* histogram, i64 k) {
    u32 rank;
    u64 total;
    if (level && !s.open[side]) return;
    int bucket = find(histogram, kWidth[level], level ? s.rank[side] : u64(k), &rank, &total);
    if (!threadIdx.x) {
        if (!level) {
            // Where there are no more than k, all are sent: none is below the "k-th magnitude" 0.
            s.open[side] = k > 0 && total > u64(k);
            s.kth[side] = k > 0 ? 0 : ~0u;
            s.ties[side] = 0;
            s.prefix[side] = 0;
        }
        if (s.open[side]) {
            s.prefix[side] = level ? s.prefix[side] * u32(kWidth[level]) + u32(bucket) : u32(bucket);
            s.rank[side] = rank;
            if (level == kLevels - 1) s.kth[side] = s.prefix[side], s.ties[side] = rank;
        }
    }
    __syncthreads();
}

// Whether a magnitude counts at a level; `bucket` gets where.
__device__ __forceinline__ bool counts(const Selection& s, int side, int level, u32 magnitude, u32* bucket) {
    *bucket = (magnitude >> kShift[level]) & u32(kWidth[level] - 1);
    return !level || (s.open[side] && magnitude >> kShift[level - 1] == s.prefix[side]);
}

// ── candidates ────────────────────────────────────────────────────────────────────────────────────

// Magnitudes of a part of the sample. The last part of a tensor estimates from which magnitude on there will be a few
// more than k, and clears what later kernels count in.
extern "C" __global__ void __launch_bounds__(1024) sample(Job* job, const Where* parts) {
    __shared__ __attribute__((aligned(16))) u32 histogram[2 * kFirst];
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    int sides = format_of(t).sides, tid = threadIdx.x, width = sides * kFirst;
    for (int b = tid; b < width; b += blockDim.x) histogram[b] = 0;
    __syncthreads();
    i64 stratum = t.count / kRuns;
    i64 at = i64(where.index) * kPart + tid, i = at;  // one entry for each of the 1024 threads
    if (t.count > kSample) {
        u32 run = u32(at / kRun);
        i = i64(run) * stratum + mix(run) % u64(stratum - kRun + 1) + at % kRun;
    }
    u32 bits = i < t.count ? __float_as_uint(compensated_at(t, i)) : 0, magnitude = bits & kMagnitude;
    if (magnitude) atomicAdd(&histogram[(sides == 2 ? bits >> 31 : 0) * kFirst + (magnitude >> kShift[0])], 1u);
    __syncthreads();
    // A part has no more than 1024 entries, so that two bytes are enough for a count.
    u64* rows = array_at<u64>(t, plan.parts);
    for (int b = tid; b < width / 4; b += blockDim.x) {
        u64 four = 0;
        for (int j = 0; j < 4; j++) four |= u64(histogram[4 * b + j]) << 16 * j;
        rows[i64(where.index) * (width / 4) + b] = four;
    }
    if (!last_block(&job->fits[where.item].parts_done, t.parts)) return;
    for (int b = tid; b < width / 4; b += blockDim.x) {
        u32 sums[4] = {0, 0, 0, 0};
#pragma unroll 16
        for (int p = 0; p < t.parts; p++) {
            u64 four = rows[i64(p) * (width / 4) + b];
            for (int j = 0; j < 4; j++) sums[j] += u32(four >> 16 * j) & 65535;
        }
        for (int j = 0; j < 4; j++) histogram[4 * b + j] = sums[j];
    }
    __syncthreads();
    // Twice as many as needed where they are few, since these cost little and starting over costs much.
    double wanted = double(plan.k);
    if (t.count > kSample) {
        wanted *= double(kSample) / double(t.count);
        wanted += (wanted < kSample / 50 ? wanted : kSample / 50) + 6 * sqrt(wanted) + 16;
    }
    for (int side = 0; side < sides; side++) {
        u32 rank;
        u64 total;
        int bucket = find(histogram + side * kFirst, kFirst, u64(wanted), &rank, &total);
        if (!tid) s.least[side] = bucket > 0 ? u32(bucket) << kShift[0] : 1u;
    }
    for (int b = tid; b < int(sizeof(s.histograms) / 4); b += blockDim.x) s.histograms[b] = 0;
    if (tid < kClasses) s.classes[tid] = 0;
    if (tid) return;
    if (sides == 1) s.least[1] = s.least[0];
    s.found = s.negative = 0;
    job->fits[where.item].parts_done = 0;
    if (t.count > i64(kMagnitude)) atomicOr(&job->status->bits, u32(UNUSUAL));  // positions have 31 bits here
}

// Four rows of 128 entries of the gradient and the memory, of which each thread of a warp has four entries that lie side
// by side. All loads come before anything is stored, so that none waits for another; beyond the end are zeros.
__device__ __forceinline__ void load_rows(const Tensor& t, i64 first, i64 end, bool wide, float (*g)[4],
                                          float (*e)[4]) {
    if (!wide) {
#pragma unroll
        for (int k = 0; k < 16; k++) {
            i64 i = first + (k >> 2) * 128 + (k & 3);
            g[k >> 2][k & 3] = i < end ? load(t.gradient, i, t.dtype) : 0.0f;
            e[k >> 2][k & 3] = t.before && i < end ? t.before[i] : 0.0f;
        }
        return;
    }
    if (t.dtype == FP32) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(t.gradient) + first + j * 128);
            g[j][0] = v.x, g[j][1] = v.y, g[j][2] = v.z, g[j][3] = v.w;
        }
    }
    if (t.before) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4 v = *reinterpret_cast<const float4*>(t.before + first + j * 128);
            e[j][0] = v.x, e[j][1] = v.y, e[j][2] = v.z, e[j][3] = v.w;
        }
    }
    if (t.dtype != FP32) {
        uint2 raw[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            raw[j] = *reinterpret_cast<const uint2*>(static_cast<const u16*>(t.gradient) + first + j * 128);
#pragma unroll
        for (int k = 0; k < 16; k++) {
            u16 bits = u16((k & 2 ? raw[k >> 2].y : raw[k >> 2].x) >> 16 * (k & 1));
            g[k >> 2][k & 3] = t.dtype == FP16 ? half_to_float(bits) : bf16_to_float(bits);
        }
    }
}

// The one pass over all entries: u, and the candidates of each tile, in order of position. Tiles get their room in the
// order in which they come to it; what follows goes through the tiles in their own order, so that no result depends on it.
extern "C" __global__ void __launch_bounds__(256, 3) gather(Job* job, const Where* tiles) {
    __shared__ u32 of_warps[8], negative_of_warps[8], start_of_tile;
    Where where = tiles[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 least = s.least[0], least_negative = s.least[1];
    i64 first = i64(where.index) * kTile + warp * 1024 + lane * 4;
    i64 end = i64(where.index + 1) * kTile < t.count ? i64(where.index + 1) * kTile : t.count;
    bool wide = end - i64(where.index) * kTile == kTile && !((u64)(t.gradient) & (t.dtype == FP32 ? 15 : 7)) &&
                !((u64)(t.before) & 15) && !((u64)(t.after) & 15);
    bool finite = true, remembers = t.before;
    float decay = t.decay, u[8][4];
    float* after = t.after;
    u32 mask = 0, negative = 0;  // four bits for each row of 128 entries
    u64 counts = 0;  // eight bits for each row
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
        float e[4][4];
        load_rows(t, first + half * 128, end, wide, u + half, e);
#pragma unroll
        for (int j = half; j < half + 4; j++) {
            i64 i = first + j * 128;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (remembers) u[j][k] = sum_of(u[j][k], e[j - half][k], decay);
                finite &= is_finite(u[j][k]);  // what comes from the memory may be a NaN, too
                if (remembers) u[j][k] = limited(u[j][k], kFloatMax);
                u32 bits = __float_as_uint(u[j][k]), magnitude = bits & kMagnitude;
                bool candidate = magnitude >= (bits >> 31 ? least_negative : least);
                mask |= u32(candidate) << (4 * j + k);
                negative += candidate & bits >> 31;
            }
            if (after && wide) {
                *reinterpret_cast<float4*>(after + i) = make_float4(u[j][0], u[j][1], u[j][2], u[j][3]);
            } else if (after) {
                for (int k = 0; k < 4 && i + k < end; k++) after[i + k] = u[j][k];
            }
            counts |= u64(__popc(mask >> 4 * j & 15)) << 8 * j;
        }
    }
    if (!finite) atomicOr(&job->status->bits, u32(NONFINITE));
    u64 upto = warp_scan(counts), rows = __shfl_sync(~0u, upto, 31);  // a row has at most 128
    negative = warp_sum_u32(negative);
    u64 before = upto - counts;
    if (!lane) {
        u32 total = 0;
        for (int j = 0; j < 8; j++) total += u32(rows >> 8 * j) & 255;
        of_warps[warp] = total;
        negative_of_warps[warp] = negative;
    }
    __syncthreads();
    if (!threadIdx.x) {
        u32 total = 0, below = 0;
        for (int w = 0; w < 8; w++) total += of_warps[w], below += negative_of_warps[w];
        u32 start = total ? atomicAdd(&s.found, total) : 0;
        if (below) atomicAdd(&s.negative, below);
        bool fits = u64(start) + total <= u64(plan.room);
        Tile& tile = array_at<Tile>(t, plan.tiles)[where.index];
        tile.start = start;
        tile.found = fits ? total : 0;
        start_of_tile = fits ? start : ~0u;
    }
    __syncthreads();
    if (start_of_tile == ~0u) return;
    u32 at = start_of_tile;
    for (int w = 0; w < warp; w++) at += of_warps[w];
    u32 *values = array_at<u32>(t, plan.values), *positions = array_at<u32>(t, plan.positions);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32 here = at + (u32(before >> 8 * j) & 255);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (!(mask >> (4 * j + k) & 1)) continue;
            values[here] = __float_as_uint(u[j][k]);
            positions[here++] = u32(first + j * 128 + k);
        }
        at += u32(rows >> 8 * j) & 255;
    }
}

const int kAhead = 8;  // entries that a thread loads before it looks at the first

__device__ __forceinline__ u32 compensated_bits(const Tensor& t, i64 i) {
    return __float_as_uint(t.after ? t.after[i] : compensated_at(t, i));
}

// Where the sample misled (too few candidates, or more than there is room for), one block looks at all entries of the
// tensor again, and the entries that are to be sent become the candidates. That takes long, and happens rarely.
extern "C" __global__ void __launch_bounds__(1024) start_over(Job* job, const Where* parts) {
    __shared__ u32 histogram[2 * kFirst];
    Where where = parts[blockIdx.x];
    if (where.index) return;
    const Tensor& t = job->tensors[where.item];
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    int sides = format_of(t).sides, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    i64 negative = s.negative, positive = i64(s.found) - negative;
    bool again = i64(s.found) > plan.room;
    if (sides == 1) again |= s.least[0] > 1 && i64(s.found) < plan.k;
    if (sides == 2) again |= (s.least[0] > 1 && positive < plan.k) || (s.least[1] > 1 && negative < plan.k);
    if (!again) return;
    for (int level = 0; level < kLevels; level++) {
        int width = kWidth[level];
        for (int b = threadIdx.x; b < sides * width; b += blockDim.x) histogram[b] = 0;
        __syncthreads();
        for (i64 first = threadIdx.x; first < t.count; first += kAhead * blockDim.x) {
            u32 bits[kAhead], bucket;
#pragma unroll
            for (int k = 0; k < kAhead; k++) {
                i64 i = first + k * blockDim.x;
                bits[k] = i < t.count ? compensated_bits(t, i) : 0;
            }
            for (int k = 0; k < kAhead; k++) {
                u32 magnitude = bits[k] & kMagnitude;
                int side = sides == 2 ? int(bits[k] >> 31) : 0;
                if (magnitude && counts(s, side, level, magnitude, &bucket))
                    atomicAdd(&histogram[side * width + bucket], 1u);
            }
        }
        __syncthreads();
        for (int side = 0; side < sides; side++) settle(s, side, level, histogram + side * width, plan.k);
    }
    Tile* tiles = array_at<Tile>(t, plan.tiles);
    for (int tile = warp; tile < t.tiles; tile += warps) {
        i64 begin = i64(tile) * kTile, end = begin + kTile < t.count ? begin + kTile : t.count;
        u32 greater[2] = {0, 0}, equal[2] = {0, 0};
#pragma unroll 8
        for (i64 i = begin + lane; i < end; i += 32) {
            u32 bits = compensated_bits(t, i), magnitude = bits & kMagnitude;
            int side = sides == 2 ? int(bits >> 31) : 0;
            if (magnitude) greater[side] += magnitude > s.kth[side], equal[side] += magnitude == s.kth[side];
        }
        for (int side = 0; side < 2; side++) {
            u32 g = warp_sum_u32(greater[side]), e = warp_sum_u32(equal[side]);
            if (!lane && side < sides) counts_of(t, side)[tile] = u64(g) << 32 | e;
        }
    }
    __syncthreads();
    for (int tile = threadIdx.x; tile < t.tiles; tile += blockDim.x) tiles[tile].found = 0;
    __syncthreads();
    for (int side = 0; side < sides; side++) {
        u64* counted = counts_of(t, side);
        u32 ties = s.ties[side];
        scan_items(t.tiles, [&](i64 i) { return counted[i] & 0xffffffffu; }, [&](i64 i, u64 before) {
            u32 here = u32(counted[i]), left = before < ties ? ties - u32(before) : 0;
            tiles[i].found += u32(counted[i] >> 32) + (here < left ? here : left);
            counted[i] = before;
        });
    }
    u64 total = scan_items(t.tiles, [&](i64 i) { return u64(tiles[i].found); },
                           [&](i64 i, u64 before) { tiles[i].start = u32(before); });
    u32 *values = array_at<u32>(t, plan.values), *positions = array_at<u32>(t, plan.positions);
    for (int tile = warp; tile < t.tiles; tile += warps) {
        i64 begin = i64(tile) * kTile, end = begin + kTile < t.count ? begin + kTile : t.count;
        u32 at = tiles[tile].start,
            equal[2] = {u32(counts_of(t, 0)[tile]), sides == 2 ? u32(counts_of(t, 1)[tile]) : 0};
        for (i64 first = begin + lane; first - lane < end; first += kAhead * 32) {
            u32 loaded[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; k++) loaded[k] = first + k * 32 < end ? compensated_bits(t, first + k * 32) : 0;
#pragma unroll
            for (int k = 0; k < kAhead; k++) {
                u32 bits = loaded[k], magnitude = bits & kMagnitude, below = (1u << lane) - 1;
                int side = sides == 2 ? int(bits >> 31) : 0;
                bool is_equal = magnitude && magnitude == s.kth[side], chosen = magnitude && magnitude > s.kth[side];
                for (int other = 0; other < sides; other++) {
                    u32 vote = __ballot_sync(~0u, is_equal && side == other);
                    chosen |= is_equal && side == other && equal[other] + __popc(vote & below) < s.ties[other];
                    equal[other] += __popc(vote);
                }
                u32 vote = __ballot_sync(~0u, chosen), to = at + __popc(vote & below);
                if (chosen) values[to] = bits, positions[to] = u32(first + k * 32);
                at += __popc(vote);
            }
        }
    }
    if (!threadIdx.x) s.found = u32(total);
}

// ── the k-th magnitude ────────────────────────────────────────────────────────────────────────────

// Counts candidates by the next bits of their magnitudes; the last group of a tensor decides on these bits.
template <int level>
__device__ __forceinline__ void narrow(Job* job, const Where* groups) {
    __shared__ u32 histogram[2 * (level == 0 ? 4096 : level == 1 ? 1024 : 512)];
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    int sides = format_of(t).sides, width = kWidth[level], tid = threadIdx.x;
    i64 found = i64(s.found) < plan.room ? s.found : plan.room, first = i64(where.index) * kChunk;
    u32* counted = histogram_of(s, level);
    if (first < found) {
        const u32* values = array_at<u32>(t, plan.values);
        for (int b = tid; b < sides * width; b += blockDim.x) histogram[b] = 0;
        __syncthreads();
        for (; first < found; first += i64(groups_of(t)) * kChunk) {
            i64 end = first + kChunk < found ? first + kChunk : found;
            for (i64 i = first + tid; i < end; i += blockDim.x) {
                u32 bits = values[i], bucket;
                int side = sides == 2 ? int(bits >> 31) : 0;
                if (counts(s, side, level, bits & kMagnitude, &bucket))
                    atomicAdd(&histogram[side * width + bucket], 1u);
            }
        }
        __syncthreads();
        for (int b = tid; b < sides * width; b += blockDim.x)
            if (histogram[b]) atomicAdd(counted + b, histogram[b]);
    }
    if (!last_block(&job->fits[where.item].tiles_done, groups_of(t))) return;
    if (!tid) job->fits[where.item].tiles_done = 0;
    for (int side = 0; side < sides; side++) settle(s, side, level, counted + side * width, plan.k);
}

extern "C" __global__ void narrow_first(Job* job, const Where* groups) { narrow<0>(job, groups); }
extern "C" __global__ void narrow_second(Job* job, const Where* groups) { narrow<1>(job, groups); }
extern "C" __global__ void narrow_third(Job* job, const Where* groups) { narrow<2>(job, groups); }

// ── what is sent ──────────────────────────────────────────────────────────────────────────────────

// How many of each tile's candidates are sent, one warp for each tile; the last group decides on the side and on the one
// magnitude of SBC and STC. Its sum is not in the order of docs/wire-format.md but always in the same one: in fp64 hardly
// any of these sums is rounded at all, and decoders need not know.
extern "C" __global__ void tally(Job* job, const Where* groups) {
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    const Format& f = format_of(t);
    int lane = threadIdx.x & 31, index = where.index * kGroup + (threadIdx.x >> 5);
    if (index < t.tiles) {
        const Tile& tile = array_at<Tile>(t, plan.tiles)[index];
        const u32* values = array_at<u32>(t, plan.values) + tile.start;
        u32 greater[2] = {0, 0}, equal[2] = {0, 0};
        double sum[2] = {0, 0};
        for (u32 c = lane; c < tile.found; c += 32) {
            u32 bits = values[c], magnitude = bits & kMagnitude;
            int side = f.sides == 2 ? int(bits >> 31) : 0;
            bool above = magnitude > s.kth[side];
            greater[side] += above;
            equal[side] += magnitude == s.kth[side];
            sum[side] += above ? double(__uint_as_float(magnitude)) : 0.0;
        }
        for (int side = 0; side < f.sides; side++) {
            u32 g = warp_sum_u32(greater[side]), e = warp_sum_u32(equal[side]);
            double x = warp_sum(sum[side]);
            if (!lane) counts_of(t, side)[index] = u64(g) << 32 | e, sums_of(t, side)[index] = x;
        }
    }
    if (!last_block(&job->fits[where.item].tiles_done, groups_of(t))) return;
    u64 sent[2] = {0, 0};
    double mean[2] = {0, 0};
    for (int side = 0; side < f.sides; side++) {
        u64* counted = counts_of(t, side);
        sent[side] = scan_items(t.tiles, [&](i64 i) { return counted[i]; }, [&](i64 i, u64 before) {
            counted[i] = before;
        }) >> 32;
        sent[side] += s.ties[side];
        double sum = 0;
        for (i64 i = threadIdx.x; i < t.tiles; i += blockDim.x) sum += sums_of(t, side)[i];
        sum = block_sum(sum);
        if (!threadIdx.x && sent[side])
            mean[side] = (sum + double(s.ties[side]) * double(__uint_as_float(s.ties[side] ? s.kth[side] : 0))) /
                         double(sent[side]);
    }
    if (threadIdx.x) return;
    job->fits[where.item].tiles_done = 0;
    int side = f.sides == 2 && mean[1] > mean[0];
    s.side = u32(side);
    s.sent = u32(sent[side]);
    s.value = __double2float_rn(side ? -mean[1] : mean[0]);
}

// Positions, values and the new error memory, one warp for each tile. The sign stands above the 31 bits of a position.
extern "C" __global__ void send_chosen(Job* job, const Where* groups) {
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    const Format& f = format_of(t);
    int lane = threadIdx.x & 31, index = where.index * kGroup + (threadIdx.x >> 5);
    if (index >= t.tiles) return;
    const Tile& tile = array_at<Tile>(t, plan.tiles)[index];
    const u32 *values = array_at<u32>(t, plan.values), *positions = array_at<u32>(t, plan.positions);
    u32* sent = array_at<u32>(t, plan.sent);
    u8* out = const_cast<u8*>(job->frames[t.frame].piece[VALUES].bytes);
    u32 side = s.side, kth = s.kth[side], ties = s.ties[side], below = (1u << lane) - 1;
    u64 before = counts_of(t, int(side))[index];
    u32 equal = u32(before), at = u32(before >> 32) + (equal < ties ? equal : ties);
    float one = received(s.value, t.dtype);
    for (u32 c = 0; c < tile.found; c += 32) {
        u32 bits = c + lane < tile.found ? values[tile.start + c + lane] : 0, magnitude = bits & kMagnitude;
        bool mine = magnitude && (f.sides == 1 || bits >> 31 == side);
        u32 equals = __ballot_sync(~0u, mine && magnitude == kth);
        bool chosen = mine && (magnitude > kth || (magnitude == kth && equal + __popc(equals & below) < ties));
        u32 vote = __ballot_sync(~0u, chosen), to = at + __popc(vote & below);
        if (chosen) {
            u32 position = positions[tile.start + c + lane];
            float u = __uint_as_float(bits), value = one;
            if (f.kind == ONE_MAGNITUDE) {
                value = u < 0 ? -one : one;
            } else if (f.kind == AS_FP32) {
                value = received(u, t.dtype);
                reinterpret_cast<float*>(out)[to] = u;
            } else if (f.kind != ONE_VALUE) {
                bool half = f.kind == AS_FP16;
                u16 cast = half ? float_to_half(limited(u, 65504.0f))
                                : float_to_bf16(limited(u, 3.3895313892515355e38f));
                value = received(half ? half_to_float(cast) : bf16_to_float(cast), t.dtype);
                reinterpret_cast<u16*>(out)[to] = cast;
            }
            sent[to] = position | (bits & ~kMagnitude);
            if (t.after) t.after[position] = __fsub_rn(u, value);
        }
        equal += __popc(equals);
        at += __popc(vote);
    }
}
