// Positions of the entries that a sparse frame sends: classes of their gaps as symbols, and the low bits these leave open.
#include "sparse.h"

__device__ __forceinline__ u32 gap_at(const u32* sent, i64 i) {
    u32 before = i ? sent[i - 1] & kMagnitude : ~0u;
    return (sent[i] & kMagnitude) - before - 1;
}

// The smallest gap of one of the finest classes.
__device__ __forceinline__ u32 smallest_of(int finest) {
    return finest < 4 ? u32(finest) : u32(4 + (finest & 3)) << ((finest >> 2) - 1);
}

const int kFinenesses = 3;  // m may be 0, 1 or 2: an octave has 2^m classes

// How many gaps each class has at each m, of those at the finest; by all threads of a block.
__device__ void merge(const u32* finest, u32 (*merged)[kClasses]) {
    int low, tid = threadIdx.x;
    __syncthreads();
    for (int i = tid; i < kFinenesses * kClasses; i += blockDim.x) merged[i / kClasses][i % kClasses] = 0;
    __syncthreads();
    if (tid < 120 && finest[tid])
        for (int m = 0; m < kFinenesses; m++) atomicAdd(&merged[m][class_of(smallest_of(tid), m, &low)], finest[tid]);
    __syncthreads();
}

// About how many bits classes and low bits take at each m; by all threads of a block, for all of them.
__device__ void find_costs(const u32 (*merged)[kClasses], u32 count, u32 spare, u32 mean, double* costs) {
    __shared__ double sums[4 * kFinenesses];
    int c = threadIdx.x, low;
    double precision = count < 1024 ? 256 : count < 65536 ? 2048 : 16384, all[4 * kFinenesses];
#pragma unroll
    for (int m = 0; m < kFinenesses; m++) {
        int alphabet = int(class_of(spare, m, &low)) + 1, zero = int(class_of(mean, m, &low));
        u32 n = c < alphabet ? merged[m][c] : 0;
        double share = n ? double(n) / double(count) : 1.0;
        all[4 * m] = n ? -double(n) * log2(share) : 0.0;
        all[4 * m + 1] = c >= alphabet || c == zero ? 0.0 : n ? 2 * floor(log2(1 + precision * share)) + 1 : 1.0;
        all[4 * m + 2] = n && c >> m ? double(n) * ((c >> m) - 1) : 0.0;
        all[4 * m + 3] = n ? 1.0 : 0.0;
    }
    block_sums<4 * kFinenesses>(all, sums);
    for (int m = 0; m < kFinenesses; m++) {
        int width = 1;
        while (1 << width < int(class_of(spare, m, &low)) + 1) width++;
        double raw = double(count) * width, coded = sums[4 * m] + sums[4 * m + 1] + 40;
        costs[m] = sums[4 * m + 2] + (sums[4 * m + 3] == 1 ? 8.0 : coded < raw ? coded : raw);
    }
}

