// What the host tells the decoding kernels: messages of all ranks, the frames in them, and the tensors they average to.
#pragma once
#include "common.h"

struct Message {  // of one rank
    const u8* bytes;  // its frames, without prefix and note
    u64 length;
};

struct Arrival {  // one frame of one rank
    // ── written by the host ──
    u8* symbols;  // where its symbols go, `most` of them at most
    u64* offsets;  // of its chunks; room for count / 64 + 1 of them
    u32* table;  // room for 2^14 entries: what every slot of the coder means
    float* steps;  // of its segments
    const u64* lengths;  // of its segments, in entries
    u8* own;  // scratch that its family asked for
    i64 count;  // entries that it must have
    i64 most;  // entries that a sparse frame may send
    int message, index;  // which frame of which message
    int segments, codec, dtype;
    int family;  // for codecs of several kinds
    // ── written by the kernels ──
    int coder, precision, lane_bits, chunks, constant, alphabet;
    i64 chunk_size, symbol_count;
    const u8* frame;  // the whole frame
    u64 length;
    const u8* chunk_lengths;  // 4 bytes each, at any address
    const u8* data;  // the chunks
    u64 data_length;
    const u8* rest;  // what its family finds behind or before the symbols
    u64 rest_length;
    u32 crc, checked, checks, broken;
    float levels[kSymbols];  // what every symbol stands for at step 1
};

struct Source {  // one rank's part of one target; arrival −1: it has none
    int arrival, segment;
    i64 first;  // index of its first symbol in the frame
};

struct Target {  // a tensor, or a part of one, that the mean is written to
    void* out;
    i64 count;
    const Source* sources;  // one for each rank
    int dtype;
    i64 first_tile;
};

struct DecodeJob {
    Message* messages;
    Arrival* arrivals;
    Target* targets;
    Status* status;
    const void* formats;  // levels and masses of the float formats by their number on the wire
    u64 stamp;  // of messages that nobody waits for: what their prefixes say
    i64 room;  // and the bytes of their blocks
    int message_count, arrival_count, target_count;
    float weight;
    int adds;  // whether the sum begins with what the targets hold
    int spare;
};

// Reads a frame without ever leaving it: beyond its end everything is 0, and `bad` is set.
struct Reader {
    const u8* bytes;
    u64 at, end;
    bool bad;
    __device__ __forceinline__ u8 byte() {
        if (at >= end) {
            bad = true;
            return 0;
        }
        return bytes[at++];
    }
    __device__ __forceinline__ u64 varint() {
        u64 x = 0;
        for (int shift = 0; shift < 63; shift += 7) {
            u8 b = byte();
            x |= u64(b & 127) << shift;
            if (!(b & 128)) {
                if (!b && shift) bad = true;  // not the shortest form
                return x;
            }
        }
        bad = true;
        return 0;
    }
    __device__ __forceinline__ void skip(u64 n) {
        if (n > end - at)
            bad = true;
        else
            at += n;
    }
};

__device__ __forceinline__ u32 little_endian(const u8* at) {
    return at[0] | at[1] << 8 | at[2] << 16 | u32(at[3]) << 24;
}

__device__ __forceinline__ void give_up(DecodeJob* job, Arrival& arrival) {
    arrival.broken = 1;
    atomicOr(&job->status->bits, u32(UNUSUAL));
}

__device__ __forceinline__ float rounded(float x, int dtype) {
    return dtype == FP16 ? half_to_float(float_to_half(x)) : dtype == BF16 ? bf16_to_float(float_to_bf16(x)) : x;
}

__device__ __forceinline__ void store(void* out, i64 i, float x, int dtype) {
    if (dtype == FP32)
        static_cast<float*>(out)[i] = x;
    else
        static_cast<u16*>(out)[i] = dtype == FP16 ? float_to_half(x) : float_to_bf16(x);
}
