// The chunks of a tensor, coded by several threads at once, with the bytes of one thread.
//
// Chunks do not depend on each other, but where one begins in the output is known only when all before it are coded.
// So each is coded to a place in the second-level cache, and copied to its own as soon as that is known, by whoever
// comes to know it. A thread that is held up holds up the others only when all of these places are taken.
// Coding ends at an entry that is not finite; others may then have coded chunks behind it. If they changed error memory
// in place, it gets back what it held, to the bit: each chunk keeps a copy until all chunks before it are coded.
#pragma once

#include <functional>
#include <vector>

#include "kernels.h"

namespace gradwire {

constexpr size_t kSymbolBytes = 4;  // coding or decoding a symbol takes as long as copying so many bytes

// How a tensor is cut, and how many threads may work on it. All chunks but the last have `chunk` entries.
struct Cut {
    size_t count, chunk;
    int lanes, threads;
    size_t entry_bytes;  // what coding an entry reads and writes, or takes as long as

    size_t threads_of_use() const;  // not more than there are chunks, nor more than it is worth
    size_t chunks() const { return (count + chunk - 1) / chunk; }
    size_t start(size_t i) const { return i * chunk; }
    size_t entries(size_t i) const { return count - i * chunk < chunk ? count - i * chunk : chunk; }
};

// What was coded: the lengths of chunks in bytes, and how many entries they hold; less than all if it stopped.
struct Encoded {
    std::vector<size_t> lengths;
    size_t entries;
};

// Codes chunk i to `out`, which has room for rans_bound(); `scratch` has room for a byte an entry.
using EncodeChunk = std::function<Coded(size_t i, uint8_t* out, uint8_t* scratch)>;

// Codes chunks one after the other into `out`, up to the first that is not coded as a whole. `memory` is what coding a
// chunk changes in place, or null: where it is given, that of chunks behind the last one is as it was.
Encoded encode_chunks(const Cut& cut, const EncodeChunk& encode, float* memory, uint8_t* out);

// False if a chunk is damaged.
bool decode_chunks(const RansTable& table, const std::vector<Chunk>& chunks, const Cut& cut, Sink sink);

}  // namespace gradwire
