// The homomorphic code (docs/homomorphic.md): words on a grid, index, sketch, peeling.
//
// Traps:
// - Everything here comes from the network: bitmaps may have bits beyond the last block, sketches any numbers, and an
//   index may name far more blocks than there are cells. Cells are hashes, always in range; counts of blocks in short
//   tags may run over, which is noticed, and those in long ones have 32 bits, which no message has blocks for.
// - The three hashes that give the cells are made side by side from one number. Made one from the other, blocks that
//   share two cells would share the other two some five times too often, which is what small sketches fail by.
#pragma once

#include <vector>

#include "kernels.h"

namespace gradwire {

constexpr uint32_t kGolden = 0x9e3779b9u, kOther = 0x85ebca6bu;
inline uint32_t ones(uint32_t x) {  // not all machines have an instruction for it
    x -= (x >> 1) & 0x55555555u;
    x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
    return (((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u) >> 24;
}

constexpr int kHashes = 4;
constexpr size_t kSpare = 16;  // vector stores reach beyond what they have found
constexpr size_t kHashBlock = 1024;  // blocks that are hashed at a time
constexpr size_t kMostWords = size_t(1) << 31;

// How a sketch is laid out: `segments` of 2^log cells of `lanes` words.
struct SketchShape {
    uint32_t segments;
    int log, lanes;
    uint32_t key, key2;

    SketchShape(uint32_t segments, int log, int lanes, uint32_t seed);
    uint32_t cells() const { return segments << log; }
};

struct Cells {
    uint32_t of[kHashes][kHashBlock];
};

struct FixedGrid {
    float decay, step, limit;  // limit: the largest fp32 number up to `most`
    int bits;
    bool stochastic;
    uint64_t seed;
};

struct FixedResult {
    size_t words = 0;        // that are not zero
    uint32_t largest_g = 0;  // bit patterns of magnitudes
    uint32_t largest_u = 0;
    double squares[16] = {};  // of every sixteenth entry
};

struct HomomorphicKernels {
    void (*cells)(const SketchShape& shape, const uint32_t* blocks, size_t n, Cells& out);  // n <= kHashBlock
    void (*bloom_query)(const uint32_t* index, uint32_t index_words, int probes, uint32_t seed, size_t groups,
                        uint32_t* bitmap);
    // Positions and values have room for all words, and kSpare more.
    void (*quantize)(const FixedGrid& g, const Stream& s, int64_t* positions, int32_t* values, FixedResult& result);
};

extern const HomomorphicKernels portable_homomorphic;
#ifdef GRADWIRE_X86
extern const HomomorphicKernels avx2_homomorphic, avx512_homomorphic;
#endif
#ifdef GRADWIRE_NEON  // which has no gather, and is what the compiler vectorises the plain loops for
inline constexpr const HomomorphicKernels& neon_homomorphic = portable_homomorphic;
#endif
const HomomorphicKernels& homomorphic_kernels();  // the ones in use

bool are_ascending(const int64_t* positions, size_t n, int64_t limit);
size_t count_bits(const uint32_t* words, size_t n);
size_t count_blocks(const int64_t* positions, size_t n, int lanes_log);
// The bitmap is zero before.
void index_bitmap(const int64_t* positions, size_t n, int lanes_log, uint32_t* bitmap);
void bloom_build(const uint32_t* bitmap, size_t groups, uint32_t* index, uint32_t index_words, int probes,
                 uint32_t seed);
// The sketch is zero before.
void sketch_words(const SketchShape& shape, const int64_t* positions, const int32_t* values, size_t n,
                  uint32_t* sketch);
// Of the blocks that the bitmap marks: where their words are (below `words`), and which of the message's they are.
// Returns how many of the message's were met; positions and values have room for all that are marked.
size_t align_words(const uint32_t* bitmap, size_t words, int lanes_log, const int64_t* own, const int32_t* own_values,
                   size_t n, int64_t* positions, int32_t* values);
void put_words(float* out, size_t n, const int64_t* positions, const int32_t* words, size_t count, int bits,
               double factor);

// What comes of peeling, and the room it takes, which a thread keeps: fresh pages cost as much as the work itself.
struct Peeled {
    std::vector<uint32_t> blocks;  // those of the index, ascending
    std::vector<uint8_t> done;     // which of them were recovered
    std::vector<uint32_t> values;  // their words
    size_t nonzero, left;          // words
    bool consistent;

    std::vector<uint64_t> cells;
    std::vector<uint32_t> queue;

    void trim();  // gives back what is beyond some size
};
Peeled& peel_scratch();  // this thread's
void peel(const SketchShape& shape, const uint32_t* bitmap, const uint32_t* sketch, size_t words, Peeled& out);
void list_peeled(const Peeled& peeled, int lanes, size_t words, int64_t* positions, int32_t* values, int64_t* left);

}  // namespace gradwire
