// Sparse frames of all ranks to their mean, once decoding.cu has decoded the classes of their gaps: low bits, positions,
// values, then tile after tile the sum of all ranks in their order. Blocks of 256 threads, as many for each frame as the
// grid has. Nothing is read or written out of bounds, whatever a frame says.
#include "sparse_arrivals.h"

// How many bits a class leaves open; symbols of a damaged stream may be any.
__device__ __forceinline__ int low_bits(u32 c, int m, u32 classes) {
    return c < classes && c >> m ? int(c >> m) - 1 : 0;
}

__device__ __forceinline__ i64 chunk_count(const SparseArrival& s) {
    return (i64(s.count) + kGapChunk - 1) / kGapChunk;
}

// Low bits of each chunk. The last block knows where each begins, and whether all lengths are right.
extern "C" __global__ void measure_gaps(DecodeJob* job, i64 blocks) {
    Arrival& arrival = job->arrivals[blockIdx.x / blocks];
    if (arrival.codec != 5) return;
    SparseArrival& s = sparse_of(arrival);
    if (arrival.broken || !s.count) return;  // nobody writes this here
    GapChunk* chunks = chunks_of(arrival);
    u32 classes = u32(arrival.alphabet);
    for (i64 chunk = blockIdx.x % blocks; chunk < chunk_count(s); chunk += blocks) {
        i64 first = chunk * kGapChunk + threadIdx.x * 8;
        u64 bits = 0, total;
        for (int k = 0; k < 8; k++)
            if (first + k < i64(s.count)) bits += low_bits(arrival.symbols[first + k], s.m, classes);
        block_scan(bits, &total);
        if (!threadIdx.x) chunks[chunk].bits = total;
    }
    if (!last_block(&s.blocks_done, u32(blocks))) return;
    u64 total = scan_items(chunk_count(s), [&](i64 i) { return chunks[i].bits; },
                           [&](i64 i, u64 before) { chunks[i].bits = before; });
    if (threadIdx.x) return;
    s.blocks_done = 0;
    u64 low = (total + 7) / 8, count = s.count, values = 0;
    if (s.kind == ONE_VALUE) values = 4;
    if (s.kind == ONE_MAGNITUDE) values = 4 + (count + 7) / 8;
    if (s.kind == AS_FP32) values = 4 * count;
    if (s.kind >= AS_FP16) values = 2 * count;
    bool sound = low <= arrival.rest_length && low + values == arrival.rest_length;
    if (sound && total & 7) sound = !(arrival.rest[low - 1] >> (total & 7));
    if (sound && s.kind == ONE_MAGNITUDE && count & 7) sound = !(arrival.rest[low + values - 1] >> (count & 7));
    if (sound && s.kind <= ONE_MAGNITUDE) {
        float value = __uint_as_float(little_endian(arrival.rest + low));
        sound = is_finite(value) && value != 0 && (s.kind == ONE_VALUE || value > 0);
    }
    s.low_bytes = low;
    s.sound = sound;
    if (!sound) give_up(job, arrival);
}

// Gaps, and within each chunk positions. The last block knows where each chunk begins.
extern "C" __global__ void join_gaps(DecodeJob* job, i64 blocks) {
    Arrival& arrival = job->arrivals[blockIdx.x / blocks];
    if (arrival.codec != 5) return;
    SparseArrival& s = sparse_of(arrival);
    if (arrival.broken || !s.count || !s.sound) return;  // of a frame without a header, these are the last one's
    GapChunk* chunks = chunks_of(arrival);
    u32 *positions = positions_of(arrival), classes = u32(arrival.alphabet);
    for (i64 chunk = blockIdx.x % blocks; chunk < chunk_count(s); chunk += blocks) {
        i64 first = chunk * kGapChunk + threadIdx.x * 8;
        u32 symbols[8];
        u64 bits = 0, steps = 0, total;
        for (int k = 0; k < 8; k++) {
            symbols[k] = first + k < i64(s.count) ? arrival.symbols[first + k] : 0;
            bits += low_bits(symbols[k], s.m, classes);
        }
        u64 at = chunks[chunk].bits + block_scan(bits, &total), upto[8];
        for (int k = 0; k < 8; k++) {
            u32 c = symbols[k];
            int low = low_bits(c, s.m, classes);
            u64 gap = c < classes ? c : 0;
            if (low) {
                u64 window = 0;  // the bits lie in up to five bytes
                for (int b = 0; b * 8 < int(at & 7) + low; b++) window |= u64(arrival.rest[(at >> 3) + b]) << 8 * b;
                gap = u64((c & ((1u << s.m) - 1)) | 1u << s.m) << low | (window >> (at & 7) & ((u64(1) << low) - 1));
            } else if (c < classes && c >> s.m) {
                gap = (c & ((1u << s.m) - 1)) | 1u << s.m;
            }
            at += low;
            if (first + k < i64(s.count)) steps += gap + 1;
            upto[k] = steps;
        }
        u64 before = block_scan(steps, &total);
        for (int k = 0; k < 8; k++)
            if (first + k < i64(s.count)) positions[first + k] = u32(before + upto[k] - 1);
        if (!threadIdx.x) chunks[chunk].first = total;
    }
    if (!last_block(&s.blocks_done, u32(blocks))) return;
    u64 total = scan_items(chunk_count(s), [&](i64 i) { return chunks[i].first; },
                           [&](i64 i, u64 before) { chunks[i].first = before; });
    if (threadIdx.x) return;
    s.blocks_done = 0;
    if (total <= u64(arrival.count))
        s.sound = 2;
    else
        give_up(job, arrival);
}

