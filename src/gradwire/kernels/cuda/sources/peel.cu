// Peeling (docs/homomorphic.md): blocks are recovered from cells that hold no other unresolved block.
//
// Whoever takes the last but one block out of a cell has found the next block to recover, and keeps that cell for itself
// or puts it in a queue. A thread without a cell takes a ticket for the next slot of the queue, and looks at it now and
// then until it is filled, or until there is nothing left to recover. It waits for threads alone that are at work, so
// that blocks of threads that have not begun yet are never waited for. Which blocks are recovered, and
// their values, do not depend on the order. A cell has a key, the sum of 2^32 + i over its unresolved blocks i: its
// upper half is 1 if and only if there is one block, and then its lower half says which. So one atomic operation takes a
// block out of a cell and tells whether one is left.
#include "blocks.h"

struct Queue {
    u64 tail;  // cells that were put in
    u64 head;  // tickets that were given out: each is for one slot, which may be empty yet
    u64 pending;  // cells that are in the queue or with a thread; when there are none, peeling has ended
    u64 spare;
};

const u64 kOne = 1ull << 32;

// Every block of the list is in its four cells.
extern "C" __global__ void fill_keys(const i64* blocks, i64 count, i64 segments, i64 segment_log, i64 seed, u64* keys) {
    Hashes hashes(segments, segment_log, seed);
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        u32 cells[4];
        hashes.cells_of(u32(blocks[i]), cells);
        for (int j = 0; j < 4; j++) atomicAdd(&keys[cells[j]], kOne + u64(i));
    }
}

// A cell that holds one block, and which: what a slot of the queue has. It is never zero, as an empty slot is.
__device__ __forceinline__ u64 single(u32 cell, u64 key) { return (u64(cell) + 1) << 32 | u32(key); }

// Puts the cells of these lanes in the queue; `all` lanes of the warp together have so many, and `until` are those of
// the lanes up to this one.
__device__ __forceinline__ void put_in_queue(Queue* queue, u64* slots, const u64* singles, u32 count, u32 until,
                                             u32 all) {
    u64 start = 0;
    if (!lane_of_thread()) start = atomicAdd(&queue->tail, u64(all));
    start = __shfl_sync(~0u, start, 0) + until - count;
    for (u32 k = 0; k < count; k++) *static_cast<volatile u64*>(slots + start + k) = singles[k];
}

extern "C" __global__ void find_singles(const u64* keys, i64 cells, Queue* queue, u64* slots) {
    i64 rounded = (cells + 31) & ~i64(31);
    for (i64 i = thread_of_grid(); i < rounded; i += threads_of_grid()) {
        bool found = i < cells && keys[i] >> 32 == 1;
        u32 votes = __ballot_sync(~0u, found);
        if (!votes) continue;
        u64 cell = found ? single(u32(i), keys[i]) : 0;
        put_in_queue(queue, slots, &cell, found, __popc(votes & lanes_below()) + found, __popc(votes));
    }
}

extern "C" __global__ void open_queue(Queue* queue) { queue->pending = queue->tail; }

// Recovers the block of a cell that holds one, unless another thread does from another cell; returns how many cells hold
// one block from now on, and which.
__device__ __forceinline__ u32 recover(u64 which, const Hashes& hashes, const i64* blocks, i64 lanes, u64* keys,
                                       u32* sums, u32* claimed, u32* values, u64 (&found)[3]) {
    u32 cell = u32(which >> 32) - 1, i = u32(which), bit = 1u << (i & 31);
    // These are read before it is known whether they are needed, so that all three are under way together.
    u32 block = u32(blocks[i]), first = *static_cast<volatile u32*>(sums + u64(cell) * lanes);
    if (atomicOr(&claimed[i >> 5], bit) & bit) return 0;
    u32 cells[4], count = 0;
    hashes.cells_of(block, cells);
    for (i64 k = 0; k < lanes; k++) {
        volatile u32* sum = sums + u64(cell) * lanes + k;
        u32 value = k ? *sum : first;
        values[u64(i) * lanes + k] = value;
        if (!value) continue;
        *sum = 0;
        for (int j = 0; j < 4; j++)
            if (cells[j] != cell) atomicAdd(&sums[u64(cells[j]) * lanes + k], 0u - value);
    }
    keys[cell] = 0;
    __threadfence();  // whoever finds a key of one block finds its sum
    for (int j = 0; j < 4; j++) {
        if (cells[j] == cell) continue;
        u64 taken = kOne + u64(i), now = atomicAdd(&keys[cells[j]], 0ull - taken) - taken;
        if (now >> 32 == 1) found[count++] = single(cells[j], now);
    }
    __threadfence();
    return count;
}

