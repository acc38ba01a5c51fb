// Sparse frames: the entries with the largest magnitudes, found without sorting and in one pass over all entries.
//
// A sample tells between which magnitudes the k-th lies. The pass over all entries writes u = g + decay·e, picks out the
// candidates, a few more than k, and counts those between the two in narrow buckets. So it is known which bucket has the
// k-th; what is above is sent, and the few candidates in this bucket are looked at for the exact one. What is sent is
// written in ascending order of position, with its values; sparse_gaps.cu codes the positions.
#include "sparse.h"

// ── parts of a selection ──────────────────────────────────────────────────────────────────────────

struct Place {  // of an entry in a histogram
    int bucket;  // −1: there are not so many entries
    u32 rank;  // within the bucket, from 1 on
};

// The buckets of the wanted[side][n]-th largest entries, from 1 on, of each side. By all threads of a block: each has some
// buckets of one side that lie side by side. `totals` gets the number of all, for each side.
template <int N>
__device__ void locate(const u32* histogram, int width, int sides, const u32 (*wanted)[N], Place (*places)[N],
                       u32* totals) {
    int threads = int(blockDim.x) / sides, side = int(threadIdx.x) / threads, id = int(threadIdx.x) % threads;
    int per = width / threads > 1 ? width / threads : 1, top = width - 1 - id * per;
    const u32* mine = histogram + side * width + top;
    u32 sum = 0;
    if (top >= 0) {
        if (per & 3) {
            for (int k = 0; k < per; k++) sum += mine[-k];
        } else {
            const uint4* fours = reinterpret_cast<const uint4*>(mine + 1 - per);
#pragma unroll 4
            for (int k = 0; k < per / 4; k++) {
                uint4 four = fours[k];
                sum += four.x + four.y + four.z + four.w;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < 2 * N) places[threadIdx.x / N][threadIdx.x % N].bucket = -1;
    u64 total, scanned = block_scan(u64(sum) << 32 * side, &total);
    u32 before = u32(scanned >> 32 * side);
    for (int n = 0; n < N; n++) {
        u32 rank = wanted[side][n], upto = before;
        if (rank <= before || rank > before + sum) continue;
        int at = 0;
        while (upto + mine[-at] < rank) upto += mine[-at++];
        places[side][n].bucket = top - at;
        places[side][n].rank = rank - upto;
    }
    __syncthreads();
    totals[0] = u32(total), totals[1] = u32(total >> 32);
}

// What the histogram of a level, of all entries, says about the k-th magnitudes; by all threads of a block.
__device__ void settle(Selection& s, int sides, int level, const u32* histogram, i64 k) {
    __shared__ Place places[2][1];
    __shared__ u32 wanted[2][1];
    u32 totals[2];
    if (threadIdx.x < 2) wanted[threadIdx.x][0] = level ? s.rank[threadIdx.x] : u32(k);
    __syncthreads();
    locate<1>(histogram, kWidth[level], sides, wanted, places, totals);
    int side = threadIdx.x;
    if (side < sides) {
        if (!level) {
            // Where there are no more than k, all are sent: none is below the "k-th magnitude" 0.
            s.open[side] = k > 0 && i64(totals[side]) > k;
            s.kth[side] = k > 0 ? 0 : ~0u;
            s.ties[side] = 0;
            s.prefix[side] = 0;
        }
        if (s.open[side]) {
            u32 bucket = u32(places[side][0].bucket), rank = places[side][0].rank;
            s.prefix[side] = level ? s.prefix[side] * u32(kWidth[level]) + bucket : bucket;
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
// more than k, and from which on surely fewer, and clears what later kernels count in.
extern "C" __global__ void __launch_bounds__(1024) sample(Job* job, const Where* parts) {
    __shared__ __attribute__((aligned(16))) u32 histogram[2 * kFirst];
    __shared__ Place places[2][2];
    __shared__ u32 wanted[2][2];
    Where where = parts[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    bool all = t.count <= kSample;
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    int sides = format_of(t).sides, tid = threadIdx.x, width = sides * kFirst;
    for (int b = tid; b < width; b += blockDim.x) histogram[b] = 0;
    i64 stratum = t.count / kRuns;
    i64 at = i64(where.index) * kPart + tid, i = at;  // one entry for each of the 1024 threads
    if (!all) {
        u32 run = u32(at / kRun);
        i = i64(run) * stratum + mix(run) % u64(stratum - kRun + 1) + at % kRun;
    }
    u32 bits = i < t.count ? __float_as_uint(compensated_at(t, i)) : 0, magnitude = bits & kMagnitude;
    __syncthreads();
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
    // Half as many more as needed where they are few, since these cost little and starting over costs much.
    double expected = double(wanted_of(t)), most = expected, fewest = expected;
    if (!all) {
        expected *= double(kSampled) / double(t.count);
        double margin = (expected < kSampled / 50 ? expected : kSampled / 50) / 2 + 6 * sqrt(expected);
        most = expected + margin + 16;
        fewest = expected - 5 * sqrt(expected);  // the k-th may be above it all the same: that takes a little longer
    }
    if (tid < 2) wanted[tid][0] = u32(most), wanted[tid][1] = fewest >= 1 ? u32(fewest) : 1u;
    __syncthreads();
    u32 totals[2];
    locate<2>(histogram, kFirst, sides, wanted, places, totals);
    for (int b = tid; b < 2 * kFine; b += blockDim.x) s.histogram[b] = 0;
    if (tid < kClasses) s.classes[tid] = 0;
    if (tid < 2) {
        const Place* found = places[tid < sides ? tid : 0];
        // The k-th may be larger than all of the sample: then it is looked for among all candidates above `upto`.
        u32 least = found[0].bucket > 0 ? u32(found[0].bucket) << kShift[0] : 1u;
        u32 upto = found[1].bucket >= 0 ? u32(found[1].bucket + 1) << kShift[0] : least;
        if (upto < least) upto = least;
        u32 range = upto - (least & ~((1u << kShift[0]) - 1)), shift = 0;
        while ((range >> shift) > u32(kFine)) shift++;
        s.least[tid] = least;
        s.upto[tid] = upto;
        s.shift[tid] = shift;
    }
    if (tid) return;
    s.found = s.negative = s.doubts = 0;
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

const int kWarps = 8;  // of a block of `gather`
// Candidates of a tile that are put in order in shared memory; if there are more, they are not.
const int kStaged = 2048;

// The one pass over all entries: u, and the candidates of each tile, in order of position. Tiles get their room in the
// order in which they come to it; what follows goes through the tiles in their own order, so that no result depends on it.
extern "C" __global__ void __launch_bounds__(32 * kWarps, 4) gather(Job* job, const Where* tiles) {
    __shared__ u32 of_warps[kWarps], negative_of_warps[kWarps], start_of_tile, staged[kStaged];
    __shared__ u16 places[kStaged];
    Where where = tiles[blockIdx.x >> 1];
    int index = 2 * where.index + (blockIdx.x & 1);
    const Tensor& t = job->tensors[where.item];
    if (index >= tiles_of(t)) return;
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 least = s.least[0], least_negative = s.least[1];
    i64 begin = i64(index) * kTile, first = begin + warp * 512 + lane * 4;
    i64 end = begin + kTile < t.count ? begin + kTile : t.count;
    bool wide = end - begin == kTile && !((u64)(t.gradient) & (t.dtype == FP32 ? 15 : 7)) && !((u64)(t.before) & 15) &&
                !((u64)(t.after) & 15);
    bool finite = true, remembers = t.before;
    float decay = t.decay, u[4][4], e[4][4];
    float* after = t.after;
    u32 mask = 0, negative = 0, counts = 0;  // four bits for each row of 128 entries, eight bits for its count
    load_rows(t, first, end, wide, u, e);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        i64 i = first + j * 128;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (remembers) u[j][k] = sum_of(u[j][k], e[j][k], decay);
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
        counts |= u32(__popc(mask >> 4 * j & 15)) << 8 * j;
    }
    if (!finite) atomicOr(&job->status->bits, u32(NONFINITE));
    u32 upto = warp_scan(counts), rows = __shfl_sync(~0u, upto, 31), before = upto - counts;  // a row has at most 128
    u32 of_warp = (rows & 255) + (rows >> 8 & 255) + (rows >> 16 & 255) + (rows >> 24);
    negative = warp_sum_u32(negative);
    if (!lane) of_warps[warp] = of_warp, negative_of_warps[warp] = negative;
    __syncthreads();
    u32 scanned = warp_scan(lane < kWarps ? of_warps[lane] : 0), total = __shfl_sync(~0u, scanned, 31);
    u32 at = __shfl_sync(~0u, scanned, warp) - of_warp;  // within the tile
    if (!warp) {
        u32 below = warp_sum_u32(lane < kWarps ? negative_of_warps[lane] : 0);
        if (!lane) {
            u32 start = total ? atomicAdd(&s.found, total) : 0;
            if (below) atomicAdd(&s.negative, below);
            bool fits = u64(start) + total <= u64(plan.room);
            Tile& tile = array_at<Tile>(t, plan.tiles)[index];
            tile.start = start;
            tile.found = fits ? total : 0;
            start_of_tile = fits ? start : ~0u;
        }
    }
    bool few = total <= u32(kStaged);
    if (!few) __syncthreads();
    u32 *values = array_at<u32>(t, plan.values), *positions = array_at<u32>(t, plan.positions);
    if (!few && start_of_tile == ~0u) return;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 here = at + (before >> 8 * j & 255);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (!(mask >> (4 * j + k) & 1)) continue;
            u32 bits = __float_as_uint(u[j][k]), place = u32(first - begin) + j * 128 + k;
            if (few) {
                staged[here] = bits;
                places[here] = u16(place);
            } else {
                values[start_of_tile + here] = bits;
                positions[start_of_tile + here] = u32(begin) + place;
            }
            here++;
        }
        at += rows >> 8 * j & 255;
    }
    if (!few) return;
    __syncthreads();
    u32 start = start_of_tile;
    if (start == ~0u) return;
    for (u32 c = threadIdx.x; c < total; c += blockDim.x) {
        values[start + c] = staged[c];
        positions[start + c] = u32(begin) + places[c];
    }
}

const int kAhead = 8;  // entries that a thread loads before it looks at the first

__device__ __forceinline__ u32 compensated_bits(const Tensor& t, i64 i) {
    return __float_as_uint(t.after ? t.after[i] : compensated_at(t, i));
}

// Where the sample misled (too few candidates, or more than there is room for), one block looks at all entries of the
// tensor again, and the entries that are to be sent become the candidates. That takes long, and happens rarely.
__device__ __noinline__ void start_over(const Tensor& t, Selection& s, const Plan& plan, int sides, u32* histogram) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
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
        settle(s, sides, level, histogram, wanted_of(t));
    }
    Tile* tiles = array_at<Tile>(t, plan.tiles);
    for (int tile = warp; tile < tiles_of(t); tile += warps) {
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
    for (int tile = threadIdx.x; tile < tiles_of(t); tile += blockDim.x) tiles[tile].found = 0;
    __syncthreads();
    for (int side = 0; side < sides; side++) {
        u64* counted = counts_of(t, side);
        u32 ties = s.ties[side];
        scan_items(tiles_of(t), [&](i64 i) { return counted[i] & 0xffffffffu; }, [&](i64 i, u64 before) {
            u32 here = u32(counted[i]), left = before < ties ? ties - u32(before) : 0;
            tiles[i].found += u32(counted[i] >> 32) + (here < left ? here : left);
            counted[i] = before;
        });
    }
    u64 total = scan_items(tiles_of(t), [&](i64 i) { return u64(tiles[i].found); },
                           [&](i64 i, u64 before) { tiles[i].start = u32(before); });
    if (!threadIdx.x) s.found = u32(total), s.negative = 0;
    __syncthreads();
    u32 *values = array_at<u32>(t, plan.values), *positions = array_at<u32>(t, plan.positions);
    for (int tile = warp; tile < tiles_of(t); tile += warps) {
        i64 begin = i64(tile) * kTile, end = begin + kTile < t.count ? begin + kTile : t.count;
        u32 at = tiles[tile].start, below_zero = 0,
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
                below_zero += chosen && bits >> 31;
                at += __popc(vote);
            }
        }
        below_zero = warp_sum_u32(below_zero);
        if (!lane && below_zero) atomicAdd(&s.negative, below_zero);
    }
}

__device__ __forceinline__ bool is_misled(const Selection& s, const Plan& plan, int sides, i64 k) {
    i64 negative = s.negative, positive = i64(s.found) - negative;
    if (i64(s.found) > plan.room) return true;
    if (sides == 1) return s.least[0] > 1 && i64(s.found) < k;
    return (s.least[0] > 1 && positive < k) || (s.least[1] > 1 && negative < k);
}

const int kCounted =
    16384;  // candidates that a block counts: what it adds to the counts of all costs as much as they do
const int kCounters = 512;  // its threads

// Counts candidates between the two magnitudes that the k-th is expected between. Other blocks of a tensor whose sample
// misled may count what is not used.
extern "C" __global__ void __launch_bounds__(kCounters) count_candidates(Job* job, const Where* groups) {
    __shared__ __attribute__((aligned(16))) u32 histogram[2 * kFirst];
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    int sides = format_of(t).sides;
    i64 found = i64(s.found) < plan.room ? s.found : plan.room, first = i64(where.index) * kCounted;
    if (where.index && first >= found) return;
    bool misled = is_misled(s, plan, sides, wanted_of(t));
    __syncthreads();  // so that all threads have seen the same
    if (misled) {
        if (!where.index) start_over(t, s, plan, sides, histogram);
        return;
    }
    const u32* values = array_at<u32>(t, plan.values);
    u32 base[2], upto[2], shift[2];
#pragma unroll
    for (int side = 0; side < 2; side++) {
        base[side] = s.least[side] & ~((1u << kShift[0]) - 1);
        upto[side] = s.upto[side], shift[side] = s.shift[side];
    }
    for (int b = threadIdx.x; b < 2 * kFine; b += blockDim.x) histogram[b] = 0;
    __syncthreads();
    for (; first < found; first += i64(groups_of(t)) * kCounted) {
        i64 end = first + kCounted < found ? first + kCounted : found;
        for (i64 from = first + threadIdx.x; from < end; from += kAhead * kCounters) {
            u32 bits[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; j++) {
                i64 i = from + j * kCounters;
                bits[j] = i < end ? values[i] : kMagnitude;
            }
#pragma unroll
            for (int j = 0; j < kAhead; j++) {
                bool other = sides == 2 && bits[j] >> 31;
                u32 magnitude = bits[j] & kMagnitude;
                u32 bucket = (magnitude - (other ? base[1] : base[0])) >> (other ? shift[1] : shift[0]);
                if (magnitude < (other ? upto[1] : upto[0]) && bucket < u32(kFine))
                    atomicAdd(&histogram[(other ? kFine : 0) + bucket], 1u);
            }
        }
    }
    __syncthreads();
    for (int b = threadIdx.x; b < 2 * kFine; b += blockDim.x)
        if (histogram[b]) atomicAdd(s.histogram + b, histogram[b]);
}

// ── the k-th magnitude ────────────────────────────────────────────────────────────────────────────

const int kRows = 6;  // of 32 candidates, that a warp loads before it looks at the first
const int kExact = 4096;  // buckets of each side, where the exact k-th is looked for
const int kTallied = 32 * kGroup;  // threads of a block that has a group: a warp for each tile

struct Range {  // magnitudes among which the k-th is: what is not below `end` is sent
    u32 begin, end, rank;  // the k-th's rank among them, from 1 on
};

// Which of the counted buckets has the k-th magnitude of each side; by all threads of a block of kTallied. From below, where the
// count begins, the k-th of n is the (n − k + 1)-th; if no bucket has it, it is above all of them.
__device__ void find_ranges(const Selection& s, int sides, i64 k, Range* ranges) {
    const int kSide = kTallied / 2, kPer = kFine / kSide;
    int side = int(threadIdx.x) / kSide, first = int(threadIdx.x) % kSide * kPer;
    u32 counted[kPer], sum = 0;
#pragma unroll
    for (int j = 0; j < kPer; j++) sum += counted[j] = s.histogram[side * kFine + first + j];
    u32 found = side ? s.negative : sides == 2 ? s.found - s.negative : s.found;
    bool open = side < sides && k > 0 && i64(found) > k;
    u32 wanted = open ? found - u32(k) + 1 : 0, upto = s.upto[side], shift = s.shift[side];
    if (!(threadIdx.x % kSide)) {
        Range range = {0, 0, 0};  // all candidates are sent
        if (k <= 0) range.begin = range.end = ~0u;  // none is
        if (open) range.begin = upto, range.end = kMagnitude + 1, range.rank = u32(k);
        ranges[side] = range;
    }
    u64 total;
    u32 before = u32(block_scan(u64(sum) << 32 * side, &total) >> 32 * side);
    if (wanted > before && wanted <= before + sum) {
        u32 begin = s.least[side] & ~((1u << kShift[0]) - 1);
#pragma unroll
        for (int j = 0; j < kPer; j++) {
            if (wanted > before && wanted <= before + counted[j]) {
                Range range = {begin + (u32(first + j) << shift), 0, before + counted[j] - wanted + 1};
                range.end = range.begin + (1u << shift) < upto ? range.begin + (1u << shift) : upto;
                ranges[side] = range;
            }
            before += counted[j];
        }
    }
    __syncthreads();
}

// Calls `look` for every candidate that is in doubt. They are listed; if there is no room for all, all candidates are
// gone through. Loads come before anything else, as one block has to wait for all of them.
template <typename Look>
__device__ __forceinline__ void for_doubts(const Tensor& t, const Selection& s, const Plan& plan, Look look) {
    const int kBatch = 8;
    bool listed = i64(s.doubts) <= plan.doubtful;
    u32 count = listed ? s.doubts : s.found;
    const Doubt* doubts = array_at<Doubt>(t, plan.doubts);
    const u32 *values = array_at<u32>(t, plan.values), *positions = array_at<u32>(t, plan.positions);
    for (u32 first = threadIdx.x; first < count; first += kBatch * blockDim.x) {
        Doubt batch[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            u32 i = first + j * blockDim.x;
            batch[j] = {0, 0};
            if (i < count && listed) batch[j] = doubts[i];
            if (i < count && !listed) batch[j] = {values[i], positions[i]};
        }
#pragma unroll
        for (int j = 0; j < kBatch; j++)
            if (batch[j].bits) look(batch[j].bits, batch[j].position);
    }
}

// The exact k-th magnitudes where no thread has more than one candidate in doubt: each counts those that are larger.
__device__ void compare_doubts(const Doubt* doubts, u32 count, int sides, Range* now) {
    __shared__ u32 all[kTallied];
    u32 tid = threadIdx.x, mine = tid < count ? doubts[tid].bits : 0, larger = 0, equal = 0;
    all[tid] = mine;
    __syncthreads();
    u32 sign = sides == 2 ? ~kMagnitude : 0, magnitude = mine & kMagnitude;
#pragma unroll 8
    for (u32 i = 0; i < count; i++) {
        u32 other = all[i];
        bool same = !((other ^ mine) & sign);
        larger += same && (other & kMagnitude) > magnitude;
        equal += same && (other & kMagnitude) == magnitude;
    }
    int side = sides == 2 ? int(mine >> 31) : 0;
    u32 rank = now[side].rank;
    __syncthreads();
    if (mine && larger < rank && rank <= larger + equal)
        now[side].begin = magnitude, now[side].end = magnitude + 1, now[side].rank = rank - larger;
    __syncthreads();
}

// The exact k-th magnitude of each side, among those in `now`, bits after bits.
__device__ void narrow_doubts(const Tensor& t, const Selection& s, const Plan& plan, int sides, Range* now,
                              u32* histogram) {
    __shared__ Place places[2][1];
    __shared__ u32 wanted[2][1];
    int tid = threadIdx.x;
    while (now[0].end - now[0].begin > 1 || now[1].end - now[1].begin > 1) {
        u32 shifts[2] = {0, 0}, totals[2];
        for (int side = 0; side < 2; side++)
            while (now[side].end > now[side].begin &&
                   (now[side].end - now[side].begin - 1) >> shifts[side] >= u32(kExact))
                shifts[side]++;
        for (int b = tid; b < 2 * kExact; b += blockDim.x) histogram[b] = 0;
        __syncthreads();
        for_doubts(t, s, plan, [&](u32 bits, u32) {
            int side = sides == 2 ? int(bits >> 31) : 0;
            u32 magnitude = bits & kMagnitude;
            if (magnitude >= now[side].begin && magnitude < now[side].end)
                atomicAdd(&histogram[side * kExact + ((magnitude - now[side].begin) >> shifts[side])], 1u);
        });
        if (tid < 2) wanted[tid][0] = now[tid].rank;
        __syncthreads();
        locate<1>(histogram, kExact, sides, wanted, places, totals);
        if (tid < sides && now[tid].end > now[tid].begin) {
            Place place = places[tid][0];
            now[tid].begin += u32(place.bucket) << shifts[tid];
            u32 end = now[tid].begin + (1u << shifts[tid]);
            if (end < now[tid].end) now[tid].end = end;
            now[tid].rank = place.rank;
        }
        __syncthreads();
    }
}

// The exact k-th magnitude of each side, among those in `ranges`, is in `now` then, and counts of tiles and groups are
// complete. `sums` gets the sum of what is sent of those in doubt, but for those equal to the k-th. These sums are exact:
// they are made of integers, one for each exponent. By one block.
__device__ void end_doubts(const Tensor& t, const Selection& s, const Plan& plan, int sides, const Range* ranges,
                           Range* now, u32* histogram, double* sums) {
    __shared__ u64 of_exponents[2][256];
    int tid = threadIdx.x;
    u64 of_kth[2] = {0, 0};  // of the exponent that nearly all of them have
    if (tid < 2) now[tid] = ranges[tid];
    for (int b = tid; b < 512; b += blockDim.x) of_exponents[b >> 8][b & 255] = 0;
    __syncthreads();
    if (s.doubts <= u32(kTallied))
        compare_doubts(array_at<Doubt>(t, plan.doubts), s.doubts, sides, now);
    else
        narrow_doubts(t, s, plan, sides, now, histogram);
    for_doubts(t, s, plan, [&](u32 bits, u32 position) {
        int side = sides == 2 ? int(bits >> 31) : 0;
        u32 magnitude = bits & kMagnitude, exponent = magnitude >> 23, kth = now[side].begin;
        if (magnitude < kth || magnitude >= ranges[side].end) return;
        u64 one = magnitude > kth ? u64(1) << 32 : 1;
        atomicAdd(counts_of(t, side) + position / kTile, one);
        atomicAdd(group_counts_of(t, side) + position / (kTile * kGroup), one);
        if (magnitude == kth) return;
        u64 mantissa = (magnitude & 0x7fffff) | (exponent ? 0x800000u : 0);
        if (exponent != kth >> 23) {
            atomicAdd(&of_exponents[side][exponent], mantissa);
        } else if (side) {
            of_kth[1] += mantissa;
        } else {
            of_kth[0] += mantissa;
        }
    });
    for (int side = 0; side < 2; side++) {
        u64 sum = of_kth[side];
        for (int by = 16; by; by >>= 1) sum += __shfl_xor_sync(~0u, sum, by);
        if (!(tid & 31) && sum) atomicAdd(&of_exponents[side][now[side].begin >> 23 & 255], sum);
    }
    __threadfence();
    __syncthreads();
    double of_sides[2] = {0, 0};
    for (int e = tid; e < 256; e += blockDim.x)
        for (int side = 0; side < 2; side++)
            of_sides[side] += double(of_exponents[side][e]) * __longlong_as_double(i64((e ? e : 1) - 150 + 1023) << 52);
    block_sums<2>(of_sides, sums);
}

// What the groups before each one count, of both sides at once, half of a block each; `totals` and `sums` get the sums.
__device__ void scan_groups(const Tensor& t, int sides, u64* totals, double* sums) {
    const int kSide = kTallied / 2;
    __shared__ u64 counts_of_warps[kTallied / 32];
    __shared__ double sums_of_warps[kTallied / 32];
    int side = int(threadIdx.x) / kSide, id = int(threadIdx.x) % kSide, warp = int(threadIdx.x) >> 5;
    int groups = side < sides ? groups_of(t) : 0, per = (groups + kSide - 1) / kSide;
    int begin = per * id, end = begin + per < groups ? begin + per : groups;
    u64 *counted = group_counts_of(t, side), count = 0;
    const double* of_groups = sums_of(t, side);
    double sum = 0;
#pragma unroll 4
    for (int i = begin; i < end; i++) count += counted[i], sum += of_groups[i];
    u64 upto = warp_scan(count);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 31) counts_of_warps[warp] = upto, sums_of_warps[warp] = sum;
    __syncthreads();
    u64 before = upto - count, total = 0;
    sum = 0;
    for (int w = side * (kSide / 32); w < (side + 1) * (kSide / 32); w++) {
        if (w < warp) before += counts_of_warps[w];
        total += counts_of_warps[w];
        sum += sums_of_warps[w];
    }
    for (int i = begin; i < end; i++) {
        u64 here = counted[i];
        counted[i] = before;
        before += here;
    }
    if (!id) totals[side] = total, sums[side] = sum;
    __syncthreads();
}

