// Streams of symbols to bytes: the choice of model and precision, rANS, and the frames around it.
#include "frequencies.h"

const int kBetas = 128;
const u32 kLow = 1u << 14;
// A lane costs two bytes. A GPU wants many lanes, each with few rows to walk: this many bits for each keeps their cost
// below 0.8%, and no lane walks more rows than this.
const double kBitsPerLane = 2048;
const i64 kMostRows = 2048;
const double kLarge = 1 << 20, kTolerance = 1.006;  // as in compress/precision.py
const int kMasses = 2 * kBetas * 8 + 32;            // bytes in front of the masses, see minifloat.cu

__device__ __forceinline__ int gamma_bits(u32 f) { return 2 * (32 - __clz(int(f + 1))) - 1; }

// ── the choice ────────────────────────────────────────────────────────────────────────────────────

struct Choice {
    double bits;
    int model, precision;
};

// One block for each stream, with a thread for each symbol (32 or 256 of them): the cheapest model and precision, the layout of lanes and chunks, the head.
extern "C" __global__ void choose(Job* job) {
    __shared__ u64 counts[kSymbols], shaped[kSymbols];
    __shared__ u32 frequencies[kSymbols];
    __shared__ int beta, zero_mass, fitted;
    __shared__ Choice choices[6];
    __shared__ u64 total;
    Stream& stream = job->streams[blockIdx.x];
    int s = threadIdx.x, K = stream.alphabet;
    u64 mine = s < K ? stream.counts[s] : 0;
    counts[s] = mine;
    if (s < kSymbols) stream.counts[s] = 0;  // for the next message
    u64 sum, used;
    block_scan(mine, &sum);
    block_scan(mine != 0, &used);
    int width = 1;
    while (1 << width < K) width++;
    if (!s) total = sum;
    if (!s) {
        // Of several small tensors the one with the middle β stands for all.
        fitted = 0;
        int n = 0;
        for (int i = 0; i < stream.tensors; i++) n += job->fits[stream.first_tensor + i].nonzero != 0;
        for (int i = 0; n && stream.models & 1 && i < stream.tensors && !fitted; i++) {
            const Fit& fit = job->fits[stream.first_tensor + i];
            if (!fit.nonzero) continue;
            int below = 0;
            for (int j = 0; j < stream.tensors; j++) {
                const Fit& other = job->fits[stream.first_tensor + j];
                below += other.nonzero && (other.beta < fit.beta || (other.beta == fit.beta && j < i));
            }
            if (below == n / 2) beta = fit.beta, zero_mass = fit.zero_mass, fitted = 1;
        }
    }
    __syncthreads();
    i64 n = i64(total);
    if (used <= 1) {  // all symbols are the same
        if (mine) stream.head[1] = u8(s);
        if (!s) {
            stream.used_coder = CONSTANT, stream.chunks = 0, stream.data = 0;
            stream.head[0] = CONSTANT, stream.head_length = 2, stream.length = 2;
        }
        return;
    }
    double raw_bits = double(n) * width;
    int precisions[3], many = 0, found = 0;
    if (K > 16) {
        precisions[many++] = 14;
    } else {
        precisions[many++] = 8;
        if (double(n) < kLarge) precisions[many++] = 11;
        precisions[many++] = 12;
    }
    if (stream.coder == RANS) {
        for (int p = 0; p < many; p++) {
            for (int model = GENNORM; model <= HISTOGRAM; model++) {
                if (!(stream.models >> (model - 1) & 1) || (model == GENNORM && !fitted)) continue;
                if (model == GENNORM) {
                    const u32* masses = reinterpret_cast<const u32*>(static_cast<const u8*>(stream.format) + kMasses);
                    int off = s < stream.zero ? stream.zero - s : s - stream.zero;
                    if (s < K) shaped[s] = u64(masses[beta * 128 + off]) * u64(256 - zero_mass) + (off ? 0 : u64(zero_mass) << 16);
                    __syncthreads();
                    normalize(shaped, frequencies, K, precisions[p]);
                } else {
                    normalize(counts, frequencies, K, precisions[p]);
                }
                u32 f = s < K ? frequencies[s] : 0;
                double cost = 0;
                if (mine) cost = f ? double(mine) * (precisions[p] - log2(double(f))) : 1e300;
                cost = block_sum(cost);
                double table = block_sum(s < K && s != stream.zero ? double(gamma_bits(f)) : 0.0);
                if (!s) {
                    double side = model == GENNORM ? 16.0 : 8.0 * double((i64(table) + 7) / 8);
                    choices[found] = {cost + side, model, precisions[p]};
                }
                found++;
                __syncthreads();
            }
        }
    }
    __shared__ Choice chosen;
    if (!s) {
        double least = 1e301;
        for (int i = 0; i < found; i++) least = choices[i].bits < least ? choices[i].bits : least;
        double limit = double(n) >= kLarge ? least * kTolerance : least;
        chosen = {0, 0, 0};
        for (int i = found - 1; i >= 0; i--)
            if (choices[i].bits <= limit) chosen = choices[i];
        if (chosen.model && chosen.bits + 32 >= raw_bits) chosen.model = 0;
    }
    __syncthreads();
    if (!chosen.model) {
        if (!s) {
            stream.used_coder = RAW;
            stream.head[0] = RAW;
            stream.head_length = 1;
            stream.precision = width;
            // Chunks of a multiple of 8 symbols, packed and put one after the other.
            i64 size = (n + stream.most_chunks - 1) / stream.most_chunks;
            size = size < 16384 ? 16384 : (size + 63) / 64 * 64;
            stream.chunk_size = size;
            stream.chunks = int((n + size - 1) / size);
        }
        return;
    }
    if (chosen.model == GENNORM) {
        const u32* masses = reinterpret_cast<const u32*>(static_cast<const u8*>(stream.format) + kMasses);
        int off = s < stream.zero ? stream.zero - s : s - stream.zero;
        if (s < K) shaped[s] = u64(masses[beta * 128 + off]) * u64(256 - zero_mass) + (off ? 0 : u64(zero_mass) << 16);
        __syncthreads();
        normalize(shaped, frequencies, K, chosen.precision);
    } else {
        normalize(counts, frequencies, K, chosen.precision);
    }
    u32 f = s < K ? frequencies[s] : 0;
    u64 all, start = block_scan(f, &all);
    if (s < K && f) {
        int shift = 0;
        while (1u << shift < f) shift++;
        stream.reciprocal[s] = u32(((u64(1) << (31 + shift)) + f - 1) / f);
        stream.packed[s] = (f - 1) | u32(start) << 14 | u32(shift) << 28;
    }
    // The table, as Elias-gamma codes in the order of symbols, bits from the lowest of each byte upwards.
    __shared__ u32 bits[kMostHead / 4];
    for (int j = s; j < kMostHead / 4; j += blockDim.x) bits[j] = 0;
    __syncthreads();
    bool sent = chosen.model == HISTOGRAM && s < K && s != stream.zero;
    u64 table_bits, at = block_scan(sent ? u64(gamma_bits(f)) : 0, &table_bits);
    if (sent) {
        int size = 32 - __clz(int(f + 1));
        u32 at_bit = u32(at) + size - 1;  // behind the zeros; the number follows, its highest bit first
        for (int b = size - 1; b >= 0; b--, at_bit++)
            if ((f + 1) >> b & 1) atomicOr(&bits[at_bit >> 5], 1u << (at_bit & 31));
    }
    __syncthreads();
    int table_bytes = chosen.model == HISTOGRAM ? int((table_bits + 7) / 8) : 2;
    if (chosen.model == HISTOGRAM)
        for (int j = s; j < table_bytes; j += blockDim.x) stream.head[1 + j] = u8(bits[j >> 2] >> 8 * (j & 3));
    if (s) return;
    stream.used_coder = RANS;
    stream.model = chosen.model;
    stream.precision = chosen.precision;
    stream.head[0] = u8(RANS | chosen.model << 2 | chosen.precision << 4);
    if (chosen.model == GENNORM) stream.head[1] = u8(beta), stream.head[2] = u8(zero_mass);
    double lanes = chosen.bits / kBitsPerLane, least_lanes = double((n + kMostRows - 1) / kMostRows);
    lanes = lanes < least_lanes ? least_lanes : lanes;
    int lane_bits = 0;
    while (lane_bits < 6 && double(2 << lane_bits) <= lanes) lane_bits++;
    i64 chunks = i64(lanes) / 64, blocks = (n + 63) / 64;
    chunks = chunks < 1 ? 1 : chunks > stream.most_chunks ? stream.most_chunks : chunks;
    chunks = chunks > blocks ? blocks : chunks;
    i64 size = ((n + chunks - 1) / chunks + 63) / 64 * 64;
    chunks = (n + size - 1) / size;  // rounding up may have left the last ones empty
    size = ((n + chunks - 1) / chunks + 63) / 64 * 64;
    while (size * (chunks - 1) >= n) {
        chunks--;
        size = ((n + chunks - 1) / chunks + 63) / 64 * 64;
    }
    stream.lane_bits = lane_bits;
    stream.chunks = int(chunks);
    stream.chunk_size = size;
    int head = 1 + table_bytes;
    stream.head[head++] = u8(lane_bits | (chunks > 1 ? 128 : 0));
    if (chunks > 1) head += put_varint(stream.head + head, u64(chunks));
    stream.head_length = head;
}

