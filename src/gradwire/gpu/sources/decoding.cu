// Frames of all ranks to symbols: headers, tables, checksums and rANS. Whatever is unusual, or damaged, sets UNUSUAL in
// the status, and the host decodes the message again and says what is wrong. Nothing is read or written out of bounds,
// whatever a frame says.
#include "sparse_arrivals.h"
#include "apart.h"
#include "crc.h"
#include "frequencies.h"
#include "levels_arrival.h"

const int kBetas = 128, kFormats = 6;
const u32 kLow = 1u << 14;
const u64 kMostElements = (u64(1) << 48) - 1;
const int kFineSlots = 4096;  // words that the symbols of 2^14 slots take

struct FormatTable {  // of a float format; decoder.py makes it
    int alphabet, zero, magnitudes, spare;
    float levels[kSymbols];
    u32 masses[kBetas * 128];
};

// Where the next frame begins: header and payload are skipped. It is the end of the message if that cannot be.
__device__ u64 skip_frame(const Message& message, u64 at) {
    Reader reader = {message.bytes, at, message.length, false};
    reader.skip(4);
    int rank = reader.byte() >> 4;
    reader.skip(4);
    u64 payload = reader.varint();
    for (int d = 0; d < rank; d++) reader.varint();
    reader.skip(payload);
    return reader.bad ? message.length : reader.at;
}

// Where a frame begins; by a warp. To find it all headers before it have to be read, one after the other: at once each,
// since reading byte after byte would take several times as long, and some messages have hundreds of frames.
__device__ u64 start_of(const Message& message, int index) {
    int lane = threadIdx.x & 31;
    u64 at = 0;
    for (int i = 0; i < index && at < message.length; i++) {
        u32 byte = u64(lane) < message.length - at ? message.bytes[at + lane] : 128;
        u32 ends = __ballot_sync(~0u, lane >= 9 && !(byte & 128));  // of varints: the payload's length, then the shape
        u64 payload = 0;
        int digits = __ffs(int(ends)) - 9, rank = int(__shfl_sync(~0u, byte, 4) >> 4);
#pragma unroll
        for (int j = 0; j < 5; j++) {
            u32 digit = __shfl_sync(~0u, byte, 9 + j) & 127;
            if (j < digits) payload |= u64(digit) << 7 * j;
        }
        for (int d = 0; d < rank; d++) ends &= ends - 1;
        u64 header = u64(__ffs(int(ends)));
        if (!ends || digits > 5)  // more than 32 bytes, or payloads of gigabytes
            at = skip_frame(message, at);
        else
            at = payload <= message.length - at - header ? at + header + payload : message.length;
    }
    return at;
}

// Reads the header of the frame that begins at `start`; by one thread. The reader then stands at the payload.
__device__ Reader open_frame(DecodeJob* job, Arrival& arrival, u64 start, bool* segmented) {
    const Message& message = job->messages[arrival.message];
    Reader reader = {message.bytes, start, message.length, false};
    reader.skip(4);
    int rank = reader.byte() >> 4;
    reader.skip(4);
    u64 payload = reader.varint(), elements = 1;
    for (int d = 0; d < rank; d++) {
        u64 size = reader.varint();
        if (!size || size > kMostElements / elements)
            reader.bad = true;
        else
            elements *= size;
    }
    if (elements != u64(arrival.count)) reader.bad = true;
    const u8* frame = message.bytes + start;
    if (reader.bad || payload > reader.end - reader.at) {
        reader.bad = true;
        return reader;
    }
    reader.end = reader.at + payload;
    // Nothing may follow the last frame of a message.
    bool last = &arrival - job->arrivals == job->arrival_count - 1 || (&arrival)[1].message != arrival.message;
    if (last && reader.end != message.length) reader.bad = true;
    u8 kind = frame[3];
    *segmented = kind >> 4 == 2;
    bool expected = frame[0] == 'G' && frame[1] == 'W' && frame[2] == 1 && (kind & 15) == arrival.codec &&
                    (kind >> 4 == 0 || *segmented) && (frame[4] & 15) == arrival.dtype;
    if (!expected || *segmented != (arrival.segments > 1)) reader.bad = true;
    arrival.frame = frame;
    arrival.length = reader.end - start;
    return reader;
}