extern "C" __global__ void peel(Queue* queue, u64* slots, i64 cells, const i64* blocks, i64 lanes, i64 segments,
                                i64 segment_log, i64 seed, u64* keys, u32* sums, u32* claimed, u32* values) {
    Hashes hashes(segments, segment_log, seed);
    int lane = lane_of_thread();
    bool waits = false;  // for the slot of its ticket
    u64 ticket = 0, which = 0;  // the cell that this thread has, if any
    while (true) {
        u32 asking = __ballot_sync(~0u, !which && !waits);
        if (asking) {
            u64 first = 0;
            if (!lane) first = atomicAdd(&queue->head, u64(__popc(asking)));
            first = __shfl_sync(~0u, first, 0);
            if (!which && !waits) {
                ticket = first + __popc(asking & lanes_below());
                waits = true;
            }
        }
        if (waits && ticket < u64(cells)) {  // no cell comes twice, so that there are no more slots
            which = *static_cast<volatile u64*>(slots + ticket);
            if (which) {
                waits = false;
                __threadfence();
            }
        }
        u32 working = __ballot_sync(~0u, which != 0);
        if (!working) {
            u64 pending = 0;
            if (!lane) pending = *static_cast<volatile u64*>(&queue->pending);
            if (!__shfl_sync(~0u, pending, 0)) return;
            __nanosleep(100);
            continue;
        }
        u64 found[3];
        u32 count = 0;
        if (which) count = recover(which, hashes, blocks, lanes, keys, sums, claimed, values, found);
        which = count ? found[0] : 0;
        u32 more = count ? count - 1 : 0, until = warp_scan(more), all = __shfl_sync(~0u, until, 31);
        i64 change = i64(all) + __popc(__ballot_sync(~0u, count)) - __popc(working);
        if (!lane && change) atomicAdd(&queue->pending, u64(change));
        if (all) {
            __threadfence();  // cells count as pending before anybody else can see them
            __syncwarp();
            put_in_queue(queue, slots, found + 1, more, until, all);
        }
    }
}

// ── what was found ──

__device__ __forceinline__ bool is_claimed(const u32* claimed, u64 i) { return claimed[i >> 5] >> (i & 31) & 1; }

// How many words of each unit are known and not zero, and how many are not known.
extern "C" __global__ void count_found(const i64* blocks, i64 count, i64 lanes, i64 words, const u32* claimed,
                                       const u32* values, u32* known, u32* left, i64* wrong) {
    i64 unit = unit_of_warp();
    if (unit * kUnit >= count * lanes) return;
    u32 own_known = 0, own_left = 0;
    bool beyond = false;
    for (i64 at = unit * kUnit + lane_of_thread(); at < (unit + 1) * kUnit && at < count * lanes; at += 32) {
        i64 i = at / lanes;
        bool inside = blocks[i] * lanes + at % lanes < words, resolved = is_claimed(claimed, i);
        own_known += inside && resolved && values[at];
        own_left += inside && !resolved;
        beyond |= !inside && resolved && values[at];  // words beyond the last are nobody's
    }
    if (beyond) *wrong = 1;
    own_known = warp_sum_u32(own_known);
    own_left = warp_sum_u32(own_left);
    if (!lane_of_thread()) {
        known[unit] = own_known;
        left[unit] = own_left;
    }
}

// Cells without a block that is left must be zero now, or index and sketch do not belong together.
extern "C" __global__ void check_cells(const u64* keys, const u32* sums, i64 cells, i64 lanes, i64* wrong) {
    bool found = false;
    for (i64 i = thread_of_grid(); i < cells * lanes; i += threads_of_grid()) found |= sums[i] && !keys[i / lanes];
    if (found) *wrong = 1;
}

extern "C" __global__ void write_found(const i64* blocks, i64 count, i64 lanes, i64 words, const u32* claimed,
                                       const u32* values, const u32* known, const u32* left, i64* positions, u32* found,
                                       i64* left_at) {
    i64 unit = unit_of_warp();
    if (unit * kUnit >= count * lanes) return;
    u32 to_known = known[unit], to_left = left[unit];
    for (i64 first = unit * kUnit; first < (unit + 1) * kUnit && first < count * lanes; first += 32) {
        i64 at = first + lane_of_thread(), position = words;
        bool here = at < count * lanes, resolved = false;
        u32 value = 0;
        if (here) {
            position = blocks[at / lanes] * lanes + at % lanes;
            resolved = is_claimed(claimed, at / lanes);
            value = resolved ? values[at] : 0;
        }
        u32 is_known = __ballot_sync(~0u, position < words && value);
        u32 is_left = __ballot_sync(~0u, position < words && here && !resolved);
        u32 bit = 1u << lane_of_thread();
        if (is_known & bit) {
            u32 to = to_known + __popc(is_known & lanes_below());
            positions[to] = position;
            found[to] = value;
        }
        if (is_left & bit) left_at[to_left + __popc(is_left & lanes_below())] = position;
        to_known += __popc(is_known);
        to_left += __popc(is_left);
    }
}
