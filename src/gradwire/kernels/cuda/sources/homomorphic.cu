// The kernels of the homomorphic code (docs/homomorphic.md): words on a grid, index, sketch. Peeling is in peel.cu.
#include "blocks.h"

struct Grid {
    float step, limit;  // limit: the largest fp32 number up to `most`
    bool stochastic;
    u64 seed;
};

__device__ __forceinline__ float float_of(i64 bits) { return __uint_as_float(u32(bits)); }

// The integer that a value becomes, as fp32 number.
__device__ __forceinline__ float on_grid(const Grid& grid, float value, i64 i) {
    float y = limited(__fdiv_rn(value, grid.step), grid.limit);
    if (!grid.stochastic) return rintf(y);
    float lower = floorf(y);
    float random = __fmul_rn(float(random24(grid.seed, u64(i))), 1.0f / 16777216.0f);
    return random < __fsub_rn(y, lower) ? __fadd_rn(lower, 1.0f) : lower;
}

// One unit of entries, `fields` of them in a word.
template <int fields>
__device__ __forceinline__ void quantize_unit(const float* gradient, const float* memory, float* memory_out, i64 count,
                                              float decay, const Grid& grid, i64 unit, u32* values, u16* locals,
                                              u32* counts, u32* largest, double* squares) {
    const int kEntries = fields == 8 ? 8 : 4, kWords = kEntries / fields, bits = 32 / fields;
    int lane = lane_of_thread();
    bool whole = aligned16(gradient) && (!memory || aligned16(memory));
    bool whole_out = memory_out && aligned16(memory_out);
    values += unit * (kUnit / fields);
    locals += unit * (kUnit / fields);
    u32 filled = 0, top = 0;
    double square = 0;
    for (int first = 0; first < kUnit && unit * kUnit + first < count; first += 32 * kEntries) {
        i64 i = unit * kUnit + first + lane * kEntries;
        float g[kEntries], e[kEntries];
        load_entries(gradient, i, count, whole, g);
        if (memory) load_entries(memory, i, count, whole, e);
        u32 words[kWords];
        bool kept[kWords];
        for (int w = 0; w < kWords; w++) words[w] = 0;
        for (int k = 0; k < kEntries; k++) {
            float after = memory ? __fmul_rn(e[k], decay) : 0.0f;
            if (g[k] != 0) {  // an entry whose gradient is zero is not sent
                float sum = memory ? sum_of(g[k], e[k], decay) : g[k], u = memory ? limited(sum, kFloatMax) : sum;
                float q = on_grid(grid, u, i + k);
                after = __fsub_rn(u, __fmul_rn(q, grid.step));
                u32 magnitude_ = is_finite(g[k]) && sum == sum ? magnitude(u) : 0x7f800000u;
                top = magnitude_ > top ? magnitude_ : top;
                square += double(u) * double(u);
                words[k / fields] += u32(int(q)) << (fields == 1 ? 0 : bits * (k % fields));
            }
            e[k] = after;
        }
        if (memory_out) store_entries(memory_out, i, count, whole_out, e);
        for (int w = 0; w < kWords; w++) kept[w] = words[w] != 0;
        filled = stage(words, kept, (first + lane * kEntries) / fields, filled, values, locals);
    }
    for (int by = 16; by; by >>= 1) {
        u32 other = __shfl_xor_sync(~0u, top, by);
        top = other > top ? other : top;
    }
    square = warp_sum(square);
    if (!lane) {
        counts[unit] = filled;
        largest[unit] = top;
        squares[unit] = square;
    }
}

extern "C" __global__ void quantize(const float* gradient, const float* memory, float* memory_out, i64 count, i64 decay,
                                    i64 step, i64 limit, i64 bits, i64 stochastic, u64 seed, u32* values, u16* locals,
                                    u32* counts, u32* largest, double* squares) {
    i64 unit = unit_of_warp();
    if (unit * kUnit >= count) return;
    Grid grid = {float_of(step), float_of(limit), stochastic != 0, seed};
    float by = float_of(decay);
    if (bits == 32)
        quantize_unit<1>(gradient, memory, memory_out, count, by, grid, unit, values, locals, counts, largest, squares);
    else if (bits == 16)
        quantize_unit<2>(gradient, memory, memory_out, count, by, grid, unit, values, locals, counts, largest, squares);
    else if (bits == 8)
        quantize_unit<4>(gradient, memory, memory_out, count, by, grid, unit, values, locals, counts, largest, squares);
    else
        quantize_unit<8>(gradient, memory, memory_out, count, by, grid, unit, values, locals, counts, largest, squares);
}

