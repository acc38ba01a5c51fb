// ECQ's conversion: symbols, outliers and the new error memory, by the grid that grid_search.cu found.
#include "few_counts.h"
#include "grid.h"

const int kListed = 2048;    // outliers of a tile; with more the host encodes the message
const int kAtOnce = 8;       // records of tiles that a thread loads before it uses the first
const int kMostExcess = 24;  // largest parameter of the codes of excesses

// ── conversion ────────────────────────────────────────────────────────────────────────────────────

__device__ void plan_outliers(Job* job, const Stream& stream, Scratch& s);

__device__ __forceinline__ TileRecord* records_of(const Job* job, const Tensor& t) {
    return reinterpret_cast<TileRecord*>(job->tile_sums) + t.first_tile;
}

// A tile's outliers, in any order, to the list, in their order.
__device__ void list_outliers(Job* job, const Tensor& t, int tile, Scratch& s, const u64* found, u32 number,
                              u32* scratch) {
    const Stream& stream = stream_of(job, t);
    __shared__ u32 base, sizes[32];
    int tid = threadIdx.x;
    u32 *mask = scratch, *before = scratch + 256;
    mask[tid] = 0;
    if (tid < 32) sizes[tid] = 0;
    __syncthreads();
    bool fits = number <= kListed;
    if (!tid && number) {
        base = atomicAdd(&s.listed, number);
        if (!fits || i64(base) + number > capacity_of(stream)) atomicOr(&job->status->bits, u32(UNUSUAL));
    }
    for (u32 k = tid; fits && k < number; k += 256) atomicOr(&mask[found[k] >> 5 & 255], 1u << (found[k] & 31));
    u64 all;
    before[tid] = 0;
    __syncthreads();
    before[tid] = u32(block_scan(u64(__popc(mask[tid])), &all));
    __syncthreads();
    fits = fits && i64(base) + number <= capacity_of(stream);
    TileRecord& record = records_of(job, t)[tile];
    u64* list = list_of(s);
    if (!fits) number = 0;
    if (!tid) record.base = base, record.count = number, record.last = -1;
    __syncthreads();
    for (u32 k = tid; k < number; k += 256) {
        u64 item = found[k];
        u32 at = u32(item) & 8191, rank = before[at >> 5] + __popc(mask[at >> 5] & ((1u << (at & 31)) - 1));
        list[base + rank] = item;
        atomicAdd(&sizes[bit_length(u32(item >> 14) - s.largest - 1)], 1u);
        if (rank == number - 1) record.last = t.first - first_of(job, t).first + i64(tile) * kTile + at;
    }
    __syncthreads();
    if (tid < 32 && sizes[tid]) atomicAdd(&s.sizes[tid], sizes[tid]);
}

// What a tile's threads share.
struct Tile {
    u32 counts[kSymbols], scratch[2 * 256];
    u64 found[kListed];  // outliers: index in the tile | sign << 13 | magnitude << 14
    u32 number;
};