__device__ __forceinline__ bool read_step(Reader& reader, float* step) {
    u32 bits = reader.byte();
    bits |= u32(reader.byte()) << 8;
    *step = __uint_as_float(bits << 16);
    return *step >= 1.1754943508222875e-38f && *step <= 8.507059173023462e37f;
}

// A table of Elias-gamma codes, by one thread; the frequencies of all symbols but `implied`, which follows.
__device__ void read_table(Reader& reader, u32* frequencies, int alphabet, int precision, int implied) {
    u32 sum = 0, bit = 0, byte = 0;
    int left = 0;
    for (int s = 0; s < alphabet && !reader.bad; s++) {
        if (s == implied) continue;
        int zeros = 0;
        u32 value = 0;
        for (;;) {
            if (!left) byte = reader.byte(), left = 8;
            bit = byte & 1, byte >>= 1, left--;
            if (bit || reader.bad || zeros > precision) break;
            zeros++;
        }
        if (!bit || zeros > precision) reader.bad = true;
        value = 1;
        for (int k = 0; k < zeros && !reader.bad; k++) {
            if (!left) byte = reader.byte(), left = 8;
            value = value << 1 | (byte & 1), byte >>= 1, left--;
        }
        frequencies[s] = value - 1;
        sum += value - 1;
        if (sum > 1u << precision) reader.bad = true;
    }
    if (byte) reader.bad = true;  // padding is zeros
    frequencies[implied] = (1u << precision) - sum;
}

// Reads how symbols are coded, and makes the table of slots; by all threads of a block of 256, the reader is shared.
__device__ void read_coding(DecodeJob* job, Arrival& arrival, Reader& reader, int alphabet, int zero, i64 count,
                            const u32* masses) {
    __shared__ u32 frequencies[kSymbols];
    __shared__ u64 shaped[kSymbols];
    __shared__ int coder, model, precision, beta, zero_mass;
    int s = threadIdx.x;
    frequencies[s] = 0;
    __syncthreads();
    if (!s) {
        u8 byte = reader.byte();
        coder = byte & 3, model = byte >> 2 & 3, precision = byte >> 4;
        arrival.coder = coder;
        arrival.alphabet = alphabet;
        arrival.symbol_count = count;
        if (coder == CONSTANT) {
            arrival.constant = reader.byte();
            if (byte != CONSTANT || arrival.constant >= alphabet || reader.at != reader.end) reader.bad = true;
        } else if (coder == RAW) {
            int width = 1;
            while (1 << width < alphabet) width++;
            arrival.precision = width;
            arrival.data = reader.bytes + reader.at;
            arrival.data_length = reader.end - reader.at;
            arrival.chunk_size = 16384;
            arrival.chunks = int((count + 16383) / 16384);
            if (byte || arrival.data_length != (u64(count) * width + 7) / 8) reader.bad = true;
        } else if (coder != RANS || precision < 8 || precision > 14 || 1 << precision < alphabet) {
            reader.bad = true;
        } else if (model == GENNORM && masses) {
            beta = reader.byte(), zero_mass = reader.byte();
            if (beta >= kBetas) reader.bad = true;
        } else if (model == HISTOGRAM) {
            read_table(reader, frequencies, alphabet, precision, zero);
        } else {
            reader.bad = true;
        }
    }
    __syncthreads();
    if (reader.bad || coder != RANS) return;
    if (model == GENNORM) {
        int off = s < zero ? zero - s : s - zero;
        shaped[s] = s < alphabet
                        ? u64(masses[beta * 128 + off]) * u64(256 - zero_mass) + (off ? 0 : u64(zero_mass) << 16)
                        : 0;
        __syncthreads();
        normalize(shaped, frequencies, alphabet, precision);
        __syncthreads();
    }
    // With 8 bits an entry has bytes for frequency, place in the symbol's range and symbol, with up to 12 (or one symbol
    // alone, whose frequency has no byte) bits for place, symbol and frequency − 1. With more the table has a byte for each slot, its symbol, and behind these an entry for
    // each symbol.
    __shared__ u32 starts[kSymbols];
    u32 f = s < alphabet ? frequencies[s] : 0;
    u64 all, start = block_scan(f, &all);
    starts[s] = u32(start);
    __syncthreads();
    bool wide = precision > 12;
    if (wide) arrival.table[kFineSlots + s] = f ? (f - 1) | u32(start) << 14 : 0;
    for (u32 slot = s; slot < 1u << precision; slot += 256) {
        // The last symbol that begins at or before the slot; those without a slot begin where the next does.
        int low = 0;
        for (int by = 128; by; by >>= 1)
            if (low + by < alphabet && starts[low + by] <= slot) low += by;
        while (!frequencies[low] && low) low--;
        if (wide)
            reinterpret_cast<u8*>(arrival.table)[slot] = u8(low);
        else
            arrival.table[slot] = precision == 8 && frequencies[low] < 256
                                      ? frequencies[low] | (slot - starts[low]) << 8 | u32(low) << 16
                                      : (slot - starts[low]) | u32(low) << 12 | (frequencies[low] - 1) << 20;
    }
    if (s) return;
    u8 byte = reader.byte();
    u64 chunks = byte & 128 ? reader.varint() : 1;
    i64 size = 0;
    if ((byte & 127) > 6 || !chunks || chunks > u64(count) || (byte & 128 && chunks < 2)) reader.bad = true;
    if (!reader.bad) {
        size = ((count + i64(chunks) - 1) / i64(chunks) + 63) / 64 * 64;
        if (size * (i64(chunks) - 1) >= count) reader.bad = true;
    }
    arrival.chunk_lengths = reader.bytes + reader.at;
    reader.skip(4 * (chunks - 1));
    arrival.precision = precision;
    arrival.lane_bits = byte & 127;
    arrival.chunks = int(chunks);
    arrival.chunk_size = size;
    arrival.data = reader.bytes + reader.at;
    arrival.data_length = reader.end - reader.at;
}