// ── rANS ──────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ u8* chunk_room(const Stream& stream, int chunk) {
    return stream.coded + i64(chunk) * (2 * stream.chunk_size + 256);
}

// One row of 64 lanes, of which a thread has two. A lane emits its low byte, or two bytes, if its state is too large.
// There are no branches: lanes that do nothing keep their states by selection.
template <bool TWICE>
__device__ __forceinline__ void encode_row(uint2 t0, uint2 t1, bool has0, bool has1, int precision, u32 below, u32& x0, u32& x1, u8*& p) {
    u32 f0 = (t0.y & 16383) + 1, f1 = (t1.y & 16383) + 1;
    u32 limit0 = f0 << (22 - precision), limit1 = f1 << (22 - precision);
    u32 y0 = x0, y1 = x1;
    bool once0 = has0 & (y0 >= limit0), once1 = has1 & (y1 >= limit1);
    u32 vote0 = __ballot_sync(~0u, once0), vote1 = __ballot_sync(~0u, once1);
    int count0 = __popc(vote0);
    store_byte_if(once0, p + __popc(vote0 & below), y0);
    store_byte_if(once1, p + count0 + __popc(vote1 & below), y1);
    p += count0 + __popc(vote1);
    y0 = once0 ? y0 >> 8 : y0;
    y1 = once1 ? y1 >> 8 : y1;
    if (TWICE) {
        bool twice0 = once0 & (y0 >= limit0), twice1 = once1 & (y1 >= limit1);
        vote0 = __ballot_sync(~0u, twice0), vote1 = __ballot_sync(~0u, twice1);
        count0 = __popc(vote0);
        store_byte_if(twice0, p + __popc(vote0 & below), y0);
        store_byte_if(twice1, p + count0 + __popc(vote1 & below), y1);
        p += count0 + __popc(vote1);
        y0 = twice0 ? y0 >> 8 : y0;
        y1 = twice1 ? y1 >> 8 : y1;
    }
    u32 q0 = __umulhi(2 * y0, t0.x) >> (t0.y >> 28), q1 = __umulhi(2 * y1, t1.x) >> (t1.y >> 28);
    y0 += q0 * ((1u << precision) - f0) + (t0.y >> 14 & 16383);
    y1 += q1 * ((1u << precision) - f1) + (t1.y >> 14 & 16383);
    x0 = has0 ? y0 : x0;
    x1 = has1 ? y1 : x1;
}

