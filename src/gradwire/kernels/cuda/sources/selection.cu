// The entries with the largest magnitudes, and of equals those with the lowest positions (`select` of the reference).
//
// Magnitudes are compared as bit patterns of 31 bits. Three histograms, of the upper 11 bits, then of the next 10 and of
// the last 10 of those that agree with what was found so far, give the least pattern that is selected, and how many of
// the entries that have it.
#include "units.h"

const int kBins = 2048;

struct Choice {
    u64 pattern;  // what is known of the least pattern that is selected
    u64 remaining;  // how many entries with this pattern are selected
    u64 settled;  // all entries from `pattern` on are selected: there are no more than were asked for
    u64 not_finite;
};

__device__ __forceinline__ void empty_bins(u32* bins) {
    for (int b = threadIdx.x; b < kBins; b += blockDim.x) bins[b] = 0;
    __syncthreads();
}

__device__ __forceinline__ void hand_over_bins(const u32* bins, u32* histogram) {
    __syncthreads();
    for (int b = threadIdx.x; b < kBins; b += blockDim.x)
        if (bins[b]) atomicAdd(&histogram[b], bins[b]);
}

// u = g + decay·e, where it is to be kept, and the first histogram.
extern "C" __global__ void compensate_and_count(const float* gradient, const float* memory, float* out, i64 count,
                                                i64 decay, i64 low, u32* histogram, Choice* choice) {
    __shared__ u32 bins[kBins];
    empty_bins(bins);
    float by = __uint_as_float(u32(decay));
    bool whole = aligned16(gradient) && (!memory || aligned16(memory)), whole_out = out && aligned16(out);
    bool bad = false;
    for (i64 i = thread_of_grid() * 4; i < count; i += threads_of_grid() * 4) {
        float u[4], e[4];
        load_entries(gradient, i, count, whole, u);
        if (memory) {
            load_entries(memory, i, count, whole, e);
            for (int k = 0; k < 4; k++) u[k] = __fadd_rn(u[k], __fmul_rn(e[k], by));
        }
        if (out) store_entries(out, i, count, whole_out, u);
        for (int k = 0; k < 4; k++) {
            u32 bits = magnitude(u[k]);
            bad |= bits >= 0x7f800000u;
            if (bits >= low && i + k < count) atomicAdd(&bins[bits >> 20], 1u);
        }
    }
    if (bad) choice->not_finite = 1;
    hand_over_bins(bins, histogram);
}

// The next histogram: of the 10 bits from `shift` on, where those above are the ones that were found.
extern "C" __global__ void count_next(const float* u, i64 count, i64 low, i64 shift, const Choice* choice,
                                      u32* histogram) {
    if (choice->settled) return;
    __shared__ u32 bins[kBins];
    empty_bins(bins);
    u32 pattern = u32(choice->pattern);
    bool whole = aligned16(u);
    for (i64 i = thread_of_grid() * 4; i < count; i += threads_of_grid() * 4) {
        float x[4];
        load_entries(u, i, count, whole, x);
        for (int k = 0; k < 4; k++) {
            u32 bits = magnitude(x[k]);
            if (bits >= low && bits >> (shift + 10) == pattern && i + k < count)
                atomicAdd(&bins[bits >> shift & 1023], 1u);
        }
    }
    hand_over_bins(bins, histogram);
}

// Finds the bin of the entry with rank `remaining`, from the top, and empties the histogram; one block of 1024 threads.
extern "C" __global__ void pick_bin(u32* histogram, i64 wanted, i64 low, i64 first, Choice* choice) {
    int upper = kBins - 1 - 2 * int(threadIdx.x), lower = upper - 1;
    u32 in_upper = histogram[upper], in_lower = histogram[lower];
    u64 remaining = first ? u64(wanted) : choice->remaining, all, settled = choice->settled;
    u64 before = block_scan(u64(in_upper) + in_lower, &all);
    histogram[upper] = histogram[lower] = 0;
    if (settled) return;
    if (all <= remaining) {  // at the first histogram alone; later there are always enough
        if (!threadIdx.x && first) {
            choice->pattern = u64(low);
            choice->remaining = ~0ull;
            choice->settled = 1;
            return;
        }
        if (first) return;
    }
    u64 prefix = first ? 0 : choice->pattern << 10;
    __syncthreads();
    if (before < remaining && before + in_upper >= remaining) {
        choice->pattern = prefix | u64(upper);
        choice->remaining = remaining - before;
    } else if (before + in_upper < remaining && before + in_upper + in_lower >= remaining) {
        choice->pattern = prefix | u64(lower);
        choice->remaining = remaining - before - in_upper;
    }
}