// Where the chunks begin; by a block of 256.
__device__ void find_chunks(DecodeJob* job, Arrival& arrival, Reader& reader) {
    __shared__ u64 before;
    if (!threadIdx.x) before = 0;
    __syncthreads();
    int chunks = arrival.chunks;
    for (int c = 0; c < chunks; c += blockDim.x) {
        int mine = c + threadIdx.x;
        u64 length = mine < chunks - 1 ? little_endian(arrival.chunk_lengths + 4 * i64(mine)) : 0, all;
        u64 offset = block_scan(length, &all) + before;
        if (mine < chunks) arrival.offsets[mine] = offset;
        __syncthreads();
        if (!threadIdx.x) before += all;
        __syncthreads();
    }
    if (!threadIdx.x) {
        arrival.offsets[chunks] = arrival.data_length;
        if (before > arrival.data_length) reader.bad = true;
    }
    __syncthreads();
}

// The step of the frame, or of each of its segments; by one thread.
__device__ void read_steps(Arrival& arrival, Reader& reader) {
    if (arrival.segments > 1 && reader.varint() != u64(arrival.segments)) reader.bad = true;
    for (int k = 0; k < arrival.segments && !reader.bad; k++) {
        if (arrival.segments > 1 && reader.varint() != arrival.lengths[k]) reader.bad = true;
        if (!read_step(reader, arrival.steps + k)) reader.bad = true;
    }
}

__device__ void parse_minifloat(DecodeJob* job, Arrival& arrival, Reader& reader) {
    __shared__ const FormatTable* format;
    if (!threadIdx.x) {
        int number = reader.byte();
        format = static_cast<const FormatTable*>(job->formats) + (number < kFormats ? number : 0);
        if (number >= kFormats) reader.bad = true;
        read_steps(arrival, reader);
    }
    __syncthreads();
    if (reader.bad) return;
    arrival.levels[threadIdx.x] = format->levels[threadIdx.x];
    read_coding(job, arrival, reader, format->alphabet, format->zero, arrival.count, format->masses);
}

