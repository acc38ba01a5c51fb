// Streams of symbols to bytes: the choice of model and precision, rANS, and the frames around it.
#include "frequencies.h"

const int kBetas = 128;
const u32 kLow = 1u << 14;
// A lane costs two bytes. A GPU wants many lanes, each with few rows to walk: this many bits for each keeps their cost
// below 0.8%, and no lane walks more rows than this.
const double kBitsPerLane = 2048;
const i64 kMostRows = 2048;
// A message waits for its slowest chunk. Streams that would have fewer than 64 lanes, and take few bytes of a message,
// get more: one for so many rows, if they pay for it in bits.
const double kRowsOfFew = 384, kBitsOfFew = 512;
// Streams that leave most of a GPU idle get more chunks, too, for another half a percent of their bytes.
const double kBitsOfMedium = 1280;
const i64 kFew = 1 << 16, kMedium = 1 << 22;
const double kLarge = 1 << 20, kTolerance = 1.006;  // as in compress/precision.py
const int kMasses = 2 * kBetas * 8 + 32;            // bytes in front of the masses, see minifloat.cu

__device__ __forceinline__ int gamma_bits(u32 f) { return 2 * (32 - __clz(int(f + 1))) - 1; }

// ── the choice ────────────────────────────────────────────────────────────────────────────────────

struct Choice {
    double bits;
    int model, precision;
};

// Whether rANS takes less than plain bits; lanes cost two bytes each.
__device__ __forceinline__ bool pays(double bits, i64 n, int width) {
    return bits * (1 + 16 / kBitsPerLane) + 32 < double(n) * width;
}

// What the GenNorm says about a symbol, as a count.
__device__ __forceinline__ u64 gennorm_mass(const Stream& stream, const int* shape, int s) {
    const u32* masses = reinterpret_cast<const u32*>(static_cast<const u8*>(stream.format) + kMasses);
    int off = s < stream.zero ? stream.zero - s : s - stream.zero;
    if (s >= stream.alphabet) return 0;
    return u64(masses[shape[1] * 128 + off]) * u64(256 - shape[2]) + (off ? 0 : u64(shape[2]) << 16);
}

// Of several small tensors the one with the middle β stands for all: (whether there is one, β, zero mass). By a warp.
__device__ void find_shape(Job* job, const Stream& stream, int* shape) {
    int lane = threadIdx.x & 31, n = 0;
    if (!lane) shape[0] = 0;
    __syncwarp();
    if (!(stream.models & 1)) return;
    const Fit* fits = job->fits + stream.first_tensor;
    for (int i = 0; i < stream.tensors; i++) n += fits[i].nonzero != 0;
    for (int i = lane; i < stream.tensors; i += 32) {
        if (!fits[i].nonzero) continue;
        int below = 0;
        for (int j = 0; j < stream.tensors; j++)
            below += fits[j].nonzero && (fits[j].beta < fits[i].beta || (fits[j].beta == fits[i].beta && j < i));
        if (below == n / 2) shape[1] = fits[i].beta, shape[2] = fits[i].zero_mass, shape[0] = 1;
    }
    __syncwarp();
}

__device__ __forceinline__ void write_constant(Stream& stream, int symbol) {
    stream.used_coder = CONSTANT, stream.chunks = 0, stream.data = 0;
    stream.head[0] = CONSTANT, stream.head[1] = u8(symbol), stream.head_length = 2, stream.length = 2;
}

// Chunks of a multiple of 64 symbols, packed and put one after the other.
__device__ __forceinline__ void write_raw(Stream& stream, i64 n, int width) {
    stream.used_coder = RAW;
    stream.head[0] = RAW;
    stream.head_length = 1;
    stream.precision = width;
    i64 size = (n + stream.most_chunks - 1) / stream.most_chunks;
    size = size < 16384 ? 16384 : (size + 63) / 64 * 64;
    stream.chunk_size = size;
    stream.chunks = int((n + size - 1) / size);
}