const int kRowsAhead = 8;  // rows of 64 symbols that are loaded at a time

// A chunk of 64 lanes, by one warp. The next rows are loaded while these are coded.
template <bool TWICE>
__device__ __forceinline__ u8* encode_wide(const u8* symbols, i64 count, const uint2* table, u8* mine, int precision, u32& x0, u32& x1, u8* p) {
    int lane = threadIdx.x & 31;
    u32 below = (1u << lane) - 1;
    i64 size = kRowsAhead * 64, tiles = count / size;
    bool aligned = !((u64)(symbols) & 15);
    uint4 next = make_uint4(0, 0, 0, 0);
    if (aligned && tiles) next = reinterpret_cast<const uint4*>(symbols)[lane];
    for (i64 tile = 0; tile * size < count; tile++) {
        i64 left = count - tile * size;
        const u8* here = symbols + tile * size;
        __syncwarp();
        if (aligned && left >= size) {
            reinterpret_cast<uint4*>(mine)[lane] = next;
            if (tile + 1 < tiles) next = reinterpret_cast<const uint4*>(here + size)[lane];
        } else {
            for (int k = lane; k < size; k += 32) mine[k] = k < left ? here[k] : 0;
        }
        __syncwarp();
        // Tables of all rows first: nothing in them waits for the states.
        uint2 t0[kRowsAhead], t1[kRowsAhead];
#pragma unroll
        for (int r = 0; r < kRowsAhead; r++) {
            t0[r] = table[mine[64 * r + lane]];
            t1[r] = table[mine[64 * r + 32 + lane]];
        }
        if (left >= size) {
#pragma unroll
            for (int r = 0; r < kRowsAhead; r++) encode_row<TWICE>(t0[r], t1[r], true, true, precision, below, x0, x1, p);
        } else {
            for (int r = 0; r * 64 < left; r++)
                encode_row<TWICE>(table[mine[64 * r + lane]], table[mine[64 * r + 32 + lane]], 64 * r + lane < left,
                                  64 * r + 32 + lane < left, precision, below, x0, x1, p);
        }
    }
    return p;
}

