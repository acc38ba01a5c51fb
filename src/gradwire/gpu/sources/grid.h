// What the kernels of grids (ECQ) share: the scratch of a frame, and how an entry becomes a multiple of the step.
//
// All tensors of a frame share one grid: magnitudes in units of the tensors' scales (of 1, if there is only one
// tensor).
#pragma once
#include "common.h"

const int kRuns = 1024, kRun = 64, kSample = kRuns * kRun, kPart = 1024, kTile = 8192;
const int kShifts = 7;                     // ½, 7/16, … ⅛: what is added before rounding down
const int kSearched = 1 << 14;             // entries on which the step is searched
const int kCells = 127;                    // largest magnitude of a symbol
const int kHead = 8192;                    // bytes in front of the arrays of a frame's scratch
const float kLimit = 16777216.0f;          // largest multiple

struct Format {
    double rate;  // bits an entry, or
    double nmse;  // relative squared error, if that is not 0
};

struct Scratch {                 // of a frame; the first tensor has it
    double total;                // entries of the tensors that are not all zero
    float steps[kShifts], slopes[kShifts];
    float shift, step, offset[2];
    int largest, a, b;
    u32 parts_done, tiles_done, measured;
    u32 listed;                  // outliers in the list
    u64 code_bytes;              // of the codes of outliers
    u32 sizes[32];               // how many excesses have so many bits
    u32 counts[kShifts][256];    // cells of the whole sample: see `Cells`
};
static_assert(sizeof(Scratch) <= kHead, "the host reserves so much");

struct TileRecord {              // in the place of the sums of a tile
    u32 base, count;             // of its outliers in the list: position in the frame | sign << 38 | magnitude << 39
    i64 last;                    // position of its last one in the frame, then of the last one before this tile
    u64 bits, start;             // of their codes
};

// Counts of the multiples 1 … 127, of all beyond, then of −1 … −127: 255 numbers.
typedef u32 Cells;

__device__ __forceinline__ const Stream& stream_of(const Job* job, const Tensor& t) { return job->streams[t.stream]; }

__device__ __forceinline__ const Tensor& first_of(const Job* job, const Tensor& t) {
    return job->tensors[stream_of(job, t).first_tensor];
}

__device__ __forceinline__ Scratch& scratch_of(const Job* job, const Tensor& t) {
    return *static_cast<Scratch*>(first_of(job, t).own);
}

__device__ __forceinline__ u64* list_of(Scratch& s) {
    return reinterpret_cast<u64*>(reinterpret_cast<u8*>(&s) + kHead);
}

__device__ __forceinline__ i64 capacity_of(const Stream& stream) { return 16 + stream.count / 16; }

__device__ __forceinline__ u64 code_room_of(const Stream& stream) { return 64 + 8 * u64(capacity_of(stream)); }

__device__ __forceinline__ float round_step(double step) {
    float x = __double2float_rn(step < 1.1754943508222875e-38 ? 1.1754943508222875e-38
                                : step > 8.507059173023462e37 ? 8.507059173023462e37
                                                              : step);
    return __uint_as_float((__float_as_uint(x) + 0x8000u) & 0xffff0000u);
}

__device__ __forceinline__ float step_of(float relative, const Stream& stream, const Fit& fit) {
    if (stream.tensors == 1) return relative;
    return round_step(fit.mean_abs > 0 ? double(relative) * fit.mean_abs : 1.0);
}

__device__ __forceinline__ float shift_of(int index) { return float(8 - index) / 16.0f; }

// The magnitude of the multiple; NaN is beyond all.
__device__ __forceinline__ float magnitude_of(float y, float shift) {
    float x = __fadd_rn(fabsf(y), shift);
    return floorf(x < kLimit ? x : kLimit);
}

__device__ __forceinline__ int bit_length(u32 x) { return 32 - __clz(int(x)); }