// The largest magnitude and Σu² of all units, the latter always in the same order; by one block.
extern "C" __global__ void summarize(const u32* largest, const double* squares, i64 units, i64* top, double* sum) {
    __shared__ u32 tops[32];
    u32 own = 0;
    double square = 0;
    for (i64 i = threadIdx.x; i < units; i += blockDim.x) {
        own = largest[i] > own ? largest[i] : own;
        square += squares[i];
    }
    for (int by = 16; by; by >>= 1) {
        u32 other = __shfl_xor_sync(~0u, own, by);
        own = other > own ? other : own;
    }
    if (!lane_of_thread()) tops[threadIdx.x >> 5] = own;
    square = block_sum(square);
    if (threadIdx.x) return;
    for (u32 w = 0; w < blockDim.x >> 5; w++) own = tops[w] > own ? tops[w] : own;
    *top = own;
    *sum = square;
}

// The words of all units, one behind the other, with their positions.
extern "C" __global__ void collect(const u32* values, const u16* locals, const u32* starts, i64 units, const i64* total,
                                   i64 stride, i64* positions, u32* words) {
    i64 unit = unit_of_warp();
    if (unit >= units) return;
    u32 length = length_of(starts, unit, units, total), start = starts[unit];
    for (u32 j = lane_of_thread(); j < length; j += 32) {
        positions[start + j] = unit * stride + locals[unit * stride + j];
        words[start + j] = values[unit * stride + j];
    }
}

extern "C" __global__ void quantize_given(const float* values, i64 count, i64 step, i64 limit, i64 stochastic, u64 seed,
                                          int* q, float* sent) {
    Grid grid = {float_of(step), float_of(limit), stochastic != 0, seed};
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        float y = __fadd_rn(on_grid(grid, values[i], i), 0.0f);  // no −0
        q[i] = int(y);
        sent[i] = __fmul_rn(y, grid.step);
    }
}

extern "C" __global__ void put(float* out, i64 entries, const i64* positions, const u32* words, i64 count, i64 bits,
                               i64 factor) {
    double by = __longlong_as_double(factor);
    int fields = int(32 / bits);
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        u32 rest = words[i], half = 1u << (bits - 1);
        i64 entry = positions[i] * fields;
        for (int field = 0; field < fields && entry < entries; field++, entry++) {
            int q = bits == 32 ? int(rest) : int((rest + half) & (2 * half - 1)) - int(half);
            if (bits < 32) rest = (rest - u32(q)) >> bits;
            out[entry] = __double2float_rn(double(q) * by);
        }
    }
}

// ── index ──

extern "C" __global__ void find_disorder(const i64* positions, i64 count, i64 limit, i64* found) {
    bool wrong = false;
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        i64 here = positions[i];
        wrong |= here < 0 || here >= limit || (i && positions[i - 1] >= here);
    }
    if (wrong) *found = 1;
}

// Adds up a number of each thread in `to`, with one atomic operation for each warp.
__device__ __forceinline__ void add_counts(u32 own, i64* to) {
    own = warp_sum_u32(own);
    if (!lane_of_thread() && own) atomicAdd(reinterpret_cast<u64*>(to), u64(own));
}

extern "C" __global__ void count_held(const i64* positions, i64 count, i64 lanes, i64* blocks) {
    u32 own = 0;
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid())
        own += !i || u64(positions[i]) / u64(lanes) != u64(positions[i - 1]) / u64(lanes);
    add_counts(own, blocks);
}

extern "C" __global__ void count_set(const u32* bitmap, i64 words, i64* bits) {
    u32 own = 0;
    for (i64 i = thread_of_grid(); i < words; i += threads_of_grid()) own += __popc(bitmap[i]);
    add_counts(own, bits);
}

// How many of these positions are in blocks that the bitmap marks.
extern "C" __global__ void count_met(const u32* bitmap, const i64* positions, i64 count, i64 lanes, i64* met) {
    u32 own = 0;
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        u32 block = block_of(positions[i], lanes);
        own += bitmap[block >> 5] >> (block & 31) & 1;
    }
    add_counts(own, met);
}

extern "C" __global__ void mark(const i64* positions, i64 count, i64 lanes, u32* bitmap) {
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        u32 block = block_of(positions[i], lanes);
        atomicOr(&bitmap[block >> 5], 1u << (block & 31));
    }
}