// One warp for each chunk; a thread has the lanes t and t + 32.
extern "C" __global__ void __launch_bounds__(128) encode_chunks(Job* job) {
    __shared__ uint2 tables[4][kSymbols];
    __shared__ __attribute__((aligned(16))) u8 loaded[4][kRowsAhead * 64];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int slot = blockIdx.x * 4 + warp;
    if (slot >= job->chunk_count) return;
    Where where = job->chunks[slot];
    Stream& stream = job->streams[where.item];
    if (where.index >= stream.chunks) return;
    i64 begin = i64(where.index) * stream.chunk_size;
    i64 count = stream.count - begin < stream.chunk_size ? stream.count - begin : stream.chunk_size;
    const u8* symbols = stream.symbols + begin;
    u8* out = chunk_room(stream, where.index);
    if (stream.used_coder == RAW) {
        int width = stream.precision;
        u64 bytes = (u64(count) * width + 7) / 8;
        for (i64 group = lane; group < (count + 7) / 8; group += 32) {  // eight symbols are `width` bytes
            u64 packed = 0;
            for (int k = 0; k < 8 && group * 8 + k < count; k++) packed |= u64(symbols[group * 8 + k]) << width * k;
            for (int k = 0; k < width && u64(group) * width + k < bytes; k++) out[group * width + k] = u8(packed >> 8 * k);
        }
        if (!lane) stream.lengths[where.index] = u32(bytes);
        return;
    }
    uint2* table = tables[warp];
    for (int s = lane; s < stream.alphabet; s += 32) table[s] = make_uint2(stream.reciprocal[s], stream.packed[s]);
    __syncwarp();
    int lanes = 1 << stream.lane_bits, precision = stream.precision, twice = precision > 8;
    u32 below = (1u << lane) - 1, x0 = kLow, x1 = kLow;
    u8* p = out + 3 * lanes;
    i64 rows = (count + lanes - 1) / lanes;
    if (lanes == 64) {
        p = precision > 8 ? encode_wide<true>(symbols, count, table, loaded[warp], precision, x0, x1, p)
                          : encode_wide<false>(symbols, count, table, loaded[warp], 8, x0, x1, p);
    } else {
        for (i64 row = 0; row < rows; row++) {
            i64 i = row * lanes + lane;
            bool has = lane < lanes && i < count;
            uint2 t = table[has ? symbols[i] : 0];
            u32 f = (t.y & 16383) + 1, limit = f << (22 - precision);
            for (int pass = 0; pass <= twice; pass++) {
                bool full = has && x0 >= limit;
                u32 vote = __ballot_sync(~0u, full);
                if (full) p[__popc(vote & below)] = u8(x0), x0 >>= 8;
                p += __popc(vote);
            }
            u32 q = __umulhi(2 * x0, t.x) >> (t.y >> 28);
            if (has) x0 += q * ((1u << precision) - f) + (t.y >> 14 & 16383);
        }
    }
    if (lane < lanes) out[3 * lane] = u8(x0), out[3 * lane + 1] = u8(x0 >> 8), out[3 * lane + 2] = u8(x0 >> 16);
    if (lanes == 64) out[96 + 3 * lane] = u8(x1), out[97 + 3 * lane] = u8(x1 >> 8), out[98 + 3 * lane] = u8(x1 >> 16);
    if (!lane) stream.lengths[where.index] = u32(p - out);
}