// Numbers and classes of a sparse frame; low bits and values, which follow, are read by sparse_decoding.cu. Positions in
// a Golomb code can only be read one after the other, and are left to the host.
__device__ void parse_sparse(DecodeJob* job, Arrival& arrival, Reader& reader) {
    __shared__ int alphabet, zero;
    SparseArrival& s = sparse_of(arrival);
    if (!threadIdx.x) {
        u64 count = reader.varint();
        s.count = s.blocks_done = s.sound = 0;
        arrival.symbol_count = 0;
        if (count > u64(arrival.most) || arrival.count > 0x7fffffff || arrival.segments != 1) reader.bad = true;
        if (!count && reader.at != reader.end) reader.bad = true;
        if (count && !reader.bad) {
            u8 kind = reader.byte(), m = reader.byte();
            u64 length = reader.varint();
            if (kind >> 4 != 1 || (kind & 15) > AS_BF16 || m > 2 || length > reader.end - reader.at) reader.bad = true;
            if (!reader.bad) {
                u32 spare = u32(u64(arrival.count) - count);
                int low;
                alphabet = int(class_of(spare, m, &low)) + 1;
                zero = int(class_of(spare / u32(count), m, &low));
                arrival.rest = reader.bytes + reader.at + length;
                arrival.rest_length = reader.end - reader.at - length;
                reader.end = reader.at + length;
                s.count = u32(count), s.kind = kind & 15, s.m = m;
            }
        }
    }
    __syncthreads();
    if (!reader.bad && s.count) read_coding(job, arrival, reader, alphabet, zero, s.count, nullptr);
}

// How the list of outliers begins; by one thread. Whatever is too large for the scratch is left to the host.
__device__ void open_outliers(Arrival& arrival, Reader reader, Reader& all) {
    Apart& list = apart_of(arrival);
    if (reader.at == reader.end) return;
    u64 length = reader.end - reader.at, count = reader.varint();
    list.a = reader.byte(), list.b = reader.byte();
    list.codes = reader.bytes + reader.at;
    list.bits = 8 * (reader.end - reader.at);
    list.pieces = u32((list.bits + kPieceBits - 1) / kPieceBits);
    bool valid = !reader.bad && count && count <= room_apart(arrival.count) && list.a <= 31 && list.b <= 24 &&
                 count <= list.bits && length <= code_room(arrival.count) && arrival.count < i64(1) << 32;
    if (valid)
        list.count = count;
    else
        all.bad = true;
}

__device__ void parse_grid(DecodeJob* job, Arrival& arrival, Reader& reader) {
    __shared__ int largest;
    Apart& list = apart_of(arrival);
    int s = threadIdx.x;
    if (!s) {
        list.count = 0;
        largest = list.largest = reader.byte();
        int number = list.offset_count = reader.byte();
        if (largest < 1 || largest > 127 || number > 15) reader.bad = true;
        for (int k = 0; k < number && !reader.bad; k++)
            list.offsets[k] = float(int(reader.byte() ^ 128) - 128) / 256.0f;
        read_steps(arrival, reader);
        u64 length = reader.varint();
        if (length > reader.end - reader.at) reader.bad = true;
        if (!reader.bad) {
            open_outliers(arrival, {reader.bytes, reader.end - length, reader.end, false}, reader);
            reader.end -= length;
        }
    }
    __syncthreads();
    if (reader.bad) return;
    int j = s < largest ? largest - s : s - largest, which = j < list.offset_count ? j : list.offset_count;
    float level = j ? __fadd_rn(float(j), which ? list.offsets[which - 1] : 0.0f) : 0.0f;
    arrival.levels[s] = s < largest ? -level : level;
    read_coding(job, arrival, reader, 2 * largest + 1, largest, arrival.count, nullptr);
}

// The side information must be what the host expects, since that says where everything is.
__device__ void parse_levels(DecodeJob* job, Arrival& arrival, Reader& reader) {
    const LevelsPlan& plan = *reinterpret_cast<const LevelsPlan*>(arrival.own);
    u64 at = reader.at, side = u64(plan.side_length);
    bool differs = reader.end - at < side;
    for (u64 k = threadIdx.x; k < side && !differs; k += blockDim.x) differs = reader.bytes[at + k] != plan.side()[k];
    if (__syncthreads_or(differs)) {
        if (!threadIdx.x) reader.bad = true;
        __syncthreads();
        return;
    }
    if (!threadIdx.x) {
        reader.skip(side);
        arrival.rest = reader.bytes + reader.at;
        reader.skip(u64(plan.numbers_bytes));
    }
    __syncthreads();
    if (!reader.bad) read_coding(job, arrival, reader, plan.levels, plan.levels / 2, arrival.count, nullptr);
}

