// ECQ's conversion: symbols, outliers and the new error memory, by the grid that grid_search.cu found.
#include "few_counts.h"
#include "grid.h"
#include "warp_sums.h"

const int kListed = 2048;    // outliers of a tile; with more the host encodes the message
const int kAtOnce = 8;       // records of tiles that a thread loads before it uses the first
const int kMostExcess = 24;  // largest parameter of the codes of excesses
const i64 kShort = 1 << 17;  // entries of a frame whose outliers are coded by the last block that converts

// ── conversion ────────────────────────────────────────────────────────────────────────────────────

__device__ int tiles_of(const Job* job, const Stream& stream);
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
        i64 position = t.first - first_of(job, t).first + i64(tile) * kTile + at;
        list[base + rank] = u64(position) | (item >> 13 & 1) << 38 | (item >> 14) << 39;
        atomicAdd(&sizes[bit_length(u32(item >> 14) - s.largest - 1)], 1u);
        if (rank == number - 1) record.last = position;
    }
    __syncthreads();
    if (tid < 32 && sizes[tid]) atomicAdd(&s.sizes[tid], sizes[tid]);
}

// What a tile's threads share.
struct Tile {
    u32 counts[kSymbols], scratch[2 * 256];
    float values[kSymbols];  // of the symbols
    u64 found[kListed];  // outliers: index in the tile | sign << 13 | magnitude << 14
    u32 number;
};

// Notes an outlier, and returns what is left of it.
__device__ __noinline__ float take_apart(Tile& tile, int at, float u, float x, bool negative, float offset, float step,
                                         int dtype) {
    float m = floorf(x < kLimit ? x : kLimit), value = received(__fmul_rn(__fadd_rn(m, offset), step), dtype);
    u32 place = atomicAdd(&tile.number, 1u);
    if (place < kListed) tile.found[place] = u64(at) | u64(negative) << 13 | u64(m) << 14;
    return __fsub_rn(u, negative ? -value : value);
}

// Symbols of u = g + decay·e, how often each comes, outliers, and e ← u − value: one pass over a tile of a tensor.
// FEW: the alphabet has up to 16 symbols. WIDE: fp32 at addresses that are multiples of 16.
template <bool FEW, bool WIDE>
__device__ __forceinline__ void convert_tile(Job* job, Where where, const Scratch& s, Tile& tile) {
    const Tensor& t = job->tensors[where.item];
    const Fit& fit = job->fits[where.item];
    const float step = fit.step, inverse = fit.inverse, decay = t.decay, shift = s.shift, rest = s.offset[1];
    const int largest = s.largest, dtype = WIDE ? FP32 : t.dtype;
    // All places are counted from the begin of the tile, in 32 bits.
    const i64 begin = i64(where.index) * kTile;
    const int end = int(t.count - begin < kTile ? t.count - begin : kTile);
    const float *gradient = static_cast<const float*>(t.gradient) + begin,
                *before = t.before ? t.before + begin : nullptr;
    float* after = t.after ? t.after + begin : nullptr;
    u8* symbols = job->symbols + t.first + begin;
    const bool words = !((u64)(symbols) & 3);
    float bad = 0;  // a NaN if something is not finite
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
                // A sum beyond fp32 is not limited: the host does such a message again.
                float u = before ? sum_of(g[4 * h + k], e[4 * h + k], decay) : g[4 * h + k];
                bad = __fmaf_rn(u, 0.0f, bad);
                float y = __fmul_rn(u, inverse), x = __fadd_rn(fabsf(y), shift);
                // Added to 2^23 and rounded down, its whole part stands in the low bits; NaN is beyond all.
                u32 j = __float_as_uint(__fadd_rd(x, 8388608.0f)) - 0x4b000000u;
                bool here = whole || i + k<end, apart = j> u32(largest);
                int sign = int(__float_as_uint(y)) >> 31, multiple = apart ? 0 : int(j);
                u32 symbol = u32(largest + (multiple ^ sign) - sign);
                left[k] = __fsub_rn(u, tile.values[symbol]);
                if (apart && here) left[k] = take_apart(tile, i + k, u, x, sign != 0, rest, step, dtype);
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
    if (bad != 0) atomicOr(&job->status->bits, u32(NONFINITE));
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
    int multiple = tid - s.largest, magnitude = multiple < 0 ? -multiple : multiple;
    float level = __fadd_rn(float(magnitude), s.offset[magnitude > 1]);
    float value = magnitude ? received(__fmul_rn(level, job->fits[where.item].step), t.dtype) : 0.0f;
    tile.values[tid] = multiple < 0 ? -value : value;
    tile.counts[tid] = 0;
    if (!tid) tile.number = 0;
    __syncthreads();
    bool wide = t.dtype == FP32 && !(((u64)(t.gradient) | (u64)(t.before) | (u64)(t.after)) & 15);
    bool few = s.largest <= 7;
    if (few && wide)
        convert_tile<true, true>(job, where, s, tile);
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
    if (last_block(&s.tiles_done, u32(tiles_of(job, stream)))) plan_outliers(job, stream, s);
}