// ── frames ────────────────────────────────────────────────────────────────────────────────────────

#include "crc.h"

const int kManyChunks = 128;

// Where everything goes; one block of 256 threads for the whole message.
extern "C" __global__ void lay_out(Job* job) {
    __shared__ u64 done;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    __shared__ u64 upto_here;
    for (int i = warp; i < job->stream_count; i += 8) {
        Stream& stream = job->streams[i];
        if (stream.chunks > kManyChunks) continue;
        u64 before = 0;
        for (int c = 0; c < stream.chunks; c += 32) {
            u64 length = c + lane < stream.chunks ? stream.lengths[c + lane] : 0, upto = warp_scan(length);
            if (c + lane < stream.chunks) stream.offsets[c + lane] = before + upto - length;
            before += __shfl_sync(~0u, upto, 31);
        }
        if (!lane) stream.data = before;
    }
    __syncthreads();
    for (int i = 0; i < job->stream_count; i++) {  // those with many chunks by all threads together
        Stream& stream = job->streams[i];
        if (stream.chunks <= kManyChunks) continue;
        if (!threadIdx.x) upto_here = 0;
        __syncthreads();
        for (int c = 0; c < stream.chunks; c += blockDim.x) {
            int mine = c + threadIdx.x;
            u64 all, offset = block_scan(mine < stream.chunks ? stream.lengths[mine] : 0, &all) + upto_here;
            if (mine < stream.chunks) stream.offsets[mine] = offset;
            __syncthreads();
            if (!threadIdx.x) upto_here += all;
            __syncthreads();
        }
        if (!threadIdx.x) stream.data = upto_here;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < job->stream_count; i += blockDim.x) {
        Stream& stream = job->streams[i];
        stream.length = stream.data + stream.head_length;
        if (stream.used_coder == RANS) stream.length += 4 * u64(stream.chunks - 1);
    }
    if (!threadIdx.x) done = 0;
    __threadfence();
    __syncthreads();
    for (int first = 0; first < job->frame_count; first += blockDim.x) {
        int i = first + threadIdx.x;
        u64 length = 0, payload = 0;
        Frame* frame = i < job->frame_count ? job->frames + i : nullptr;
        if (frame) {
            u32 places = 1;
            for (int k = 0; k < frame->pieces; k++) {
                Piece& piece = frame->piece[k];
                if (piece.kind == PIECE_STREAM) {
                    piece.length = job->streams[piece.stream].length;
                    places += job->streams[piece.stream].chunks + 1;
                }
                if (piece.kind == PIECE_LENGTH) piece.length = varint_length(job->streams[piece.stream].length);
                if (piece.kind != PIECE_STREAM) places++;
                piece.offset = payload;
                payload += piece.length;
            }
            frame->places = places;
            frame->placed = 0;
            frame->crc = 0;
            length = 9 + varint_length(payload) + frame->shape_length + payload;
            frame->length = length;
        }
        u64 all, offset = block_scan(length, &all) + done;
        if (frame) {
            frame->offset = offset;
            for (int k = 0; k < frame->pieces; k++) frame->piece[k].offset += offset + length - payload;
        }
        __syncthreads();
        if (!threadIdx.x) done += all;
        __syncthreads();
    }
    if (!threadIdx.x) {
        job->status->length = done;
        if (done > job->room) job->status->bits |= UNUSUAL;
    }
}

// The end of a frame in the message: checksums count the bytes that follow.
__device__ __forceinline__ u64 end_of(const Frame& frame) { return frame.offset + frame.length; }

// Counts a piece of a frame that stands in the message; the last one writes the checksum.
__device__ __forceinline__ void finish(Job* job, Frame& frame) {
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&frame.placed, 1u) != frame.places - 1) return;
    u32 crc = ~atomicXor(&frame.crc, 0u);
    u8* at = job->out + frame.offset + 5;
    for (int k = 0; k < 4; k++) at[k] = u8(crc >> 8 * k);
}

