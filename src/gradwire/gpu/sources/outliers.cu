// The list of a grid's outliers, decoded by many threads: see apart.h.
#include "apart.h"

const u64 kNowhere = ~u64(0);

struct Code {
    u64 gap, end;  // kNowhere as the end: it is none
    u32 magnitude;
    bool negative;
};

// 64 bits from a place on; zeros behind the end.
__device__ __forceinline__ u64 peek(const Apart& list, u64 at) {
    u64 address = (u64)(list.codes), bit = at + (address & 3) * 8, last = ((address & 3) * 8 + list.bits - 1) >> 5;
    const u32* words = reinterpret_cast<const u32*>(address & ~u64(3));
    u64 k = bit >> 5;
    u64 w0 = k <= last ? words[k] : 0, w1 = k + 1 <= last ? words[k + 1] : 0, w2 = k + 2 <= last ? words[k + 2] : 0;
    int shift = int(bit & 31);
    u64 x = (w0 | w1 << 32) >> shift;
    if (shift) x |= w2 << (64 - shift);
    u64 left = at < list.bits ? list.bits - at : 0;
    return left < 64 ? x & ((u64(1) << left) - 1) : x;
}

__device__ __forceinline__ int first_one(u64 x) {
    return __ffs(int(u32(x))) ? __ffs(int(u32(x))) - 1 : 31 + __ffs(int(u32(x >> 32)));
}

__device__ __forceinline__ Code read_code(const Apart& list, u64 at) {
    Code code = {0, kNowhere, 0, false};
    u64 window = peek(list, at), zeros = 0;
    while (!window && at + zeros < list.bits) {
        zeros += 64;
        window = peek(list, at + zeros);
    }
    if (!window) return code;  // only padding is left, if nothing is damaged
    int skip = first_one(window) + 1;
    zeros += skip - 1;
    if (zeros >> (32 - list.a)) return code;  // beyond any position
    at += zeros + 1;
    window = skip < 64 ? window >> skip : 0;
    int have = 64 - skip, a = list.a, b = list.b;
    if (have < a + 1) window = peek(list, at), have = 64;
    code.gap = zeros << a | (window & ((u64(1) << a) - 1));
    code.negative = window >> a & 1;
    at += a + 1;
    window >>= a + 1, have -= a + 1;
    if (have < 50) window = peek(list, at);
    if (!u32(window)) return code;
    int size = __ffs(int(u32(window))) - 1;
    if (size > 24 - b) return code;  // beyond the largest magnitude
    window >>= size + 1;
    u64 value = u64(1) << size | (window & ((u64(1) << size) - 1));
    window >>= size;
    u64 excess = (value - 1) << b | (window & ((u64(1) << b) - 1));
    at += 2 * size + 1 + b;
    if (at > list.bits || excess >= 1u << 24) return code;
    code.magnitude = u32(list.largest) + 1 + u32(excess);
    code.end = at;
    return code;
}

// Reads the codes that begin in a piece, from its entry on. What is no code ends it: the exit is then nowhere, unless
// the bits that are left may be padding.
__device__ void read_piece(const Apart& list, CodePiece& piece, u64 index, u64 entry, u64 elements) {
    u64 at = entry, limit = (index + 1) * kPieceBits, span = 0;
    limit = limit < list.bits ? limit : list.bits;
    u32 count = 0;
    while (at < limit) {
        Code code = read_code(list, at);
        if (code.end == kNowhere) {
            if (list.bits - at > 7 || peek(list, at)) at = kNowhere;
            break;
        }
        span += code.gap + 1;
        if (span > elements) span = elements + 1;  // damaged, or a wrong start
        count++;
        at = code.end;
    }
    piece.entry = entry, piece.exit = at, piece.span = span, piece.count = count;
}

__device__ __forceinline__ const Arrival* grid_of(DecodeJob* job, i64 blocks) {
    const Arrival& arrival = job->arrivals[blockIdx.x / blocks];
    return arrival.codec != 3 || arrival.broken || !apart_of(arrival).count ? nullptr : &arrival;
}