// One block of 256 threads for each frame of each rank.
extern "C" __global__ void parse(DecodeJob* job) {
    __shared__ Reader reader;
    Arrival& arrival = job->arrivals[blockIdx.x];
    u64 start = threadIdx.x < 32 ? start_of(job->messages[arrival.message], arrival.index) : 0;
    if (!threadIdx.x) {
        bool segmented;
        arrival.chunks = 0, arrival.coder = -1, arrival.crc = 0, arrival.checked = 0, arrival.broken = 0;
        reader = open_frame(job, arrival, start, &segmented);
    }
    __syncthreads();
    if (!reader.bad && arrival.codec == 1) parse_minifloat(job, arrival, reader);
    if (!reader.bad && arrival.codec == 5) parse_sparse(job, arrival, reader);
    if (!reader.bad && arrival.codec == 3) parse_grid(job, arrival, reader);
    if (!reader.bad && arrival.codec == 4) parse_levels(job, arrival, reader);
    __syncthreads();
    if (!reader.bad && arrival.coder == RANS) find_chunks(job, arrival, reader);
    __syncthreads();
    if (reader.bad && !threadIdx.x) {
        arrival.chunks = 0, arrival.length = 0;
        give_up(job, arrival);
    }
}

// The checksums of all frames; blocks of 128 threads, as many for each frame as the grid has.
extern "C" __global__ void check(DecodeJob* job, i64 blocks) {
    const u64 range = 1 << 15;
    Arrival& arrival = job->arrivals[blockIdx.x / blocks];
    if (!arrival.length) return;
    u64 body = arrival.length - 9, ranges = (body + range - 1) / range;
    for (u64 r = blockIdx.x % blocks; r < ranges; r += u64(blocks)) {
        u64 begin = r * range, end = begin + range < body ? begin + range : body;
        u32 crc = block_crc(arrival.frame + 9 + begin, end - begin);
        if (threadIdx.x < 32) {
            crc = times_power_by_warp(crc, body - end);
            if (!threadIdx.x) atomicXor(&arrival.crc, crc);
        }
    }
    if (!last_block(&arrival.checked, u32(blocks)) || threadIdx.x >= 32) return;
    u32 crc = ~0u;
    for (int k = 0; k < 5; k++) crc = crc_byte(crc, arrival.frame[k]);
    crc = ~(times_power_by_warp(crc, body) ^ arrival.crc);
    if (!threadIdx.x && crc != little_endian(arrival.frame + 5)) give_up(job, arrival);
}

// ── rANS ──────────────────────────────────────────────────────────────────────────────────────────

const int kWindow = 1024;  // bytes of a chunk that a warp holds: twice what it loads at a time

enum Fineness { COARSE, MEDIUM, FINE };  // precision 8, up to 12, more: how tables look

// The state before a symbol was coded, less the bytes that were emitted; and the symbol.
template <Fineness FINENESS>
__device__ __forceinline__ u32 step_back(const u32* table, int precision, u32 x, u32* symbol) {
    if (FINENESS == COARSE) {
        u32 e = table[x & 255];
        *symbol = e >> 16;
        return dot_of_two(__byte_perm(x, 1, 0x5421), e, 0);  // x >> 8 in the low half, 1 in the high one
    }
    u32 slot = x & ((1u << precision) - 1);
    if (FINENESS == MEDIUM) {
        u32 e = table[slot];
        *symbol = e >> 12 & 255;
        return ((e >> 20) + 1) * (x >> precision) + (e & 4095);
    }
    *symbol = reinterpret_cast<const u8*>(table)[slot];
    u32 t = table[kFineSlots + *symbol];
    return ((t & 16383) + 1) * (x >> precision) + slot - (t >> 14);
}

__device__ __forceinline__ u32 state_at(const u8* at) { return at[0] | at[1] << 8 | at[2] << 16; }

struct Chunk {
    const u32* table;
    const u8 *begin, *end;
    u8* symbols;
    i64 count;
    u8* window;
};