// What the coder has to know of a symbol (see `push`).
__device__ __forceinline__ void write_symbol(Stream& stream, int s, u32 f, u32 start, int precision) {
    if (precision == 8) {
        stream.reciprocal[s] = ((1u << 31) + f - 1) / f;
        stream.packed[s] = (256 - f) | start << 8 | f << 24;
        return;
    }
    u32 shift = f > 1 ? 32 - __clz(int(f - 1)) : 0;  // the least with 2^shift ≥ f
    u32 reciprocal = u32(((u64(1) << (31 + shift)) + f - 1) / f);
    stream.reciprocal[s] = reciprocal + ((shift - reciprocal) & 31);
    stream.packed[s] = f | start << 18;
}

// The Elias-gamma code of f + 1 from bit `at` on: zeros, then the number, its highest bit first.
__device__ __forceinline__ void put_gamma(u32* words, u32 at, u32 f) {
    int size = 32 - __clz(int(f + 1));
    u32 bit = at + size - 1;
    for (int b = size - 1; b >= 0; b--, bit++)
        if ((f + 1) >> b & 1) atomicOr(&words[bit >> 5], 1u << (bit & 31));
}

// The coding byte, and how many lanes and chunks there are; by one thread.
__device__ void write_head(Stream& stream, const Choice& chosen, const int* shape, i64 n, int table_bytes) {
    stream.used_coder = RANS;
    stream.model = chosen.model;
    stream.precision = chosen.precision;
    stream.head[0] = u8(RANS | chosen.model << 2 | chosen.precision << 4);
    if (chosen.model == GENNORM) stream.head[1] = u8(shape[1]), stream.head[2] = u8(shape[2]);
    double lanes = chosen.bits / kBitsPerLane, least_lanes = double((n + kMostRows - 1) / kMostRows);
    lanes = lanes < least_lanes ? least_lanes : lanes;
    // Whole chunks: of a part of one, rounding up would make another 64 lanes.
    if (n <= kMedium) lanes = fmax(lanes, 64 * floor(fmin(double(n) / kRowsOfFew, chosen.bits / kBitsOfMedium) / 64));
    i64 chunks = i64(ceil(lanes / 64)), blocks = (n + 63) / 64;
    if (lanes < 64) lanes = fmax(lanes, fmin(double(n) / kRowsOfFew, chosen.bits / kBitsOfFew));
    int lane_bits = 0;
    while (lane_bits < 6 && double(2 << lane_bits) <= lanes) lane_bits++;
    chunks = chunks < 1 ? 1 : chunks > stream.most_chunks ? stream.most_chunks : chunks;
    chunks = chunks > blocks ? blocks : chunks;
    i64 size = ((n + chunks - 1) / chunks + 63) / 64 * 64;
    while (size * (chunks - 1) >= n) {  // rounding up has left the last one empty
        chunks = (n + size - 1) / size;
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

// ── few symbols: one warp for each candidate ──

// Frequencies of up to 32 symbols, one for each lane, that add up to 2^precision; as `normalize` does it.
__device__ u32 normalize_by_warp(u64 count, int alphabet, int precision) {
    int lane = threadIdx.x & 31;
    u64 total = count;
    for (int by = 16; by; by >>= 1) total += __shfl_xor_sync(~0u, total, by);
    u64 scaled = count << precision, floor = scaled / total, remainder = scaled - floor * total;
    u32 f = count ? (floor ? u32(floor) : 1u) : 0u;
    u64 key = count && floor ? remainder + 1 : 0;
    int missing = (1 << precision) - int(warp_sum_u32(f));
    if (missing > 0) {
        int rank = 0;
        for (int j = 0; j < alphabet; j++) {
            u64 other = __shfl_sync(~0u, key, j);
            rank += other > key || (other == key && j < lane);
        }
        if (lane < alphabet && rank < missing) f++;
    }
    for (; missing < 0; missing++) {
        u32 best = f;
        for (int by = 16; by; by >>= 1) best = max(best, __shfl_xor_sync(~0u, best, by));
        if (lane == __ffs(int(__ballot_sync(~0u, f == best))) - 1) f--;
    }
    return f;
}

// One block of 192 threads for each stream of up to 32 symbols: what `choose` does, every candidate by a warp of its own.
extern "C" __global__ void choose_few(Job* job) {
    __shared__ Choice choices[6];
    __shared__ u32 tables[6][32];
    __shared__ int shape[3], winner;  // of the GenNorm: whether there is one, β and zero mass
    Stream& stream = job->streams[blockIdx.x];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, K = stream.alphabet;
    if (K > 32) return;  // one for `choose`
    u64 count = lane < K ? stream.counts[lane] : 0, n = count;
    for (int by = 16; by; by >>= 1) n += __shfl_xor_sync(~0u, n, by);
    u32 used = __ballot_sync(~0u, count != 0);
    if (!warp) find_shape(job, stream, shape);
    __syncthreads();
    if (threadIdx.x < K) stream.counts[threadIdx.x] = 0;  // for the next message
    if (__popc(used) <= 1) {
        if (!threadIdx.x) write_constant(stream, used ? __ffs(int(used)) - 1 : 0);
        return;
    }
    int width = 1;
    while (1 << width < K) width++;
    bool large = double(n) >= kLarge, fine = K > 16;
    // Candidates in the order of `choose`: by precision, the fastest first, then by model.
    int precision = fine ? 14 : warp < 2 ? 8 : warp < 4 && !large ? 11 : 12, model = GENNORM + (warp & 1);
    bool wanted = stream.coder == RANS && stream.models >> (model - 1) & 1 && (model == HISTOGRAM || shape[0]);
    wanted &= fine ? warp < 2 : large ? warp < 4 : true;
    u32 f = 0;
    if (wanted) {
        f = normalize_by_warp(model == GENNORM ? gennorm_mass(stream, shape, lane) : count, K, precision);
        double cost = count ? (f ? double(count) * (precision - log2(double(f))) : 1e300) : 0.0;
        cost = warp_sum(cost);
        u32 table = warp_sum_u32(lane < K && lane != stream.zero ? u32(gamma_bits(f)) : 0u);
        if (!lane) choices[warp] = {cost + (model == GENNORM ? 16.0 : 8.0 * ((table + 7) / 8)), model, precision};
    } else if (!lane) {
        choices[warp] = {1e301, 0, 0};
    }
    tables[warp][lane] = f;
    __syncthreads();
    if (!threadIdx.x) {
        double least = 1e301;
        for (int i = 0; i < 6; i++) least = choices[i].bits < least ? choices[i].bits : least;
        double limit = large ? least * kTolerance : least;
        winner = -1;
        for (int i = 5; i >= 0; i--)
            if (choices[i].model && choices[i].bits <= limit) winner = i;
        if (winner >= 0 && !pays(choices[winner].bits, n, width)) winner = -1;
        if (winner < 0) write_raw(stream, i64(n), width);
    }
    __syncthreads();
    if (winner < 0 || warp) return;
    Choice chosen = choices[winner];
    f = tables[winner][lane];
    u32 upto = warp_scan(f);
    if (lane < K && f) write_symbol(stream, lane, f, upto - f, chosen.precision);
    u32 bits = lane < K && lane != stream.zero ? u32(gamma_bits(f)) : 0, end = warp_scan(bits);
    int table_bytes = 2;
    if (chosen.model == HISTOGRAM) {
        __shared__ u32 words[32];  // 31 codes of up to 29 bits
        words[lane] = 0;
        __syncwarp();
        if (bits) put_gamma(words, end - bits, f);
        __syncwarp();
        table_bytes = int((__shfl_sync(~0u, end, 31) + 7) / 8);
        for (int j = lane; j < table_bytes; j += 32) stream.head[1 + j] = u8(words[j >> 2] >> 8 * (j & 3));
    }
    if (!lane) write_head(stream, chosen, shape, i64(n), table_bytes);
}

// ── any number of symbols ──

// One block of 256 threads for each stream, one for each symbol: the cheapest model and precision, the layout of lanes
// and chunks, the head.
extern "C" __global__ void choose(Job* job) {
    __shared__ u64 counts[kSymbols], shaped[kSymbols];
    __shared__ u32 frequencies[kSymbols];
    __shared__ int shape[3], found;
    __shared__ Choice choices[6], chosen;
    __shared__ u32 bits[kMostHead / 4];
    Stream& stream = job->streams[blockIdx.x];
    int s = threadIdx.x, K = stream.alphabet;
    if (K <= 32) return;  // one for `choose_few`
    u64 mine = s < K ? stream.counts[s] : 0, total, used;
    counts[s] = mine;
    stream.counts[s] = 0;  // for the next message
    block_scan(mine, &total);
    block_scan(mine != 0, &used);
    if (s < 32) find_shape(job, stream, shape);
    if (!s) found = 0;
    __syncthreads();
    i64 n = i64(total);
    if (used <= 1) {  // all symbols are the same
        if (!total && !s) write_constant(stream, 0);
        if (mine) write_constant(stream, s);
        return;
    }
    int width = 1, precisions[3], many = 0;
    while (1 << width < K) width++;
    if (K > 16) {
        // The table of few symbols would take as much as they do.
        if (n < kFew && K <= 128) precisions[many++] = 8;
        if (n < kFew) precisions[many++] = 11;
        precisions[many++] = 14;
    } else {
        precisions[many++] = 8;
        if (double(n) < kLarge) precisions[many++] = 11;
        precisions[many++] = 12;
    }
    if (s < K) shaped[s] = shape[0] ? gennorm_mass(stream, shape, s) : 0;
    __syncthreads();
    for (int p = 0; stream.coder == RANS && p < many; p++) {
        for (int model = GENNORM; model <= HISTOGRAM; model++) {
            if (!(stream.models >> (model - 1) & 1) || (model == GENNORM && !shape[0])) continue;
            normalize(model == GENNORM ? shaped : counts, frequencies, K, precisions[p]);
            u32 f = s < K ? frequencies[s] : 0;
            double cost = block_sum(mine ? (f ? double(mine) * (precisions[p] - log2(double(f))) : 1e300) : 0.0);
            double table = block_sum(s < K && s != stream.zero ? double(gamma_bits(f)) : 0.0);
            if (!s) {
                double side = model == GENNORM ? 16.0 : 8.0 * double((i64(table) + 7) / 8);
                choices[found++] = {cost + side, model, precisions[p]};
            }
            __syncthreads();
        }
    }
    if (!s) {
        double least = 1e301;
        for (int i = 0; i < found; i++) least = choices[i].bits < least ? choices[i].bits : least;
        double limit = double(n) >= kLarge ? least * kTolerance : least;
        chosen = {0, 0, 0};
        for (int i = found - 1; i >= 0; i--)
            if (choices[i].bits <= limit) chosen = choices[i];
        if (chosen.model && !pays(chosen.bits, n, width)) chosen.model = 0;
        if (!chosen.model) write_raw(stream, n, width);
    }
    __syncthreads();
    if (!chosen.model) return;
    normalize(chosen.model == GENNORM ? shaped : counts, frequencies, K, chosen.precision);
    u32 f = s < K ? frequencies[s] : 0;
    u64 all, start = block_scan(f, &all);
    if (s < K && f) write_symbol(stream, s, f, u32(start), chosen.precision);
    // The table, as Elias-gamma codes in the order of symbols, bits from the lowest of each byte upwards.
    for (int j = s; j < kMostHead / 4; j += blockDim.x) bits[j] = 0;
    __syncthreads();
    bool sent = chosen.model == HISTOGRAM && s < K && s != stream.zero;
    u64 table_bits, at = block_scan(sent ? u64(gamma_bits(f)) : 0, &table_bits);
    if (sent) put_gamma(bits, u32(at), f);
    __syncthreads();
    int table_bytes = chosen.model == HISTOGRAM ? int((table_bits + 7) / 8) : 2;
    if (chosen.model == HISTOGRAM)
        for (int j = s; j < table_bytes; j += blockDim.x) stream.head[1 + j] = u8(bits[j >> 2] >> 8 * (j & 3));
    __syncthreads();
    if (!s) write_head(stream, chosen, shape, n, table_bytes);
}

// ── rANS ──────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ u8* chunk_room(const Stream& stream, int chunk) {
    return stream.coded + i64(chunk) * (2 * stream.chunk_size + 256);
}

// x ← ⌊x/f⌋·2^k + x mod f + c, as x + ⌊x/f⌋·(2^k − f) + c. States are below f·2^(22−k) here, so that a product with a
// reciprocal of 32 bits gives the quotient exactly, and with k = 8 without a shift. The table has then f, c and 2^k − f
// in bytes. With more, it has the shift in the five lowest bits of the reciprocal, which need not be exact, and f and c.
template <bool COARSE>
__device__ __forceinline__ u32 push(u32 x, uint2 t, int precision) {
    if (COARSE) return dot_of_two(__umulhi(2 * x, t.x) + 65536, t.y, x);
    u32 quotient = __funnelshift_r(__umulhi(2 * x, t.x), 0, t.x);
    return quotient * ((1u << precision) - (t.y & 16383)) + (x + (t.y >> 18));
}

template <bool COARSE>
__device__ __forceinline__ u32 limit_of(uint2 t, int precision) {
    return COARSE ? t.y >> 24 << 14 : (t.y & 16383) << (22 - precision);
}

// What the lanes of a row emit: who does, and the states before, whose low bytes these are.
struct Emitted {
    u32 once0, once1, twice0, twice1;  // votes
    u32 x0, x1;
    bool has0, has1;  // whether this thread's lanes emit a byte
};

// One row of lanes: a thread has the lanes 2t and 2t + 1, or the lane t if there are at most 32. What they emit is left
// to `emit`, so that no state waits for places and stores.
template <bool COARSE, bool WIDE>
__device__ __forceinline__ void encode_row(uint2 t0, uint2 t1, bool has0, bool has1, int precision, u32& x0, u32& x1,
                                           Emitted& row) {
    u32 limit0 = limit_of<COARSE>(t0, precision), limit1 = limit_of<COARSE>(t1, precision);
    bool once0 = has0 & (x0 >= limit0), once1 = WIDE & has1 & (x1 >= limit1);
    row.x0 = x0, row.x1 = x1, row.has0 = once0, row.has1 = once1;
    row.once0 = __ballot_sync(~0u, once0);
    if (WIDE) row.once1 = __ballot_sync(~0u, once1);
    u32 y0 = once0 ? x0 >> 8 : x0, y1 = once1 ? x1 >> 8 : x1;
    if (!COARSE) {
        bool twice0 = has0 & (x0 >> 8 >= limit0), twice1 = WIDE & has1 & (x1 >> 8 >= limit1);
        row.twice0 = __ballot_sync(~0u, twice0);
        if (WIDE) row.twice1 = __ballot_sync(~0u, twice1);
        y0 = twice0 ? x0 >> 16 : y0;
        y1 = twice1 ? x1 >> 16 : y1;
    }
    y0 = push<COARSE>(y0, t0, precision);
    x0 = has0 ? y0 : x0;
    if (WIDE) {
        y1 = push<COARSE>(y1, t1, precision);
        x1 = has1 ? y1 : x1;
    }
}

// Writes what a row emits from `out + p` on. Bytes of one thread stand side by side.
template <bool COARSE, bool WIDE>
__device__ __forceinline__ void emit(const Emitted& row, u32 below, u8* out, u32& p) {
    u32 at = p + __popc(row.once0 & below) + (WIDE ? __popc(row.once1 & below) : 0);
    p += __popc(row.once0) + (WIDE ? __popc(row.once1) : 0);
    if (WIDE) {
        store_byte_if<0>(row.has0 | row.has1, out + at, row.has0 ? row.x0 : row.x1);
        store_byte_if<1>(row.has0 & row.has1, out + at, row.x1);
    } else {
        store_byte_if<0>(row.has0, out + at, row.x0);
    }
    if (COARSE || !(row.twice0 | (WIDE ? row.twice1 : 0))) return;  // few rows have a rare symbol
    bool has0 = row.twice0 & (below + 1), has1 = WIDE && row.twice1 & (below + 1);
    at = p + __popc(row.twice0 & below) + (WIDE ? __popc(row.twice1 & below) : 0);
    p += __popc(row.twice0) + (WIDE ? __popc(row.twice1) : 0);
    store_byte_if<0>(has0, out + at, row.x0 >> 8);
    store_byte_if<0>(has1, out + at + has0, row.x1 >> 8);
}

const int kLoaded = 1024;  // symbols of a chunk that a warp holds; as many are on their way

// A chunk by one warp, of 64 lanes if WIDE and else of fewer. The next symbols are loaded while these are coded.
template <bool COARSE, bool WIDE>
__device__ __forceinline__ u32 encode_lanes(const u8* symbols, i64 count, const uint2* table, u8* loaded, int precision,
                                            int lane_bits, u8* out, u32& x0, u32& x1) {
    const int together = WIDE ? 16 : 8;  // rows that are unrolled
    int lane = threadIdx.x & 31, lanes = WIDE ? 64 : 1 << lane_bits, rows = kLoaded / lanes;
    u32 below = (1u << lane) - 1, p = 3 * lanes,
        one = 65536u + (u32(lane_bits) >> 8);  // a sum, or the compiler loads it anew in each row
    int place = WIDE ? 2 * lane : lane & (lanes - 1);
    bool works = WIDE || lane < lanes;
    bool aligned = !((u64)(symbols) & 15);
    uint4 next[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    auto fetch = [&](i64 at) {
        if (!aligned || at + kLoaded > count) return;
        next[0] = reinterpret_cast<const uint4*>(symbols + at)[lane];
        next[1] = reinterpret_cast<const uint4*>(symbols + at)[lane + 32];
    };
    fetch(0);
    for (i64 done = 0; done < count; done += kLoaded) {
        int left = count - done < kLoaded ? int(count - done) : kLoaded;
        __syncwarp();
        if (aligned && left == kLoaded) {
            reinterpret_cast<uint4*>(loaded)[lane] = next[0];
            reinterpret_cast<uint4*>(loaded)[lane + 32] = next[1];
            fetch(done + kLoaded);
        } else {
            for (int k = lane; k < kLoaded; k += 32) loaded[k] = k < left ? symbols[done + k] : 0;
        }
        __syncwarp();
        Emitted row[2];
        // Bytes of a row are written after the states of the next: places and stores then delay no state.
        if (left == kLoaded) {
            for (int first = 0; first < rows; first += together) {
                const u8* here = loaded + first * lanes + place;
                // Tables of all rows first: nothing in them waits for the states.
                uint2 t0[together], t1[together];
#pragma unroll
                for (int r = 0; r < together; r++) {
                    t0[r] = table[here[r * lanes]];
                    if (WIDE) t1[r] = table[here[r * lanes + 1]];
                }
#pragma unroll
                for (int r = 0; r < together; r++) {
                    encode_row<COARSE, WIDE>(t0[r], t1[r], works, true, precision, x0, x1, row[r & 1]);
                    if (r) emit<COARSE, WIDE>(row[~r & 1], below, out, p);
                }
                emit<COARSE, WIDE>(row[~together & 1], below, out, p);
            }
        } else {
#pragma unroll 4
            for (int first = 0; first < left; first += lanes) {
                const u8* here = loaded + first + place;
                encode_row<COARSE, WIDE>(table[here[0]], table[WIDE ? here[1] : 0], works && first + place < left,
                                         first + place + 1 < left, precision, x0, x1, row[0]);
                emit<COARSE, WIDE>(row[0], below, out, p);
            }
        }
    }
    return p;
}

__device__ __forceinline__ void put_state(u8* out, u32 x) { out[0] = u8(x), out[1] = u8(x >> 8), out[2] = u8(x >> 16); }

// Plain bits, by one warp: eight symbols are `width` bytes.
__device__ __forceinline__ u32 encode_raw(const u8* symbols, i64 count, int width, u8* out) {
    u64 bytes = (u64(count) * width + 7) / 8;
    for (i64 group = threadIdx.x & 31; group < (count + 7) / 8; group += 32) {
        u64 packed = 0;
        for (int k = 0; k < 8 && group * 8 + k < count; k++) packed |= u64(symbols[group * 8 + k]) << width * k;
        for (int k = 0; k < width && u64(group) * width + k < bytes; k++) out[group * width + k] = u8(packed >> 8 * k);
    }
    return u32(bytes);
}

// One warp for each chunk.
extern "C" __global__ void __launch_bounds__(64) encode_chunks(Job* job) {
    __shared__ uint2 tables[2][kSymbols];
    __shared__ __attribute__((aligned(16))) u8 loaded[2][kLoaded];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int slot = blockIdx.x * 2 + warp;
    if (slot >= job->chunk_count) return;
    Where where = job->chunks[slot];
    Stream& stream = job->streams[where.item];
    if (where.index >= stream.chunks) return;
    i64 begin = i64(where.index) * stream.chunk_size;
    i64 count = stream.count - begin < stream.chunk_size ? stream.count - begin : stream.chunk_size;
    const u8* symbols = stream.symbols + begin;
    u8* out = chunk_room(stream, where.index);
    u32 length;
    if (stream.used_coder == RAW) {
        length = encode_raw(symbols, count, stream.precision, out);
    } else {
        uint2* table = tables[warp];
        for (int s = lane; s < stream.alphabet; s += 32) table[s] = make_uint2(stream.reciprocal[s], stream.packed[s]);
        __syncwarp();
        int lane_bits = stream.lane_bits, precision = stream.precision;
        u32 x0 = kLow, x1 = kLow;
        u8* ahead = loaded[warp];
        if (lane_bits == 6) {
            length = precision == 8
                         ? encode_lanes<true, true>(symbols, count, table, ahead, 8, lane_bits, out, x0, x1)
                         : encode_lanes<false, true>(symbols, count, table, ahead, precision, lane_bits, out, x0, x1);
            put_state(out + 6 * lane, x0), put_state(out + 6 * lane + 3, x1);
        } else {
            length = precision == 8
                         ? encode_lanes<true, false>(symbols, count, table, ahead, 8, lane_bits, out, x0, x1)
                         : encode_lanes<false, false>(symbols, count, table, ahead, precision, lane_bits, out, x0, x1);
            if (lane < 1 << lane_bits) put_state(out + 3 * lane, x0);
        }
    }
    if (!lane) stream.lengths[where.index] = length;
}

// ── frames ────────────────────────────────────────────────────────────────────────────────────────

#include "crc.h"

const int kManyChunks = 128;

// A long piece of bytes is put into the message by several blocks.
__device__ __forceinline__ u32 slabs_of(const Piece& piece) {
    return piece.length > kSlab ? u32((piece.length + kSlab - 1) / kSlab) : 1u;
}

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
                if (piece.kind == PIECE_LENGTH) places++;
                if (piece.kind == PIECE_BYTES) places += slabs_of(piece);
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
            for (int k = 0; k < frame->pieces; k++) {
                Piece& piece = frame->piece[k];
                piece.offset += offset + length - payload;
                if (piece.kind != PIECE_STREAM) continue;
                Stream& stream = job->streams[piece.stream];
                stream.place = piece.offset + stream.length - stream.data;
            }
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

// Copies bytes into the message, and adds them to the checksum of their frame. By all threads of a block of 160: the
// last warp finds in the meantime what the checksum is multiplied by, which takes as long.
__device__ __noinline__ void place(Job* job, Frame& frame, const u8* from, u64 offset, u64 length) {
    __shared__ u32 power;
    __syncthreads();  // that of an earlier call was used
    if (threadIdx.x >= 128) {
        u32 found = times_power_by_warp(0x80000000u, end_of(frame) - offset - length);
        if (threadIdx.x == 128) power = found;
    }
    u32 crc = copy_with_crc(job->out + offset, from, length);
    if (!threadIdx.x) atomicXor(&frame.crc, times(crc, power));
}

// The header of a frame, behind which its checksum stands, from scratch of the block.
__device__ __forceinline__ int write_header(Job* job, Frame& frame, u8* small) {
    u64 payload = 0;
    for (int k = 0; k < frame.pieces; k++) payload += frame.piece[k].length;
    int n = put_varint(small, payload);
    for (int k = 0; k < frame.shape_length; k++) small[n++] = frame.shape[k];
    for (int k = 0; k < 5; k++) job->out[frame.offset + k] = frame.start[k];
    return n;
}

// Everything to its place in the message: one block of 160 threads for each slab of each piece of each frame (the piece
// −1 is its header), and one for each chunk.
extern "C" __global__ void __launch_bounds__(160) place_all(Job* job) {
    __shared__ __attribute__((aligned(16))) u8 small[kMostHead + 16];
    __shared__ int small_length;
    if (job->status->length > job->room) return;
    if (blockIdx.x >= u32(job->piece_count)) {
        Where where = job->chunks[blockIdx.x - job->piece_count];
        Stream& stream = job->streams[where.item];
        if (where.index >= stream.chunks) return;
        Frame& frame = job->frames[stream.frame];
        place(job, frame, chunk_room(stream, where.index), stream.place + stream.offsets[where.index],
              stream.lengths[where.index]);
        finish(job, frame);
        return;
    }
    Where where = job->pieces[blockIdx.x];
    Frame& frame = job->frames[where.item];
    Piece& piece = frame.piece[where.index & 255];  // not of a header
    int slab = where.index >> 8;
    const u8 *from = small, *more = nullptr;
    u64 offset, length, more_length = 0;
    if (where.index < 0) {
        if (!threadIdx.x) small_length = write_header(job, frame, small);
        if (threadIdx.x < 32) {
            u32 crc = ~0u;
            for (int k = 0; k < 5; k++) crc = crc_byte(crc, frame.start[k]);
            crc = times_power_by_warp(crc, frame.length - 9);
            if (!threadIdx.x) atomicXor(&frame.crc, crc);
        }
        __syncthreads();
        offset = frame.offset + 9, length = small_length;
    } else if (piece.kind == PIECE_BYTES) {
        if (u32(slab) >= slabs_of(piece)) return;
        u64 begin = u64(slab) * kSlab, left = piece.length - begin;
        from = piece.bytes + begin, offset = piece.offset + begin, length = left < kSlab ? left : kSlab;
    } else if (piece.kind == PIECE_LENGTH) {
        if (!threadIdx.x) put_varint(small, job->streams[piece.stream].length);
        __syncthreads();
        offset = piece.offset, length = piece.length;
    } else {
        Stream& stream = job->streams[piece.stream];
        from = stream.head, offset = piece.offset, length = stream.head_length;
        if (stream.used_coder == RANS) {
            more = reinterpret_cast<const u8*>(stream.lengths);
            more_length = 4 * u64(stream.chunks - 1);
        }
    }
    place(job, frame, from, offset, length);
    if (more) place(job, frame, more, offset + length, more_length);
    finish(job, frame);
}

// How large the structures are here, for the test that numpy lays them out alike.
extern "C" __global__ void sizes(i64* out) {
    const i64 all[] = {sizeof(Tensor), sizeof(Fit),    sizeof(Stream), sizeof(Piece),
                       sizeof(Frame),  sizeof(Status), sizeof(Where),  sizeof(Job)};
    for (int i = 0; i < 8; i++) out[i] = all[i];
}