// Copies bytes into the message, and adds them to the checksum of their frame. By all threads of a block of 128. What
// is copied may be read four bytes at a time up to the next multiple of four.
__device__ void place(Job* job, Frame& frame, const u8* from, u64 offset, u64 length) {
    u8* to = job->out + offset;
    u64 head = (4 - ((u64)(to) & 3)) & 3;
    head = head < length ? head : length;
    u64 words = (length - head) / 4;
    if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
    if (words) {  // whole words at their destination, each from two words of the source
        const u32* source = reinterpret_cast<const u32*>((u64)(from + head) & ~u64(3));
        int skew = int((u64)(from + head) & 3) * 8;
        u32* target = reinterpret_cast<u32*>(to + head);
        for (u64 k = threadIdx.x; k < words; k += blockDim.x)
            target[k] = skew ? __funnelshift_r(source[k], source[k + 1], skew) : source[k];
    }
    u64 rest = head + 4 * words;
    if (rest + threadIdx.x < length) to[rest + threadIdx.x] = from[rest + threadIdx.x];
    u32 crc = block_crc(from, length);
    if (threadIdx.x < 32) {
        crc = times_power_by_warp(crc, end_of(frame) - offset - length);
        if (!threadIdx.x) atomicXor(&frame.crc, crc);
    }
}

// One block of 128 threads for each chunk.
extern "C" __global__ void __launch_bounds__(128) place_chunks(Job* job) {
    Where where = job->chunks[blockIdx.x];
    Stream& stream = job->streams[where.item];
    if (where.index >= stream.chunks || job->status->length > job->room) return;
    Frame& frame = job->frames[job->tensors[stream.first_tensor].frame];
    u64 offset = 0;
    for (int k = 0; k < frame.pieces; k++)
        if (frame.piece[k].kind == PIECE_STREAM && frame.piece[k].stream == where.item) offset = frame.piece[k].offset;
    offset += stream.length - stream.data + stream.offsets[where.index];
    place(job, frame, chunk_room(stream, where.index), offset, stream.lengths[where.index]);
    finish(job, frame);
}

// One block of 128 threads for each piece of each frame; the piece −1 is its header.
extern "C" __global__ void __launch_bounds__(128) place_pieces(Job* job) {
    __shared__ __attribute__((aligned(16))) u8 small[kMostHead + 16];
    __shared__ int small_length;
    Where where = job->pieces[blockIdx.x];
    Frame& frame = job->frames[where.item];
    if (job->status->length > job->room) return;
    if (where.index < 0) {
        if (!threadIdx.x) {
            u64 payload = 0;
            for (int k = 0; k < frame.pieces; k++) payload += frame.piece[k].length;
            int n = put_varint(small, payload);
            for (int k = 0; k < frame.shape_length; k++) small[n++] = frame.shape[k];
            small_length = n;
            for (int k = 0; k < 5; k++) job->out[frame.offset + k] = frame.start[k];
        }
        if (threadIdx.x < 32) {
            u32 crc = ~0u;
            for (int k = 0; k < 5; k++) crc = crc_byte(crc, frame.start[k]);
            crc = times_power_by_warp(crc, frame.length - 9);
            if (!threadIdx.x) atomicXor(&frame.crc, crc);
        }
        __syncthreads();
        place(job, frame, small, frame.offset + 9, small_length);
        finish(job, frame);
        return;
    }
    Piece& piece = frame.piece[where.index];
    if (piece.kind == PIECE_BYTES) {
        place(job, frame, piece.bytes, piece.offset, piece.length);
    } else if (piece.kind == PIECE_LENGTH) {
        if (!threadIdx.x) put_varint(small, job->streams[piece.stream].length);
        __syncthreads();
        place(job, frame, small, piece.offset, piece.length);
    } else {
        Stream& stream = job->streams[piece.stream];
        place(job, frame, stream.head, piece.offset, stream.head_length);
        if (stream.used_coder == RANS)
            place(job, frame, reinterpret_cast<const u8*>(stream.lengths), piece.offset + stream.head_length,
                  4 * u64(stream.chunks - 1));
    }
    finish(job, frame);
}

// How large the structures are here, for the test that numpy lays them out alike.
extern "C" __global__ void sizes(i64* out) {
    const i64 all[] = {sizeof(Tensor), sizeof(Fit), sizeof(Stream), sizeof(Piece), sizeof(Frame), sizeof(Status), sizeof(Where), sizeof(Job)};
    for (int i = 0; i < 8; i++) out[i] = all[i];
}