// ── what is sent ──────────────────────────────────────────────────────────────────────────────────

// How many of each tile's candidates are sent, one warp for each tile; the last group finds the k-th magnitude, and
// decides on the side and on the one magnitude of SBC and STC. Its sum is not in the order of docs/wire-format.md but
// always in the same one: in fp64 hardly any of these sums is rounded at all, and decoders need not know.
extern "C" __global__ void __launch_bounds__(kTallied, 3) tally(Job* job, const Where* groups) {
    __shared__ __attribute__((aligned(16))) u32 histogram[2 * kExact];
    __shared__ Range ranges[2];
    __shared__ u64 tile_counts[2][kGroup];
    __shared__ double tile_sums[2][kGroup], doubt_sums[2], sums[2];
    __shared__ Range kth[2];
    __shared__ u64 totals[2];
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    const Format& f = format_of(t);
    int sides = f.sides, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, index = where.index * kGroup + warp;
    Tile tile = {0, 0};
    if (index < tiles_of(t)) tile = array_at<Tile>(t, plan.tiles)[index];
    const u32 *values = array_at<u32>(t, plan.values) + tile.start, *positions = array_at<u32>(t, plan.positions);
    Doubt* doubts = array_at<Doubt>(t, plan.doubts);
    find_ranges(s, sides, wanted_of(t), ranges);
    u32 greater[2] = {0, 0};
    double sum[2] = {0, 0};
    Range of_sides[2] = {ranges[0], ranges[1]};
    for (u32 base = 0; base < tile.found; base += 32 * kRows) {
        u32 bits[kRows];
#pragma unroll
        for (int j = 0; j < kRows; j++) {
            u32 c = base + j * 32 + lane;
            bits[j] = c < tile.found ? values[c] : 0;
        }
#pragma unroll
        for (int j = 0; j < kRows; j++) {
            u32 magnitude = bits[j] & kMagnitude;
            bool other = sides == 2 && bits[j] >> 31;
            bool above = magnitude && magnitude >= (other ? of_sides[1].end : of_sides[0].end);
            bool doubt = magnitude && !above && magnitude >= (other ? of_sides[1].begin : of_sides[0].begin);
            double x = above ? double(__uint_as_float(magnitude)) : 0.0;
            greater[0] += above && !other, greater[1] += above && other;
            sum[0] += other ? 0.0 : x, sum[1] += other ? x : 0.0;
            u32 vote = __ballot_sync(~0u, doubt), start = 0;
            if (!vote) continue;
            if (!lane) start = atomicAdd(&s.doubts, u32(__popc(vote)));
            u32 to = __shfl_sync(~0u, start, 0) + __popc(vote & ((1u << lane) - 1));
            if (doubt && i64(to) < plan.doubtful) doubts[to] = {bits[j], positions[tile.start + base + j * 32 + lane]};
        }
    }
    for (int side = 0; side < sides; side++) {
        u64 count = u64(warp_sum_u32(greater[side])) << 32;
        double x = warp_sum(sum[side]);
        if (lane) continue;
        tile_counts[side][warp] = count, tile_sums[side][warp] = x;
        if (index < tiles_of(t)) counts_of(t, side)[index] = count;
    }
    __syncthreads();
    if (threadIdx.x < u32(sides)) {
        u64 count = 0;
        double x = 0;
        for (int w = 0; w < kGroup; w++) count += tile_counts[threadIdx.x][w], x += tile_sums[threadIdx.x][w];
        group_counts_of(t, threadIdx.x)[where.index] = count;
        sums_of(t, threadIdx.x)[where.index] = x;
    }
    if (!last_block(&job->fits[where.item].tiles_done, groups_of(t))) return;
    end_doubts(t, s, plan, sides, ranges, kth, histogram, doubt_sums);
    scan_groups(t, sides, totals, sums);
    if (threadIdx.x) return;
    job->fits[where.item].tiles_done = 0;
    u64 sent[2] = {0, 0};
    double mean[2] = {0, 0};
    for (int side = 0; side < sides; side++) {
        bool open = ranges[side].end > ranges[side].begin;
        u32 ties = open ? kth[side].rank : 0;
        sent[side] = (totals[side] >> 32) + ties;
        double tied = open ? double(ties) * double(__uint_as_float(kth[side].begin)) : 0.0;
        if (sent[side]) mean[side] = (sums[side] + doubt_sums[side] + tied) / double(sent[side]);
        s.kth[side] = kth[side].begin;  // 0 or ~0 where all or none of the candidates are sent
        s.ties[side] = ties;
    }
    int side = sides == 2 && mean[1] > mean[0];
    s.side = u32(side);
    s.sent = u32(sent[side]);
    s.value = __double2float_rn(side ? -mean[1] : mean[0]);
}