// Positions in the tensor, values as they are received, and which of them each tile has.
extern "C" __global__ void place_entries(DecodeJob* job, i64 blocks) {
    Arrival& arrival = job->arrivals[blockIdx.x / blocks];
    if (arrival.codec != 5) return;
    SparseArrival& s = sparse_of(arrival);
    if (arrival.broken || !s.count || s.sound != 2) return;
    u32 *positions = positions_of(arrival), *firsts = firsts_of(arrival);
    float* values = values_of(arrival);
    const u8* from = arrival.rest + s.low_bytes;
    i64 tiles = (arrival.count + kSparseTile - 1) / kSparseTile;
    float one = s.kind <= ONE_MAGNITUDE ? received(__uint_as_float(little_endian(from)), arrival.dtype) : 0.0f;
    bool finite = true;
    for (i64 chunk = blockIdx.x % blocks; chunk < chunk_count(s); chunk += blocks) {
        u32 start = u32(chunks_of(arrival)[chunk].first), mine[kGapChunk / 256], before[kGapChunk / 256];
        for (int k = 0; k < kGapChunk / 256; k++) {
            i64 i = chunk * kGapChunk + k * 256 + threadIdx.x;
            if (i >= i64(s.count)) continue;
            mine[k] = positions[i] + start;
            before[k] = i % kGapChunk ? positions[i - 1] + start : start - 1;  // of the first chunk −1
        }
        __syncthreads();
        for (int k = 0; k < kGapChunk / 256; k++) {
            i64 i = chunk * kGapChunk + k * 256 + threadIdx.x;
            if (i >= i64(s.count)) continue;
            positions[i] = mine[k];
            float value = one;
            if (s.kind == ONE_MAGNITUDE && from[4 + (i >> 3)] >> (i & 7) & 1) value = -one;
            if (s.kind >= AS_FP32) {
                u16 half = s.kind == AS_FP32 ? 0 : u16(from[2 * i] | from[2 * i + 1] << 8);
                value = s.kind == AS_FP32   ? __uint_as_float(little_endian(from + 4 * i))
                        : s.kind == AS_FP16 ? half_to_float(half)
                                            : bf16_to_float(half);
                finite &= is_finite(value);
                value = received(value, arrival.dtype);
            }
            values[i] = value;
            i64 tile = mine[k] / kSparseTile, last = before[k] == ~0u ? i64(-1) : i64(before[k] / kSparseTile);
            for (i64 t = last + 1; t <= tile; t++) firsts[t] = u32(i);
            if (i == i64(s.count) - 1)
                for (i64 t = tile + 1; t <= tiles; t++) firsts[t] = s.count;
        }
    }
    if (!finite) give_up(job, arrival);
}

// The weighted sum of all ranks, in their order, of one tile; a block of 256 threads. Each product and each sum is rounded
// to the dtype, as the host's are.
extern "C" __global__ void __launch_bounds__(256) combine_sparse(DecodeJob* job, const Where* tiles) {
    __shared__ __attribute__((aligned(16))) float sums[kSparseTile];
    __shared__ u32 begins[256], ends[256];
    __shared__ int arrivals[256];
    Where where = tiles[blockIdx.x];
    const Target& target = job->targets[where.item];
    if (job->status->bits) return;
    int dtype = target.dtype, tid = threadIdx.x;
    float weight = job->weight;
    i64 begin = i64(where.index) * kSparseTile;
    int size = target.count - begin < kSparseTile ? int(target.count - begin) : kSparseTile;
    bool any = job->adds;
    for (int k = tid; k < kSparseTile; k += 256) sums[k] = any && k < size ? load(target.out, begin + k, dtype) : 0.0f;
    for (int base = 0; base < job->message_count; base += 256) {
        int ranks = job->message_count - base < 256 ? job->message_count - base : 256;
        __syncthreads();
        if (tid < ranks) {  // where every rank's entries of this tile are
            int index = target.sources[base + tid].arrival;
            arrivals[tid] = index;
            begins[tid] = ends[tid] = 0;
            if (index >= 0 && sparse_of(job->arrivals[index]).count) {
                const u32* firsts = firsts_of(job->arrivals[index]) + where.index;
                begins[tid] = firsts[0], ends[tid] = firsts[1];
            }
        }
        __syncthreads();
        for (int rank = 0; rank < ranks; rank++) {
            if (arrivals[rank] < 0) continue;
            const Arrival& arrival = job->arrivals[arrivals[rank]];
            const u32* positions = positions_of(arrival);
            const float* values = values_of(arrival);
            for (u32 i = begins[rank] + tid; i < ends[rank]; i += 256) {
                float v = values[i];
                if (weight != 1.0f) v = rounded(__fmul_rn(v, weight), dtype);
                int at = int(positions[i] - u32(begin));
                sums[at] = any ? rounded(__fadd_rn(sums[at], v), dtype) : v;
            }
            any = true;
            __syncthreads();
        }
    }
    if (dtype == FP32 && size == kSparseTile && !((u64)(target.out) & 15)) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(target.out) + begin);
        for (int k = tid; k < kSparseTile / 4; k += 256) out[k] = reinterpret_cast<const float4*>(sums)[k];
    } else {
        for (int k = tid; k < size; k += 256) store(target.out, begin + k, sums[k], dtype);
    }
}