// Every piece from its first bit on. One of zeros has no code of its own: whoever begins before it walks through.
extern "C" __global__ void __launch_bounds__(128) begin_pieces(DecodeJob* job, i64 blocks) {
    const Arrival* arrival = grid_of(job, blocks);
    if (!arrival) return;
    const Apart& list = apart_of(*arrival);
    for (u64 k = u64(blockIdx.x % blocks) * 128 + threadIdx.x; k < list.pieces; k += u64(blocks) * 128) {
        CodePiece& piece = pieces_of(*arrival)[k];
        u64 start = k * kPieceBits, any = 0;
        for (u64 at = start; at < start + kPieceBits; at += 64) any |= peek(list, at);
        if (any)
            read_piece(list, piece, k, start, u64(arrival->count));
        else
            piece.entry = start, piece.exit = start + kPieceBits < list.bits ? kNowhere : start, piece.count = 0,
            piece.span = 0;
        piece.first_exit = piece.exit;
    }
}

// Every piece from where the one before ended: right for nearly all.
extern "C" __global__ void __launch_bounds__(128) join_pieces(DecodeJob* job, i64 blocks) {
    const Arrival* arrival = grid_of(job, blocks);
    if (!arrival) return;
    const Apart& list = apart_of(*arrival);
    CodePiece* pieces = pieces_of(*arrival);
    for (u64 k = u64(blockIdx.x % blocks) * 128 + threadIdx.x; k < list.pieces; k += u64(blocks) * 128) {
        u64 entry = k ? pieces[k - 1].first_exit : 0;
        if (entry != pieces[k].entry && entry != kNowhere) read_piece(list, pieces[k], k, entry, u64(arrival->count));
    }
}

// The largest number of all threads before this one, of a block of 1024; 0 for the first.
__device__ __forceinline__ u64 largest_before(u64 x) {
    __shared__ u64 of_warps[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int by = 1; by < 32; by <<= 1) {
        u64 other = __shfl_up_sync(~0u, x, by);
        if (lane >= by && other > x) x = other;
    }
    u64 before = __shfl_up_sync(~0u, x, 1);
    if (!lane) before = 0;
    __syncthreads();
    if (lane == 31) of_warps[warp] = x;
    __syncthreads();
    for (int w = 0; w < warp; w++) before = of_warps[w] > before ? of_warps[w] : before;
    return before;
}

// Lets a thread's pieces begin where the one before ends, and returns whether that changed any of them. Several are
// looked at before the first is read.
__device__ bool settle_some(const Apart& list, CodePiece* pieces, u32 first, u32 end, u64 entry, u64 elements) {
    bool changed = false;
    for (u32 base = first; base < end; base += 8) {
        u64 entries[8], exits[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++)
            if (base + k < end) entries[k] = pieces[base + k].entry, exits[k] = pieces[base + k].exit;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            if (base + k >= end) continue;
            if (entry != entries[k]) {
                changed = true;
                CodePiece& piece = pieces[base + k];
                if (entry == kNowhere)
                    piece.entry = piece.exit = kNowhere, piece.count = 0, piece.span = 0;
                else
                    read_piece(list, piece, base + k, entry, elements);
                exits[k] = piece.exit;
            }
            entry = exits[k];
        }
    }
    return changed;
}

