// Many streams of symbols, each with frequencies of its own: how they are coded, and rANS of all of them at once.
//
// A structured frame has up to 32 classes. One after the other, a stream of 16 lanes waits for its own states most of
// the time; several side by side do not. The bytes are those of compress.choose and rans.encode, stream by stream.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"

namespace gradwire {

// What stands before the coded symbols, and how they are coded (docs/wire-format.md, "How symbols are coded").
struct Coding {
    enum Coder { raw = 0, constant = 1, huffman = 2, rans = 3 };
    Coder coder = raw;
    int precision = 0;
    double bits = 0;  // of the symbols and the parameters
    std::vector<uint8_t> head;  // the coding byte and the parameters
    std::vector<int64_t> frequencies;
};

// The cheapest coding of symbols that occur so often, at least one. The frequency of symbol `implied` is not sent.
// `logs` holds log2(i) for i up to kLogs.
Coding choose_coding(const int64_t* counts, int symbols, int implied, const double* logs);

struct SymbolStream {
    uint8_t* symbols;
    size_t count;
    int alphabet, implied;
    // To code it quickly: lanes of a chunk, and of all chunks together. 0: as few as compress.rans takes.
    int lanes = 0;
    double lanes_in_all = 0;
};

// The coded symbols of each stream: what `compress.encode` returns.
std::vector<std::vector<uint8_t>> code_streams(const std::vector<SymbolStream>& streams,
                                               const std::vector<Coding>& codings, int threads);

// One stream of a frame on its way out of its bytes.
struct CodedStream {
    const uint8_t* data;
    size_t length;
    SymbolStream to;
};
// False if they are damaged, or coded in a way that is not known here.
bool decode_streams(const std::vector<CodedStream>& streams, int threads);

// ── rANS of several chunks side by side ──

struct EncodeJob {
    const RansTable* table;
    const uint8_t* symbols;
    size_t count;
    int lanes;
    uint8_t* out;  // with room for rans_bound(count, lanes, 1)
    size_t bytes;  // written
};
struct DecodeJob {
    const RansTable* table;
    const uint8_t* data;
    size_t length;
    uint8_t* symbols;
    size_t count;
    int lanes;
};
struct StreamKernels {
    void (*encode)(EncodeJob* jobs, size_t n);
    bool (*decode)(const DecodeJob* jobs, size_t n);  // false if a chunk is damaged
};
extern const StreamKernels portable_streams;
#ifdef GRADWIRE_X86
extern const StreamKernels avx512_streams;
inline constexpr const StreamKernels& avx2_streams = portable_streams;
#elif defined(GRADWIRE_NEON)
inline constexpr const StreamKernels& neon_streams = portable_streams;
#endif

}  // namespace gradwire