// Classes of the gaps and lengths of their low bits. The last group chooses how many classes an octave has, and tells the
// coder of the symbols, and writes the head of the frame.
extern "C" __global__ void count_gaps(Job* job, const Where* groups) {
    __shared__ u32 classes[kClasses], merged[kFinenesses][kClasses];
    __shared__ u64 of_warps[8];
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    const u32* sent = array_at<u32>(t, plan.sent);
    Chunk* chunks = array_at<Chunk>(t, plan.chunks);
    int tid = threadIdx.x;
    i64 count = s.sent, chunk_count = (count + kChunk - 1) / kChunk;
    if (where.index < chunk_count) {
        if (tid < kClasses) classes[tid] = 0;
        __syncthreads();
        for (i64 chunk = where.index; chunk < chunk_count; chunk += groups_of(t)) {
            i64 end = (chunk + 1) * kChunk < count ? (chunk + 1) * kChunk : count;
            u64 bits = 0;  // 21 of them for each m: a chunk has 2048 gaps, with up to 31 low bits each
            for (i64 i = chunk * kChunk + tid; i < end; i += blockDim.x) {
                u32 gap = gap_at(sent, i), c = 0;
                for (int m = 0; m < kFinenesses; m++) {
                    int low;
                    c = class_of(gap, m, &low);
                    bits += u64(low) << 21 * m;
                }
                atomicAdd(&classes[c], 1u);
            }
            for (int by = 16; by; by >>= 1) bits += __shfl_xor_sync(~0u, bits, by);
            __syncthreads();
            if (!(tid & 31)) of_warps[tid >> 5] = bits;
            __syncthreads();
            if (tid < kFinenesses) {
                u64 sum = 0;
                for (int w = 0; w < 8; w++) sum += of_warps[w];
                chunks[chunk].bits[tid] = u32(sum >> 21 * tid) & 0x1fffff;
            }
        }
        __syncthreads();
        if (tid < kClasses && classes[tid]) atomicAdd(&s.classes[tid], classes[tid]);
    }
    if (!last_block(&job->fits[where.item].tiles_done, groups_of(t))) return;
    if (tid < kClasses) classes[tid] = s.classes[tid];
    u32 spare = u32(t.count - count), mean = count ? spare / u32(count) : 0;
    int low, m = 0;
    merge(classes, merged);
    if (count) {
        double costs[kFinenesses];
        find_costs(merged, u32(count), spare, mean, costs);
        m = 2;
        if (costs[1] < costs[m]) m = 1;
        if (costs[0] < costs[m]) m = 0;
    }
    Stream& stream = job->streams[t.stream];
    if (tid < kSymbols) stream.counts[tid] = tid < kClasses ? merged[m][tid] : 0;
    u64 total = scan_items(chunk_count, [&](i64 i) { return u64(chunks[i].bits[m]); },
                           [&](i64 i, u64 before) { chunks[i].start = before; });
    // Words that two chunks share are put together bit by bit, and so begin as zeros.
    Frame& frame = job->frames[t.frame];
    u32* words = reinterpret_cast<u32*>(const_cast<u8*>(frame.piece[LOW_BITS].bytes));
    for (i64 i = tid; i < chunk_count; i += blockDim.x) words[chunks[i].start >> 5] = 0;
    if (tid) return;
    words[total >> 5] = 0;
    job->fits[where.item].tiles_done = 0;
    s.m = m;
    stream.count = count;
    stream.alphabet = int(class_of(spare, m, &low)) + 1;
    stream.zero = int(class_of(mean, m, &low));
    // A frame that sends nothing is one byte, and has neither stream nor its length.
    frame.piece[HOW_LONG].kind = count ? PIECE_LENGTH : PIECE_BYTES;
    frame.piece[CLASSES].kind = count ? PIECE_STREAM : PIECE_BYTES;
    frame.piece[HOW_LONG].length = frame.piece[CLASSES].length = 0;
    int kind = format_of(t).kind;
    u8* head = const_cast<u8*>(frame.piece[HEAD].bytes);
    int length = put_varint(head, u64(count));
    if (count) head[length++] = u8(kind | 1 << 4), head[length++] = u8(m);
    frame.piece[HEAD].length = u64(length);
    frame.piece[LOW_BITS].length = (total + 7) / 8;
    u64 each = kind == AS_FP32 ? 4 : kind >= AS_FP16 ? 2 : 0, of_values = u64(count) * each;
    if (kind == ONE_VALUE) of_values = 4;
    if (kind == ONE_MAGNITUDE) of_values = 4 + (u64(count) + 7) / 8;
    frame.piece[VALUES].length = count ? of_values : 0;
    if (!each) *reinterpret_cast<float*>(const_cast<u8*>(frame.piece[VALUES].bytes)) = s.value;
}

