// What the host tells the kernels about a message, and what kernels tell each other: the structures of jobs.py.
//
// A message has frames; a frame has one tensor, or several small ones (its segments), and consists of pieces: bytes
// that the host or a kernel wrote, and streams of symbols, which are entropy-coded. All arrays are in the memory of the
// device, and every pointer is 8 bytes, so that numpy lays the same structures out.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { FP32 = 0, FP16 = 1, BF16 = 2 };  // dtypes, as on the wire
enum { RAW = 0, CONSTANT = 1, HUFFMAN = 2, RANS = 3 };  // coders, as on the wire
enum { GENNORM = 1, HISTOGRAM = 2 };  // models, as on the wire
enum { NONFINITE = 1, UNUSUAL = 2 };  // why the host has to do a message again (Status.bits)
enum { PIECE_BYTES = 0, PIECE_STREAM = 1, PIECE_LENGTH = 2 };  // PIECE_LENGTH: a varint, how long the stream is

const int kSymbols = 256;  // room for an alphabet
const int kMostHead = 640;  // bytes of a coding's head: 254 Elias-gamma codes of up to 15 + 14 bits, rounded up
const int kPieces = 6;  // of a frame, at most
const u64 kSlab = 8192;  // bytes of a piece that one block puts into the message

struct Tensor {
    const void* gradient;
    const float* before;  // error memory; null without error feedback
    float* after;
    u64 seed;  // of stochastic rounding; this and what is above it are told anew for every message, and the decay
    u8* step_at;  // where the frame states this tensor's step (2 bytes, bf16)
    float* sample;  // room for min(count, 65536) numbers
    const void* format;  // what its family of converters has to know
    i64 count;
    i64 first;  // index of its first symbol in the message's buffer of symbols
    void* own;  // scratch that its family asked for
    float decay;
    int dtype;
    int frame;
    int stream;
    int parts;  // of the sample
    int tiles;
    int first_part;  // index of its first part among all parts of the message
    int first_tile;
};

struct Fit {  // of a tensor; written by the kernels alone
    u64 nonzero;
    double mean_abs;
    float step, inverse;
    int beta, zero_mass;  // of the GenNorm
    int sampled;  // entries of the sample
    int closer;  // whether nearly all of the sample is zero, so that all entries are looked at
    u32 parts_done, tiles_done;
};

struct Stream {
    const u8* symbols;
    u64* counts;  // kSymbols of them; zero before the first message, and again after each choice
    u8* coded;  // scratch: chunk c begins at coded + c·(2·chunk_size + 256)
    u32* lengths;  // of the chunks, in bytes
    u64* offsets;  // of the chunks, in the stream's data
    const void* format;  // of its tensors: where the GenNorm's masses are
    i64 count;
    int alphabet, zero;  // number of symbols, and the symbol whose frequency is not sent
    int coder;  // what is allowed: RAW or RANS
    int models;  // bit 0: GenNorm, bit 1: histogram
    int first_tensor, tensors;  // whose fits choose the GenNorm
    int most_chunks;
    int frame;
    // ── written by the kernels ──
    int used_coder, model, precision, lane_bits, chunks, head_length;
    i64 chunk_size;
    u64 length;  // of all of it: head, layout and chunks
    u64 data;  // bytes of the chunks
    u64 place;  // of the first chunk, in the message
    u32 reciprocal[kSymbols];
    u32 packed[kSymbols];  // see write_symbol
    u8 head[kMostHead];  // coding byte, parameters of the model, and the layout without the lengths of chunks
};

struct Piece {
    int kind, stream;
    const u8* bytes;
    u64 length;
    u64 offset;  // in the message
};

struct Frame {
    u8 start[5];  // magic, version, codec and flags, dtype and rank
    u8 shape_length;
    u8 shape[114];  // varints
    i64 count;
    int pieces;
    u32 crc;
    u64 offset, length;  // in the message; of the whole frame
    u32 places, placed;  // pieces of work that write the frame, and how many are done
    Piece piece[kPieces];
};

struct Status {  // what the host reads
    u64 length;  // of the message
    u32 bits;  // NONFINITE, UNUSUAL
    u32 closer;  // whether a tensor is looked at closer (Fit.closer), which kernels tell each other
};

struct Where {  // one block's work: a part of a tensor, or a chunk of a stream, or a piece of a frame
    int item, index;
};

struct Job {
    Tensor* tensors;
    Fit* fits;
    Stream* streams;
    Frame* frames;
    Where* chunks;  // (stream, chunk)
    Where* pieces;  // (frame, piece | slab << 8): pieces of bytes, and heads of streams; (frame, −1): its header
    double* partial;  // sums of parts, 32 for each
    double* tile_sums;  // sums of tiles, 4 for each
    Status* status;
    u8* out;
    u64 room;  // bytes of `out`
    u8* symbols;
    u64 stamp;  // of a message that nobody waits for: what its prefix says of step and tensors
    int stream_count, frame_count, chunk_count, piece_count;
    int everything;  // whether such a message has the memories of tensors that are zero, too
};