// ── the list of outliers ──────────────────────────────────────────────────────────────────────────

__device__ int tiles_of(const Job* job, const Stream& stream) {
    const Tensor& last = job->tensors[stream.first_tensor + stream.tensors - 1];
    return last.first_tile + last.tiles - job->tensors[stream.first_tensor].first_tile;
}

// Goes through the records of a frame's tiles, of which every thread has some that lie side by side: `use` gets the
// index of each and what `get` returns for it, of which several are loaded at once.
template <typename Get, typename Use>
__device__ __forceinline__ void for_my_tiles(int tiles, Get get, Use use) {
    int each = (tiles + 255) / 256, end = min(tiles, int(threadIdx.x + 1) * each);
    decltype(get(0)) found[kAtOnce];
    for (int first = int(threadIdx.x) * each; first < end; first += kAtOnce) {
#pragma unroll
        for (int k = 0; k < kAtOnce; k++)
            if (k + first < end) found[k] = get(k + first);
#pragma unroll
        for (int k = 0; k < kAtOnce; k++)
            if (k + first < end) use(k + first, found[k]);
    }
}

// Tells each tile which outlier comes before it, and returns the last of all. By a block.
__device__ i64 find_last_ones(TileRecord* records, int tiles) {
    __shared__ i64 lasts[8];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    auto get = [&](int k) { return records[k].last; };
    i64 last = -1;
    for_my_tiles(tiles, get, [&](int, i64 found) { last = found >= 0 ? found : last; });
    for (int by = 1; by < 32; by <<= 1) {  // positions ascend, so that the largest is the last
        i64 other = __shfl_up_sync(~0u, last, by);
        if (lane >= by && other > last) last = other;
    }
    if (lane == 31) lasts[warp] = last;
    i64 before = __shfl_up_sync(~0u, last, 1), all = -1;
    if (!lane) before = -1;
    __syncthreads();
    for (int w = 0; w < 8; w++) {
        if (w < warp && lasts[w] > before) before = lasts[w];
        if (lasts[w] > all) all = lasts[w];
    }
    for_my_tiles(tiles, get, [&](int k, i64 found) {
        records[k].last = before;
        before = found >= 0 ? found : before;
    });
    return all;
}

// The parameters of the codes, by the first two warps.
__device__ void choose_codes(Scratch& s, i64 last) {
    int lane = threadIdx.x & 31;
    float cost = 0;
    if (threadIdx.x < 32) {
        // Gaps: the best for a geometric distribution with their mean. Where a gap is 2^a longer with the probability q,
        // there are q/(1−q) zeros in the mean.
        float mean = float(last + 1 - i64(s.listed)) / float(s.listed);
        float rate = mean > 8 ? 1 / (mean + 0.5f) : logf(1 + 1 / fmaxf(mean, 1e-9f)),
              q = expf(-float(1u << lane) * rate);
        cost = float(lane) + (mean > 0 ? q / (1 - q) : 0.0f);
    } else {
        // Excesses: by how many bits they have. One is added to what is left, which may make it a bit longer.
        for (int size = 0; size < 32; size++) {
            int left = size - lane;
            float length = left <= 0 ? 1.0f : float(left) + 2.0f / float(1u << left);
            cost += float(s.sizes[size]) * (2 * length - 1 + float(lane));
        }
        if (lane > kMostExcess) cost = 3e38f;
    }
    float least = cost;
    for (int by = 16; by; by >>= 1) least = fminf(least, __shfl_xor_sync(~0u, least, by));
    int best = __ffs(int(__ballot_sync(~0u, cost == least))) - 1;
    if (!lane) (threadIdx.x ? s.b : s.a) = best < 0 ? 0 : best;
}