// Decodes a chunk of 64 lanes if WIDE, by a warp whose thread t has the lanes 2t and 2t + 1, and else of fewer, where it
// has the lane t. Returns whether it was sound.
template <Fineness FINENESS, bool WIDE>
__device__ __forceinline__ bool decode_lanes(const Chunk& chunk, int precision, int lane_bits) {
    const u32* table = chunk.table;
    const u8* begin = chunk.begin;
    u8* window = chunk.window;
    int lane = threadIdx.x & 31, lanes = WIDE ? 64 : 1 << lane_bits;
    u32 below = (1u << lane) - 1, x0 = kLow, x1 = kLow;
    bool works = WIDE || lane < lanes;
    if (works) x0 = state_at(begin + (WIDE ? 6 : 3) * lane);
    if (WIDE) x1 = state_at(begin + 6 * lane + 3);
    if (__any_sync(~0u, x0 < kLow || x0 >> 22 || x1 < kLow || x1 >> 22)) return false;
    // Places are counted from an address that is a multiple of 16. Blocks of 512 bytes; the window is a ring, whose
    // first bytes stand behind its end again, and one more block waits in registers.
    const u8* origin = reinterpret_cast<const u8*>((u64)(begin) & ~u64(15));
    int stop = int(begin - origin) + 3 * lanes, p = int(chunk.end - origin), loaded = (p + 15) & ~15;
    uint4 next = make_uint4(0, 0, 0, 0);
    auto fetch = [&]() {  // the block below the window
        int at = loaded - 512 + 16 * lane;
        if (at >= 0) next = *reinterpret_cast<const uint4*>(origin + at);
    };
    auto push = [&]() {
        int at = (loaded - 512 + 16 * lane) & (kWindow - 1);
        __syncwarp();
        *reinterpret_cast<uint4*>(window + at) = next;
        if (!at) *reinterpret_cast<uint4*>(window + kWindow) = next;
        __syncwarp();
        loaded -= 512;
        fetch();
    };
    // The lanes that want a byte take one each, the highest lane the last one before p. Bytes that nobody takes are
    // loaded too; a branch would cost more.
    auto take = [&](bool wants0, bool wants1) {
        u32 vote0 = __ballot_sync(~0u, wants0), vote1 = WIDE ? __ballot_sync(~0u, wants1) : 0;
        int before = __popc(vote0 & below) + (WIDE ? __popc(vote1 & below) : 0);
        p -= __popc(vote0) + (WIDE ? __popc(vote1) : 0);
        const u8* at = window + ((p + before) & (kWindow - 1));
        u32 first = at[0], second = WIDE ? at[1] : 0;
        x0 = wants0 ? x0 << 8 | first : x0;
        if (WIDE) x1 = wants1 ? x1 << 8 | (wants0 ? second : first) : x1;
    };
    i64 rows = (chunk.count + lanes - 1) / lanes;
    u8* to = chunk.symbols + (rows - 1) * lanes + (WIDE ? 2 * lane : lane);
    auto row = [&](bool has0, bool has1, bool both) {
        u32 symbol0, symbol1 = 0;
        u32 y0 = step_back<FINENESS>(table, precision, x0, &symbol0), y1 = kLow;
        if (WIDE) y1 = step_back<FINENESS>(table, precision, x1, &symbol1);
        x0 = has0 ? y0 : x0;
        x1 = has1 ? y1 : x1;
        if (WIDE && both) {
            store_pair(to, symbol0 | symbol1 << 8);
        } else {
            store_byte_if<0>(has0, to, symbol0);
            if (WIDE) store_byte_if<1>(has1, to, symbol1);
        }
        to -= lanes;
        // Lanes below 2^6 take a byte before the others do. Few rows have one: it had a rare symbol.
        if (FINENESS != COARSE && __any_sync(~0u, x0 < 64 || x1 < 64)) take(x0 < 64, x1 < 64);
        take(x0 < kLow, x1 < kLow);
    };
    fetch();
    push();
    push();
    // Four rows take 512 bytes at most, which is what the window has at least before each four of them. In a damaged
    // chunk p may come to lie below its beginning: then what was read is of no use, and nothing more is.
    i64 left = rows;
    int in_last = int(chunk.count - (rows - 1) * lanes);
    row(WIDE ? 2 * lane < in_last : lane < in_last, WIDE && 2 * lane + 1 < in_last, false);
    for (left--; left & 3; left--) {
        if (p - loaded < 512) push();
        row(works, WIDE, true);
    }
    for (; left && p >= stop; left -= 4) {
        if (p - loaded < 512) push();
#pragma unroll
        for (int k = 0; k < 4; k++) row(works, WIDE, true);
    }
    return p == stop && __all_sync(~0u, x0 == kLow && x1 == kLow);
}