// Positions, values and the new error memory, one warp for each tile. The sign stands above the 31 bits of a position.
extern "C" __global__ void __launch_bounds__(kTallied, 3) send_chosen(Job* job, const Where* groups) {
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    int sides = format_of(t).sides, kind = format_of(t).kind, dtype = t.dtype;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, index = where.index * kGroup + warp;
    if (index >= tiles_of(t)) return;
    Tile tile = array_at<Tile>(t, plan.tiles)[index];
    const u32* values = array_at<u32>(t, plan.values) + tile.start;
    const u32* positions = array_at<u32>(t, plan.positions) + tile.start;
    u32* sent = array_at<u32>(t, plan.sent);
    float* after = t.after;
    u8* out = const_cast<u8*>(job->frames[t.frame].piece[VALUES].bytes);
    u32 side = s.side, kth = s.kth[side], ties = s.ties[side], below = (1u << lane) - 1;
    u64 before = lane < warp ? counts_of(t, int(side))[index - warp + lane] : 0;
    for (int by = 8; by; by >>= 1) before += __shfl_xor_sync(~0u, before, by);
    before = __shfl_sync(~0u, before, 0) + group_counts_of(t, int(side))[where.index];
    u32 equal = u32(before), at = u32(before >> 32) + (equal < ties ? equal : ties);
    float one = received(s.value, dtype);
    for (u32 base = 0; base < tile.found; base += 32 * kRows) {
        u32 loaded[kRows], places[kRows];
#pragma unroll
        for (int j = 0; j < kRows; j++) {
            u32 c = base + j * 32 + lane;
            loaded[j] = c < tile.found ? values[c] : 0;
            places[j] = c < tile.found ? positions[c] : 0;
        }
#pragma unroll
        for (int j = 0; j < kRows; j++) {
            u32 bits = loaded[j], magnitude = bits & kMagnitude, position = places[j];
            bool mine = magnitude && (sides == 1 || bits >> 31 == side);
            u32 equals = __ballot_sync(~0u, mine && magnitude == kth);
            bool chosen = mine && (magnitude > kth || (magnitude == kth && equal + __popc(equals & below) < ties));
            u32 vote = __ballot_sync(~0u, chosen), to = at + __popc(vote & below);
            if (chosen) {
                float u = __uint_as_float(bits), value = one;
                if (kind == ONE_MAGNITUDE) {
                    value = u < 0 ? -one : one;
                } else if (kind == AS_FP32) {
                    value = received(u, dtype);
                    reinterpret_cast<float*>(out)[to] = u;
                } else if (kind != ONE_VALUE) {
                    bool half = kind == AS_FP16;
                    u16 cast = half ? float_to_half(limited(u, 65504.0f))
                                    : float_to_bf16(limited(u, 3.3895313892515355e38f));
                    value = received(half ? half_to_float(cast) : bf16_to_float(cast), dtype);
                    reinterpret_cast<u16*>(out)[to] = cast;
                }
                sent[to] = position | (bits & ~kMagnitude);
                if (after) after[position] = __fsub_rn(u, value);
            }
            equal += __popc(equals);
            at += __popc(vote);
        }
    }
}