// Without a limit to their number all entries from `low` on are selected.
extern "C" __global__ void take_all(i64 low, Choice* choice) {
    choice->pattern = u64(low);
    choice->remaining = ~0ull;
    choice->settled = 1;
}

// Every unit stages its entries from the least pattern on; `equals` of them have just this pattern.
extern "C" __global__ void stage_selected(const float* u, i64 count, const Choice* choice, u32* values, u16* locals,
                                          u32* staged, u32* equals) {
    i64 unit = unit_of_warp();
    if (unit * kUnit >= count) return;
    u32 least = u32(choice->pattern), filled = 0, same = 0;
    bool whole = aligned16(u);
    for (int first = 0; first < kUnit && unit * kUnit + first < count; first += 128) {
        i64 i = unit * kUnit + first + 4 * lane_of_thread();
        float x[4];
        u32 words[4];
        bool kept[4];
        load_entries(u, i, count, whole, x);
        for (int k = 0; k < 4; k++) {
            words[k] = __float_as_uint(x[k]);
            kept[k] = i + k < count && magnitude(x[k]) >= least;
            same += kept[k] && magnitude(x[k]) == least;
        }
        filled = stage(words, kept, first + 4 * lane_of_thread(), filled, values + unit * kUnit, locals + unit * kUnit);
    }
    same = warp_sum_u32(same);
    if (!lane_of_thread()) {
        staged[unit] = filled | same << 16;
        equals[unit] = same;
    }
}

__device__ __forceinline__ u32 chosen_equals(u64 remaining, u32 before, u32 same) {
    if (remaining <= before) return 0;
    return remaining - before < same ? u32(remaining - before) : same;
}

// How many entries of each unit are selected, now that `equals` says how many equals are before it.
extern "C" __global__ void count_selected(const u32* staged, const u32* equals, i64 units, const Choice* choice,
                                          u32* counts) {
    for (i64 i = thread_of_grid(); i < units; i += threads_of_grid()) {
        u32 filled = staged[i] & 0xffff, same = staged[i] >> 16;
        counts[i] = filled - same + chosen_equals(choice->remaining, equals[i], same);
    }
}

extern "C" __global__ void collect_selected(const u32* values, const u16* locals, const u32* staged, const u32* equals,
                                            const u32* starts, i64 units, const Choice* choice, i64* positions,
                                            u32* selected) {
    i64 unit = unit_of_warp();
    if (unit >= units) return;
    u32 least = u32(choice->pattern), filled = staged[unit] & 0xffff, start = starts[unit], same = 0;
    u32 allowed = chosen_equals(choice->remaining, equals[unit], staged[unit] >> 16);
    for (u32 first = 0; first < filled; first += 32) {
        u32 j = first + lane_of_thread(), value = 0;
        if (j < filled) value = values[unit * kUnit + j];
        bool equal = j < filled && (value & 0x7fffffffu) == least;
        u32 votes = __ballot_sync(~0u, equal);
        bool kept = j < filled && (!equal || same + __popc(votes & lanes_below()) < allowed);
        u32 places = __ballot_sync(~0u, kept);
        if (kept) {
            u32 to = start + __popc(places & lanes_below());
            positions[to] = unit * kUnit + locals[unit * kUnit + j];
            selected[to] = value;
        }
        same += __popc(votes);
        start += __popc(places);
    }
}
