// Messages that the host does not wait for (unattended.py): what the host does for others is done here, by kernels
// before, between and after those that encode and average. A message is block = prefix, note, frames; its prefix and
// note are written and read on the device, and what went wrong is settled by everybody in the same way.
#include "arrivals.h"
#include "presence.h"

const int kTile = 8192;
const int kPrefix = 16;  // length of what follows it, step and fingerprint: transport/message_prefix.py
const int kReport = kPrefix + 1 + 8;  // bytes of a message that the host is told
const int kFront = kPrefix + 1;  // the note of such a message has one byte
enum { ALL_TENSORS = 0, WAITS = 2, NOT_FINITE = 3 };  // notes; 1 is not for messages that nobody waits for

// A tensor without any gradient leaves its memory as it is: its decay becomes 0, which says so from here on, unless
// everything is sent. One block of 256 threads for each tensor.
extern "C" __global__ void find_absent(Job* job) {
    if (job->everything) return;
    Tensor& t = job->tensors[blockIdx.x];
    if (has_nonzero(t.gradient, t.count, t.dtype == FP32)) return;
    if (!threadIdx.x) t.decay = 0;
}

// Writes prefix and note in front of the frames, by one thread. The stamp is the step, and above it the fingerprint. In
// place of frames that wait stands how long they are, or 0 if they wait for another reason than their length.
extern "C" __global__ void seal(Job* job) {
    u64 stamp = job->stamp;
    u32 bits = job->status->bits;
    u64 needed = job->status->length > job->room ? job->status->length : 0, length = bits ? 9 : job->status->length + 1;
    u8* block = job->out - kFront;
    for (int k = 0; k < 8; k++) block[k] = u8(length >> 8 * k), block[8 + k] = u8(stamp >> 8 * k);
    block[kPrefix] = bits & NONFINITE ? NOT_FINITE : bits ? WAITS : ALL_TENSORS;
    for (int k = 0; bits && k < 8; k++) job->out[k] = u8(needed >> 8 * k);
}

// Reads the prefixes and notes of all ranks' blocks, and tells the host of them: kReport bytes of each rank. A message
// that waits, or is about something else, makes the messages of all ranks wait. One block.
extern "C" __global__ void open_messages(DecodeJob* job, u8* report) {
    for (int rank = threadIdx.x; rank < job->message_count; rank += blockDim.x) {
        Message& message = job->messages[rank];  // its bytes are the frames
        const u8* block = message.bytes - kFront;
        u64 length = 0, stamped = 0;
        for (int k = 0; k < 8; k++) length |= u64(block[k]) << 8 * k, stamped |= u64(block[8 + k]) << 8 * k;
        u8 note = block[kPrefix];
        bool sound = stamped == job->stamp && length >= 1 && length <= u64(job->room - kPrefix);
        message.length = sound ? length - 1 : 0;
        if (sound && note == NOT_FINITE) atomicOr(&job->status->bits, u32(NONFINITE));
        if (!sound || note != ALL_TENSORS) atomicOr(&job->status->bits, u32(UNUSUAL));
        for (int k = 0; k < kReport; k++) report[i64(rank) * kReport + k] = block[k];
    }
}

// The last word: memories of absent tensors stay; if anything was unusual on any rank, the mean is zero, and the memory
// keeps all that was to be sent; if something was not finite, the mean is NaN, and the host rolls memories back. Some
// blocks of 256 threads, which go through all tiles.
extern "C" __global__ void conclude(Job* job, const Where* tiles, i64 tile_count, DecodeJob* decoding) {
    u32 bits = decoding->status->bits;
    for (i64 n = blockIdx.x; n < tile_count; n += gridDim.x) {
        Where where = tiles[n];
        const Tensor& t = job->tensors[where.item];
        bool absent = t.before && t.decay == 0;
        if (!bits && !absent) continue;
        const Target& target = decoding->targets[where.item];
        i64 begin = i64(where.index) * kTile, end = begin + kTile < t.count ? begin + kTile : t.count;
        for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
            if (!(bits & NONFINITE) && t.after) t.after[i] = absent ? t.before[i] : compensated_at(t, i);
            if (bits & NONFINITE)
                store(target.out, i, __uint_as_float(0x7fc00000u), target.dtype);
            else if (bits)
                store(target.out, i, 0.0f, target.dtype);
        }
    }
}