struct Outlier {
    i64 gap;
    u32 excess;
    bool negative;
};

__device__ __forceinline__ Outlier outlier_at(const u64* list, const TileRecord& record, u32 k, int largest) {
    const u64 mask = (u64(1) << 38) - 1;
    u64 item = list[record.base + k];
    i64 before = k ? i64(list[record.base + k - 1] & mask) : record.last;
    return {i64(item & mask) - before - 1, u32(item >> 39) - u32(largest) - 1, bool(item >> 38 & 1)};
}

__device__ __forceinline__ u64 bits_of(const Outlier& x, int a, int b) {
    return u64(x.gap >> a) + 1 + a + 1 + 2 * bit_length((x.excess >> b) + 1) - 1 + b;
}

__device__ __forceinline__ int code_head(const Scratch& s, u8* out) {
    int n = put_varint(out, s.listed);
    out[n++] = u8(s.a);
    out[n++] = u8(s.b);
    return n;
}

__device__ __forceinline__ u32* codes_of(const Job* job, const Stream& stream) {
    const Frame& frame = job->frames[job->tensors[stream.first_tensor].frame];
    return reinterpret_cast<u32*>(const_cast<u8*>(frame.piece[3].bytes));
}

// How many bits the codes of a tile take, by a warp.
__device__ void measure_tile(Scratch& s, TileRecord& record) {
    u64 bits = 0;
    for (u32 k = threadIdx.x & 31; k < record.count; k += 32)
        bits += bits_of(outlier_at(list_of(s), record, k, s.largest), s.a, s.b);
    for (int by = 16; by; by >>= 1) bits += __shfl_xor_sync(~0u, bits, by);
    if (!(threadIdx.x & 31)) record.bits = bits;
}

// Where the codes of each tile begin, and how long they are together. By a block.
__device__ void lay_out_codes(Job* job, const Stream& stream, Scratch& s, TileRecord* records, int tiles) {
    auto get = [&](int k) { return records[k].bits; };
    u64 bits = 0, all;
    for_my_tiles(tiles, get, [&](int, u64 found) { bits += found; });
    u64 start = block_scan(bits, &all);
    u8 head[16];
    u64 head_bits = 8 * u64(code_head(s, head));
    start += head_bits;
    for_my_tiles(tiles, get, [&](int k, u64 found) {
        records[k].start = start;
        start += found;
    });
    if (threadIdx.x) return;
    u64 length = (head_bits + all + 7) / 8;
    if (length > code_room_of(stream)) {
        atomicOr(&job->status->bits, u32(UNUSUAL));
        length = 0;
    }
    Frame& frame = job->frames[job->tensors[stream.first_tensor].frame];
    frame.piece[1].length = put_varint(const_cast<u8*>(frame.piece[1].bytes), length);
    frame.piece[3].length = s.code_bytes = length;
}

__device__ __forceinline__ void put_bits(u32* codes, u64 at, u64 value) {  // of at most 32 bits
    u64 shifted = value << (at & 31);
    if (u32(shifted)) atomicOr(&codes[at >> 5], u32(shifted));
    if (shifted >> 32) atomicOr(&codes[(at >> 5) + 1], u32(shifted >> 32));
}