// The rest of them, until all begin where the one before ends; then how many outliers come before each. One block of
// 1024 threads for each frame, each of which has pieces that lie side by side. As a rule nothing is left to do. After as
// many rounds as there are threads all pieces are right, so that it takes no longer than one thread would.
extern "C" __global__ void __launch_bounds__(1024) settle_pieces(DecodeJob* job) {
    __shared__ int changed;
    const Arrival* found = grid_of(job, 1);
    if (!found) return;
    const Arrival& arrival = *found;
    const Apart& list = apart_of(arrival);
    CodePiece* pieces = pieces_of(arrival);
    u32 tid = threadIdx.x, count = list.pieces, each = (count + 1023) / 1024;
    u32 first = min(tid * each, count), end = min(first + each, count);
    bool settled = false;
#pragma unroll 1
    for (u32 round = 0; round <= 1024 && !settled; round++) {
        __syncthreads();
        if (!tid) changed = 0;
        // A code may reach beyond the pieces of the next thread; what is no code tells nothing.
        u64 exit = first < end ? pieces[end - 1].exit : 0, entry = largest_before(exit == kNowhere ? 0 : exit);
        if (first < end && settle_some(list, pieces, first, end, entry, u64(arrival.count))) changed = 1;
        __syncthreads();
        settled = !changed;
    }
    u64 outliers = 0, span = 0, all_outliers, all_span;
#pragma unroll 8
    for (u32 k = first; k < end; k++) outliers += pieces[k].count, span += pieces[k].span;
    outliers = block_scan(outliers, &all_outliers);
    span = block_scan(span, &all_span);
#pragma unroll 4
    for (u32 k = first; k < end; k++) {
        u64 mine = pieces[k].span;
        pieces[k].rank = u32(outliers), pieces[k].span = span;
        outliers += pieces[k].count, span += mine;
    }
    // What is no code must not stand before the end.
    bool broken = first < end && first &&
                  (pieces[first - 1].exit == kNowhere || pieces[first - 1].exit != pieces[first].entry);
    if (broken) changed = 1;
    __syncthreads();
    if (tid) return;
    u64 last = pieces[count - 1].exit;
    bool sound = !changed && last != kNowhere && list.bits - last <= 7 && !peek(list, last);
    if (!sound || all_outliers != list.count || all_span > u64(arrival.count)) {
        job->arrivals[blockIdx.x].broken = 1;
        atomicOr(&job->status->bits, u32(UNUSUAL));
    }
}

// Positions and values, and the mark in the place of their symbols.
extern "C" __global__ void __launch_bounds__(128) list_outliers(DecodeJob* job, i64 blocks) {
    const Arrival* found = grid_of(job, blocks);
    if (!found || job->status->bits) return;
    const Arrival& arrival = *found;
    const Apart& list = apart_of(arrival);
    Listed* listed = listed_of(arrival);
    u32* index = index_of(arrival);
    i64 buckets = i64(buckets_of(arrival));
    for (u64 k = u64(blockIdx.x % blocks) * 128 + threadIdx.x; k < list.pieces; k += u64(blocks) * 128) {
        const CodePiece piece = pieces_of(arrival)[k];
        u64 at = piece.entry;
        i64 position = i64(piece.span) - 1;
        u32 held = u32(list.largest);  // the symbol in the place of the outlier before: it is not waited for
        bool usual = true;
        for (u32 j = 0; j < piece.count; j++) {
            Code code = read_code(list, at);
            i64 bucket = position < 0 ? -1 : position / kBucket;
            position += i64(code.gap) + 1;
            at = code.end;
            u32 rank = piece.rank + j;
            for (i64 b = bucket + 1; b <= position / kBucket; b++) index[b] = rank;
            if (rank == list.count - 1)
                for (i64 b = position / kBucket + 1; b < buckets; b++) index[b] = rank + 1;
            int which = int(code.magnitude) < list.offset_count ? int(code.magnitude) : list.offset_count;
            float level = __fadd_rn(float(code.magnitude), which ? list.offsets[which - 1] : 0.0f);
            listed[rank] = {u32(position), code.negative ? -level : level};
            u8* symbol = arrival.symbols + position;
            usual &= held == u32(list.largest) && code.magnitude <= 1u << 24;
            held = *symbol;
            *symbol = u8(kApart);
        }
        if (!usual || held != u32(list.largest)) atomicOr(&job->status->bits, u32(UNUSUAL));
    }
}