// Symbols and low bits, and the signs of STC.
extern "C" __global__ void __launch_bounds__(256) write_gaps(Job* job, const Where* groups) {
    __shared__ u32 packed[kChunk];
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Selection& s = selection_of(t);
    const Plan& plan = plan_of(t);
    const u32* sent = array_at<u32>(t, plan.sent);
    const Chunk* chunks = array_at<Chunk>(t, plan.chunks);
    Frame& frame = job->frames[t.frame];
    u32* words = reinterpret_cast<u32*>(const_cast<u8*>(frame.piece[LOW_BITS].bytes));
    u32* signs = reinterpret_cast<u32*>(const_cast<u8*>(frame.piece[VALUES].bytes) + 4);
    u8* symbols = job->symbols + t.first;
    bool signed_ = format_of(t).kind == ONE_MAGNITUDE;
    int tid = threadIdx.x, m = s.m;
    i64 count = s.sent, chunk_count = (count + kChunk - 1) / kChunk;
    for (i64 chunk = where.index; chunk < chunk_count; chunk += groups_of(t)) {
        u64 start = chunks[chunk].start;
        i64 first = chunk * kChunk + tid * 8;
        u32 lows[8], rest[8], all = 0;
        for (int k = 0; k < 8; k++) {
            int low = 0;
            u32 gap = first + k < count ? gap_at(sent, first + k) : 0, c = class_of(gap, m, &low);
            lows[k] = u32(low);
            rest[k] = gap & ((1u << low) - 1);
            all += u32(low);
            if (first + k < count) symbols[first + k] = u8(c);
        }
        u64 total;
        u32 at = u32(start & 31) + u32(block_scan(all, &total));
        u32 end = u32(start & 31) + u32(total), used = (end + 31) / 32;
        for (u32 w = tid; w < used; w += blockDim.x) packed[w] = 0;
        __syncthreads();
        for (int k = 0; k < 8; k++) {
            if (!lows[k]) continue;
            atomicOr(&packed[at >> 5], rest[k] << (at & 31));
            if ((at & 31) + lows[k] > 32) atomicOr(&packed[(at >> 5) + 1], rest[k] >> (32 - (at & 31)));
            at += lows[k];
        }
        __syncthreads();
        for (u32 w = tid; w < used && total; w += blockDim.x) {
            bool shared = (!w && start & 31) || (w == used - 1 && end & 31);
            if (shared)
                atomicOr(words + (start >> 5) + w, packed[w]);
            else
                words[(start >> 5) + w] = packed[w];
        }
        for (int k = 0; signed_ && k < kChunk; k += blockDim.x) {
            i64 i = chunk * kChunk + k + tid;
            u32 vote = __ballot_sync(~0u, i < count && sent[i] >> 31);
            if (!(tid & 31) && i < count) signs[i >> 5] = vote;
        }
        __syncthreads();
    }
}

// Lets the velocity start again from zero where something was sent: `velocities` has an address (or 0) for each tensor
// of the message. To be launched behind the kernels above, before the next message.
extern "C" __global__ void mask_sent(Job* job, const Where* groups, float* const* velocities) {
    Where where = groups[blockIdx.x];
    const Tensor& t = job->tensors[where.item];
    const Selection& s = selection_of(t);
    float* velocity = velocities[where.item];
    if (!velocity) return;
    const u32* sent = array_at<u32>(t, plan_of(t).sent);
    const u8* out = job->frames[t.frame].piece[VALUES].bytes;
    int kind = format_of(t).kind;
    for (i64 i = i64(where.index) * blockDim.x + threadIdx.x; i < i64(s.sent); i += i64(groups_of(t)) * blockDim.x) {
        float value = s.value;
        if (kind == AS_FP32) value = reinterpret_cast<const float*>(out)[i];
        if (kind == AS_FP16) value = half_to_float(reinterpret_cast<const u16*>(out)[i]);
        if (kind == AS_BF16) value = bf16_to_float(reinterpret_cast<const u16*>(out)[i]);
        if (received(value, t.dtype) != 0) velocity[sent[i] & kMagnitude] = 0;
    }
}