// Symbols of u = g + decay·e, how often each comes, outliers, and e ← u − value: one pass over a tile of a tensor.
// FEW: the alphabet has up to 16 symbols. WIDE: fp32 at addresses that are multiples of 16.
template <bool FEW, bool WIDE>
__device__ __forceinline__ void convert_tile(Job* job, Where where, const Scratch& s, Tile& tile) {
    const Tensor& t = job->tensors[where.item];
    const Fit& fit = job->fits[where.item];
    const float step = fit.step, inverse = fit.inverse, decay = t.decay, shift = s.shift;
    const float first = s.offset[0], rest = s.offset[1];
    const int largest = s.largest, dtype = WIDE ? FP32 : t.dtype;
    // All places are counted from the begin of the tile, in 32 bits.
    const i64 begin = i64(where.index) * kTile;
    const int end = int(t.count - begin < kTile ? t.count - begin : kTile);
    const float *gradient = static_cast<const float*>(t.gradient) + begin,
                *before = t.before ? t.before + begin : nullptr;
    float* after = t.after ? t.after + begin : nullptr;
    u8* symbols = job->symbols + t.first + begin;
    const bool words = !((u64)(symbols) & 3);
    bool finite = true;
    FewCounts few = {0, 0, 0};
    for (int base = 0; base < end; base += 2048) {
        float g[8], e[8];
        // Both groups of four are loaded before the first is used.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int i = base + 1024 * h + 4 * int(threadIdx.x);
            if (WIDE && i + 4 <= end) {
                float4 v = *reinterpret_cast<const float4*>(gradient + i);
                g[4 * h] = v.x, g[4 * h + 1] = v.y, g[4 * h + 2] = v.z, g[4 * h + 3] = v.w;
                float4 w = before ? *reinterpret_cast<const float4*>(before + i) : make_float4(0, 0, 0, 0);
                e[4 * h] = w.x, e[4 * h + 1] = w.y, e[4 * h + 2] = w.z, e[4 * h + 3] = w.w;
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    bool here = i + k < end;
                    g[4 * h + k] = here ? load(t.gradient, begin + i + k, dtype) : 0.0f;
                    e[4 * h + k] = here && before ? before[i + k] : 0.0f;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int i = base + 1024 * h + 4 * int(threadIdx.x);
            if (i >= end) break;
            bool whole = i + 4 <= end;
            u32 packed = 0;
            float left[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float sum = before ? sum_of(g[4 * h + k], e[4 * h + k], decay) : g[4 * h + k];
                finite &= is_finite(sum);
                float u = before ? limited(sum, kFloatMax) : sum;
                float y = __fmul_rn(u, inverse), m = magnitude_of(y, shift);
                bool negative = y < 0, here = whole || i + k < end;
                // The value is that of the multiple, whether it has a symbol or is an outlier.
                float value = received(__fmul_rn(__fadd_rn(m, m == 1.0f ? first : rest), step), dtype);
                value = m == 0.0f ? 0.0f : negative ? -value : value;
                left[k] = __fsub_rn(u, value);
                int j = int(m);
                bool apart = j > largest;
                u32 symbol = u32(apart ? largest : negative ? largest - j : largest + j);
                if (apart && here) {
                    u32 place = atomicAdd(&tile.number, 1u);
                    if (place < kListed) tile.found[place] = u64(i + k) | u64(negative) << 13 | u64(j) << 14;
                }
                packed |= symbol << 8 * k;
                if (FEW && here) few.add(symbol);
                if (!FEW && here) atomicAdd(&tile.counts[symbol], 1u);
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
    if (!finite) atomicOr(&job->status->bits, u32(NONFINITE));
    if (FEW) {
#pragma unroll
        for (int k = 0; k < 16; k++) {
            if (k > 2 * largest) break;
            u32 sum = warp_sum_u32(few.of(k));
            if (!(threadIdx.x & 31) && sum) atomicAdd(&tile.counts[k], sum);
        }
    }
}

// One block of 256 threads for each tile.
extern "C" __global__ void __launch_bounds__(256, 4) convert(Job* job, const Where* tiles) {
    __shared__ Tile tile;
    Where where = tiles[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    Scratch& s = scratch_of(job, t);
    int tid = threadIdx.x;
    tile.counts[tid] = 0;
    if (!tid) tile.number = 0;
    __syncthreads();
    bool wide = t.dtype == FP32 && !(((u64)(t.gradient) | (u64)(t.before) | (u64)(t.after)) & 15);
    bool few = s.largest <= 7;
    if (few && wide)
        convert_tile<true, true>(job, where, s, tile);
    else if (few)
        convert_tile<true, false>(job, where, s, tile);
    else if (wide)
        convert_tile<false, true>(job, where, s, tile);
    else
        convert_tile<false, false>(job, where, s, tile);
    __syncthreads();
    if (tile.counts[tid]) atomicAdd(stream.counts + tid, u64(tile.counts[tid]));
    if (tile.number) {
        list_outliers(job, t, where.index, s, tile.found, tile.number, tile.scratch);
    } else if (!tid) {
        TileRecord& record = records_of(job, t)[where.index];
        record.base = record.count = 0, record.last = -1;
    }
    const Tensor& last = job->tensors[stream.first_tensor + stream.tensors - 1];
    if (last_block(&s.tiles_done, last.first_tile + last.tiles - first_of(job, t).first_tile))
        plan_outliers(job, stream, s);
}

// ── the list of outliers ──────────────────────────────────────────────────────────────────────────

// Which outlier comes before each tile, and the parameters of the codes. By the last block of a frame.
__device__ void plan_outliers(Job* job, const Stream& stream, Scratch& s) {
    __shared__ i64 lasts[256];
    const Tensor &t = job->tensors[stream.first_tensor], &end = job->tensors[stream.first_tensor + stream.tensors - 1];
    TileRecord* records = records_of(job, t);
    int tid = threadIdx.x, tiles = end.first_tile + end.tiles - t.first_tile, each = (tiles + 255) / 256;
    i64 last = -1, found[kAtOnce];
    for (int first = tid * each; first < tiles && first < (tid + 1) * each; first += kAtOnce) {
#pragma unroll
        for (int k = 0; k < kAtOnce; k++)
            found[k] = k + first < tiles && k + first < (tid + 1) * each ? records[k + first].last : -1;
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) last = found[k] >= 0 ? found[k] : last;
    }
    lasts[tid] = last;
    __syncthreads();
    last = -1;
    for (int k = tid - 1; k >= 0 && last < 0; k--) last = lasts[k];
    for (int first = tid * each; first < tiles && first < (tid + 1) * each; first += kAtOnce) {
#pragma unroll
        for (int k = 0; k < kAtOnce; k++)
            found[k] = k + first < tiles && k + first < (tid + 1) * each ? records[k + first].last : -1;
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
            if (k + first < tiles && k + first < (tid + 1) * each) records[k + first].last = last;
            last = found[k] >= 0 ? found[k] : last;
        }
    }
    last = -1;
    for (int k = 255; k >= 0 && last < 0; k--) last = lasts[k];
    __shared__ double costs[64];
    int parameter = tid & 31;
    if (tid < 32) {
        // Gaps: the best for a geometric distribution with their mean. Where a gap is 2^a longer with the probability q,
        // there are q/(1−q) zeros in the mean.
        double mean = double(last + 1 - i64(s.listed)) / double(s.listed ? s.listed : 1);
        double q = mean > 0 ? exp(double(1u << parameter) * log(mean / (mean + 1))) : 0.0;
        costs[tid] = parameter + q / (1 - q);
    } else if (tid < 64) {
        // Excesses: by how many bits they have. One is added to what is left, which may make it a bit longer.
        double bits = 0;
        for (int size = 0; size < 32; size++) {
            int left = size - parameter;
            double length = left <= 0 ? 1 : left + 1.0 / double(1u << (left - 1));
            bits += double(s.sizes[size]) * (2 * length - 1 + parameter);
        }
        costs[tid] = bits;
    }
    __syncthreads();
    if (tid) return;
    s.a = s.b = 0;
    for (int k = 1; k < 32; k++)
        if (costs[k] < costs[s.a]) s.a = k;
    for (int k = 1; k <= kMostExcess; k++)
        if (costs[32 + k] < costs[32 + s.b]) s.b = k;
}

struct Outlier {
    i64 gap;
    u32 excess;
    bool negative;
};

__device__ __forceinline__ Outlier outlier_at(const u64* list, const TileRecord& record, i64 first, u32 k,
                                              int largest) {
    u64 item = list[record.base + k];
    i64 at = first + i64(item & 8191), before = k ? first + i64(list[record.base + k - 1] & 8191) : record.last;
    return {at - before - 1, u32(item >> 14) - u32(largest) - 1, bool(item >> 13 & 1)};
}

__device__ __forceinline__ u64 bits_of(const Outlier& x, int a, int b) {
    return u64(x.gap >> a) + 1 + a + 1 + 2 * bit_length((x.excess >> b) + 1) - 1 + b;
}

__device__ __forceinline__ i64 start_of(const Job* job, const Tensor& t, int tile) {
    return t.first - first_of(job, t).first + i64(tile) * kTile;
}

__device__ __forceinline__ int code_head(const Scratch& s, u8* out) {
    int n = put_varint(out, s.listed);
    out[n++] = u8(s.a);
    out[n++] = u8(s.b);
    return n;
}

// How many bits the codes of each tile take; the last block of a frame finds out where they go.
extern "C" __global__ void measure_outliers(Job* job, const Where* tiles) {
    Where where = tiles[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    Scratch& s = scratch_of(job, t);
    TileRecord& record = records_of(job, t)[where.index];
    int tid = threadIdx.x;
    u64 bits = 0, all = 0;
    for (u32 k = tid; k < record.count; k += blockDim.x)
        bits += bits_of(outlier_at(list_of(s), record, start_of(job, t, where.index), k, s.largest), s.a, s.b);
    if (record.count) block_scan(bits, &all);
    if (!tid) record.bits = all;
    const Tensor &first = first_of(job, t), &last = job->tensors[stream.first_tensor + stream.tensors - 1];
    int total = last.first_tile + last.tiles - first.first_tile, each = (total + 255) / 256;
    if (!last_block(&s.measured, total)) return;
    TileRecord* records = records_of(job, first);
    bits = 0;
    u64 found[kAtOnce];
    for (int base = tid * each; base < total && base < (tid + 1) * each; base += kAtOnce) {
#pragma unroll
        for (int k = 0; k < kAtOnce; k++)
            found[k] = k + base < total && k + base < (tid + 1) * each ? records[k + base].bits : 0;
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) bits += found[k];
    }
    u64 start = block_scan(bits, &all);
    u8 head[16];
    start += 8 * u64(code_head(s, head));
    for (int base = tid * each; base < total && base < (tid + 1) * each; base += kAtOnce) {
#pragma unroll
        for (int k = 0; k < kAtOnce; k++)
            found[k] = k + base < total && k + base < (tid + 1) * each ? records[k + base].bits : 0;
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
            if (k + base < total && k + base < (tid + 1) * each) records[k + base].start = start;
            start += found[k];
        }
    }
    if (tid) return;
    u64 length = s.listed ? (8 * u64(code_head(s, head)) + all + 7) / 8 : 0;
    if (length > code_room_of(stream)) {
        atomicOr(&job->status->bits, u32(UNUSUAL));
        length = 0;
    }
    Frame& frame = job->frames[t.frame];
    frame.piece[1].length = put_varint(const_cast<u8*>(frame.piece[1].bytes), length);
    frame.piece[3].length = s.code_bytes = length;
}

// Zeros where codes will be.
extern "C" __global__ void clear_outliers(Job* job, const Where* tiles) {
    Where where = tiles[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    const Scratch& s = scratch_of(job, t);
    const Tensor &first = first_of(job, t), &last = job->tensors[stream.first_tensor + stream.tensors - 1];
    u64 words = (s.code_bytes + 3) / 4, total = last.first_tile + last.tiles - first.first_tile;
    u64 each = (words + total - 1) / total, begin = each * u64(t.first_tile - first.first_tile + where.index);
    u32* codes = reinterpret_cast<u32*>(const_cast<u8*>(job->frames[t.frame].piece[3].bytes));
    for (u64 k = begin + threadIdx.x; k < begin + each && k < words; k += blockDim.x) codes[k] = 0;
}

__device__ __forceinline__ void put_bits(u32* codes, u64 at, u64 value) {  // of at most 32 bits
    u64 shifted = value << (at & 31);
    if (u32(shifted)) atomicOr(&codes[at >> 5], u32(shifted));
    if (shifted >> 32) atomicOr(&codes[(at >> 5) + 1], u32(shifted >> 32));
}

// The codes of each tile's outliers.
extern "C" __global__ void write_outliers(Job* job, const Where* tiles) {
    __shared__ u64 done;
    Where where = tiles[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    Scratch& s = scratch_of(job, t);
    const TileRecord& record = records_of(job, t)[where.index];
    if (!s.code_bytes) return;
    u32* codes = reinterpret_cast<u32*>(const_cast<u8*>(job->frames[t.frame].piece[3].bytes));
    int tid = threadIdx.x, a = s.a, b = s.b;
    if (!tid && !where.index && where.item == stream.first_tensor) {
        u8 head[16];
        int n = code_head(s, head);
        for (int k = 0; k < n; k++) put_bits(codes, 8 * k, head[k]);
    }
    if (!tid) done = record.start;
    __syncthreads();
    for (u32 base = 0; base < record.count; base += blockDim.x) {
        u32 k = base + tid;
        Outlier x = {0, 0, false};
        u64 bits = 0, all;
        if (k < record.count) {
            x = outlier_at(list_of(s), record, start_of(job, t, where.index), k, s.largest);
            bits = bits_of(x, a, b);
        }
        u64 at = block_scan(bits, &all) + done;
        if (k < record.count) {
            at += u64(x.gap >> a);
            put_bits(codes, at++, 1);
            if (a > 24) put_bits(codes, at + 24, u64(x.gap) >> 24 & ((u64(1) << (a - 24)) - 1));
            put_bits(codes, at, u64(x.gap) & ((u64(1) << (a > 24 ? 24 : a)) - 1));
            at += a;
            put_bits(codes, at++, x.negative);
            u32 v = (x.excess >> b) + 1;
            int size = bit_length(v) - 1;
            at += size;
            put_bits(codes, at++, 1);
            put_bits(codes, at, v & ((1u << size) - 1));
            at += size;
            put_bits(codes, at, x.excess & ((1u << b) - 1));
        }
        __syncthreads();
        if (!tid) done += all;
        __syncthreads();
    }
}