// Blocks of 128 threads, a warp for each chunk; as many blocks for each frame as the grid has.
extern "C" __global__ void __launch_bounds__(128) decode_chunks(DecodeJob* job, i64 blocks) {
    __shared__ u32 table[kFineSlots + kSymbols];
    __shared__ __attribute__((aligned(16))) u8 windows[4][kWindow + 16];
    Arrival& arrival = job->arrivals[blockIdx.x / blocks];
    int first = int(blockIdx.x % blocks), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    i64 count = arrival.symbol_count;
    if (arrival.coder == CONSTANT) {
        for (i64 i = i64(first) * 128 + threadIdx.x; i < count; i += blocks * 128)
            arrival.symbols[i] = u8(arrival.constant);
        return;
    }
    if (first * 4 >= arrival.chunks) return;
    int precision = arrival.precision;
    int words = precision > 12 ? kFineSlots + kSymbols : 1 << precision;
    if (arrival.coder == RANS)
        for (int k = threadIdx.x; k < words; k += 128) table[k] = arrival.table[k];
    __syncthreads();
    for (i64 c = i64(first) * 4 + warp; c < arrival.chunks; c += blocks * 4) {
        i64 begin = c * arrival.chunk_size, left = count - begin;
        i64 size = left < arrival.chunk_size ? left : arrival.chunk_size;
        u8* symbols = arrival.symbols + begin;
        bool sound;
        if (arrival.coder == RAW) {
            const u8* from = arrival.data + u64(begin) * precision / 8;
            bool valid = true;
            i64 bytes = (size * precision + 7) / 8;
            for (i64 group = lane; group < (size + 7) / 8; group += 32) {  // eight symbols are `precision` bytes
                u64 coded = 0, plain = 0;
                for (int k = 0; k < precision; k++)
                    if (group * precision + k < bytes) coded |= u64(from[group * precision + k]) << 8 * k;
                int many = size - 8 * group < 8 ? int(size - 8 * group) : 8;
                for (int k = 0; k < many; k++) {
                    u32 symbol = u32(coded >> precision * k) & ((1u << precision) - 1);
                    valid &= symbol < u32(arrival.alphabet);
                    plain |= u64(symbol < u32(arrival.alphabet) ? symbol : 0) << 8 * k;
                }
                if (many == 8)
                    *reinterpret_cast<u64*>(symbols + 8 * group) = plain;
                else
                    for (int k = 0; k < many; k++) symbols[8 * group + k] = u8(plain >> 8 * k);
            }
            u64 bits = u64(count) * precision;
            if (c == arrival.chunks - 1 && bits & 7) valid &= !(arrival.data[bits >> 3] >> (bits & 7));
            sound = __all_sync(~0u, valid);
        } else {
            u64 from = arrival.offsets[c], to = c + 1 < arrival.chunks ? arrival.offsets[c + 1] : arrival.data_length;
            int bits = arrival.lane_bits;
            sound = to >= from && to <= arrival.data_length && to - from >= u64(3 << bits) && to - from < 1u << 30;
            Chunk chunk = {table, arrival.data + from, arrival.data + to, symbols, size, windows[warp]};
            bool coarse = precision == 8 && table[0] & 255;
            if (sound && bits == 6)
                sound = coarse            ? decode_lanes<COARSE, true>(chunk, 8, 6)
                        : precision <= 12 ? decode_lanes<MEDIUM, true>(chunk, precision, 6)
                                          : decode_lanes<FINE, true>(chunk, precision, 6);
            else if (sound)
                sound = coarse            ? decode_lanes<COARSE, false>(chunk, 8, bits)
                        : precision <= 12 ? decode_lanes<MEDIUM, false>(chunk, precision, bits)
                                          : decode_lanes<FINE, false>(chunk, precision, bits);
        }
        if (!sound && !lane) give_up(job, arrival);
    }
}

// How large the structures are here, for the test that numpy lays them out alike.
extern "C" __global__ void sizes(i64* out) {
    const i64 all[] = {sizeof(Message), sizeof(Arrival),   sizeof(Source),
                       sizeof(Target),  sizeof(DecodeJob), sizeof(FormatTable)};
    for (int i = 0; i < 6; i++) out[i] = all[i];
}