__device__ __forceinline__ u32 rotated(u32 x, u32 by) { return __funnelshift_l(x, x, by); }

extern "C" __global__ void fill_filter(const u32* bitmap, i64 words, i64 probes, i64 seed, u32* filter, i64 length) {
    u32 key = mix(u32(seed) ^ kOther);
    for (i64 i = thread_of_grid(); i < words; i += threads_of_grid()) {
        u32 bits = bitmap[i], a = mix(u32(i) ^ key);
        for (u32 p = 0; bits && p < probes; p++) {
            u32 h = mix(a + p * kGolden);
            atomicOr(&filter[u64(h) * u64(length) >> 32], rotated(bits, h & 31));
        }
    }
}

extern "C" __global__ void ask_filter(const u32* filter, i64 length, i64 probes, i64 seed, u32* bitmap, i64 words) {
    u32 key = mix(u32(seed) ^ kOther);
    for (i64 i = thread_of_grid(); i < words; i += threads_of_grid()) {
        u32 bits = ~0u, a = mix(u32(i) ^ key);
        for (u32 p = 0; bits && p < probes; p++) {
            u32 h = mix(a + p * kGolden);
            bits &= rotated(filter[u64(h) * u64(length) >> 32], 32 - (h & 31));
        }
        bitmap[i] = bits;
    }
}

// How many words the marked blocks of each unit have; a unit is 32 words of the bitmap, one for each lane.
extern "C" __global__ void count_marked(const u32* bitmap, i64 words, i64 lanes, u32* counts) {
    i64 unit = unit_of_warp(), blocks = (words + lanes - 1) / lanes;
    if (unit * kUnit >= blocks) return;
    u32 own = words_marked(bits_below(bitmap, unit * 32 + lane_of_thread(), blocks), unit * 32 + lane_of_thread(),
                           blocks, words, lanes);
    own = warp_sum_u32(own);
    if (!lane_of_thread()) counts[unit] = own;
}

// The positions of all words of marked blocks, and for each word of the bitmap how many there are before its own.
extern "C" __global__ void list_marked(const u32* bitmap, i64 words, i64 lanes, const u32* starts, u32* before,
                                       i64* positions) {
    i64 unit = unit_of_warp(), blocks = (words + lanes - 1) / lanes;
    if (unit * kUnit >= blocks) return;
    int lane = lane_of_thread();
    i64 mine = unit * 32 + lane;
    u32 bits = bits_below(bitmap, mine, blocks), own = words_marked(bits, mine, blocks, words, lanes);
    u32 start = starts[unit] + warp_scan(own) - own;
    if (mine * 32 < blocks) before[mine] = start;
    u32 any = __ballot_sync(~0u, bits != 0);
    while (any) {  // one word of the bitmap after the other, a lane for each of its bits
        int from = __ffs(int(any)) - 1;
        any &= any - 1;
        u32 shared = __shfl_sync(~0u, bits, from), at = __shfl_sync(~0u, start, from);
        if (!(shared >> lane & 1)) continue;
        i64 block = (unit * 32 + from) * 32 + lane;
        at += __popc(shared & lanes_below()) * u32(lanes);
        for (i64 k = 0; k < lanes && block * lanes + k < words; k++) positions[at + k] = block * lanes + k;
    }
}

// Puts a message's words where the union has them.
extern "C" __global__ void place(const u32* bitmap, const u32* before, const i64* positions, const u32* values,
                                 i64 count, i64 lanes, u32* aligned) {
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        u32 block = block_of(positions[i], lanes), bits = bitmap[block >> 5];
        if (!(bits >> (block & 31) & 1)) continue;
        u32 rank = __popc(bits & ((1u << (block & 31)) - 1));
        aligned[before[block >> 5] + u64(rank) * lanes + (positions[i] & (lanes - 1))] = values[i];
    }
}

// ── sketch ──

extern "C" __global__ void add_to_sketch(const i64* positions, const u32* values, i64 count, i64 lanes, i64 segments,
                                         i64 segment_log, i64 seed, u32* sketch) {
    Hashes hashes(segments, segment_log, seed);
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        u32 cells[4];
        hashes.cells_of(block_of(positions[i], lanes), cells);
        for (int j = 0; j < 4; j++) atomicAdd(&sketch[u64(cells[j]) * lanes + (positions[i] & (lanes - 1))], values[i]);
    }
}