__device__ __forceinline__ void put_code(u32* codes, u64 at, const Outlier& x, int a, int b) {
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

// The codes of a tile's outliers, by a warp, and those before all of them with the first tile. They are zeros before.
__device__ void write_tile(Scratch& s, const TileRecord& record, bool first, u32* codes) {
    int lane = threadIdx.x & 31, a = s.a, b = s.b;
    if (first && !lane) {
        u8 head[16];
        int n = code_head(s, head);
        for (int k = 0; k < n; k++) put_bits(codes, 8 * k, head[k]);
    }
    u64 start = record.start;
    for (u32 base = 0; base < record.count; base += 32) {
        bool here = base + lane < record.count;
        Outlier x = {0, 0, false};
        if (here) x = outlier_at(list_of(s), record, base + lane, s.largest);
        u64 bits = here ? bits_of(x, a, b) : 0, upto = warp_scan(bits);
        if (here) put_code(codes, start + upto - bits, x, a, b);
        start += __shfl_sync(~0u, upto, 31);
    }
}

// By the last block of a frame: which outlier comes before each tile, and the parameters of the codes; of short frames
// also the codes.
__device__ void plan_outliers(Job* job, const Stream& stream, Scratch& s) {
    const Tensor& t = job->tensors[stream.first_tensor];
    int tiles = tiles_of(job, stream), warp = threadIdx.x >> 5;
    Frame& frame = job->frames[t.frame];
    if (!s.listed) {
        if (!threadIdx.x) {
            frame.piece[1].length = put_varint(const_cast<u8*>(frame.piece[1].bytes), 0);
            frame.piece[3].length = s.code_bytes = 0;
        }
        return;
    }
    TileRecord* records = records_of(job, t);
    i64 last = find_last_ones(records, tiles);
    if (warp < 2) choose_codes(s, last);
    __syncthreads();
    if (stream.count > kShort) return;  // the kernels behind do the rest
    for (int k = warp; k < tiles; k += 8) measure_tile(s, records[k]);
    __syncthreads();
    lay_out_codes(job, stream, s, records, tiles);
    __syncthreads();
    u32* codes = codes_of(job, stream);
    for (u64 k = threadIdx.x; k < (s.code_bytes + 3) / 4; k += blockDim.x) codes[k] = 0;
    __syncthreads();
    if (!s.code_bytes) return;
    for (int k = warp; k < tiles; k += 8) write_tile(s, records[k], !k, codes);
}

// The tile of a long frame that this warp works on, if there is one; a block has a group of eight.
__device__ __forceinline__ bool tile_of_warp(const Job* job, Where where, const Tensor& t, const Scratch& s,
                                             int* tile) {
    *tile = 8 * where.index + int(threadIdx.x >> 5);
    return stream_of(job, t).count > kShort && s.listed && *tile < t.tiles;
}

// How many bits the codes of each tile take; the last block of a frame finds out where they go.
extern "C" __global__ void __launch_bounds__(256) measure_outliers(Job* job, const Where* groups) {
    __shared__ bool last;
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    Scratch& s = scratch_of(job, t);
    int tile, tiles = tiles_of(job, stream), here = min(8, t.tiles - 8 * where.index);
    if (tile_of_warp(job, where, t, s, &tile)) measure_tile(s, records_of(job, t)[tile]);
    __threadfence();
    __syncthreads();
    if (!threadIdx.x) last = atomicAdd(&s.measured, u32(here)) + u32(here) == u32(tiles);
    __syncthreads();
    __threadfence();
    if (last && s.listed && stream.count > kShort)
        lay_out_codes(job, stream, s, records_of(job, job->tensors[stream.first_tensor]), tiles);
}

// Zeros where codes will be.
extern "C" __global__ void __launch_bounds__(256) clear_outliers(Job* job, const Where* groups) {
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    const Scratch& s = scratch_of(job, t);
    if (!s.listed || stream.count <= kShort) return;
    // Every tile has as many words; a group has those of its tiles.
    u64 words = (s.code_bytes + 3) / 4, total = u64(tiles_of(job, stream)), each = (words + total - 1) / total;
    u64 begin = each * u64(t.first_tile - first_of(job, t).first_tile + 8 * where.index), end = begin + 8 * each;
    u32* codes = codes_of(job, stream);
    for (u64 k = begin + threadIdx.x; k < end && k < words; k += blockDim.x) codes[k] = 0;
}

// The codes of each tile's outliers.
extern "C" __global__ void __launch_bounds__(256) write_outliers(Job* job, const Where* groups) {
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Stream& stream = stream_of(job, t);
    Scratch& s = scratch_of(job, t);
    int tile;
    if (!tile_of_warp(job, where, t, s, &tile) || !s.code_bytes) return;
    write_tile(s, records_of(job, t)[tile], !tile && where.item == stream.first_tensor, codes_of(job, stream));
}
