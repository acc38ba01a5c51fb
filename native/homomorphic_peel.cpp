// Peeling: a cell that holds one unresolved block gives it away, and so on.
//
// Blocks are put in the order of their first segments, so that all that happens at a time lies in a few segments, which
// fit into the second-level cache: cells keep a count and the XOR of the numbers, in that order, of their blocks.
#include <algorithm>
#include <cstring>

#include "homomorphic.h"

namespace gradwire {
namespace {

struct Cell {
    uint32_t count, blocks;
};

struct Entry {
    uint32_t cell[kHashes];
};

void list_blocks(const uint32_t* bitmap, size_t count, std::vector<uint32_t>& blocks) {
    const size_t groups = (count + 31) / 32;
    const uint32_t last = count % 32 ? (1u << count % 32) - 1 : ~0u;
    const auto bits_of = [&](size_t g) { return g + 1 == groups ? bitmap[g] & last : bitmap[g]; };
    size_t n = 0;
    for (size_t g = 0; g < groups; g++) n += size_t(__builtin_popcount(bits_of(g)));
    blocks.resize(n);
    uint32_t* out = blocks.data();
    for (size_t g = 0; g < groups; g++)
        for (uint32_t bits = bits_of(g); bits; bits &= bits - 1) *out++ = uint32_t(g * 32) + __builtin_ctz(bits);
}

template <int Lanes>
void peel_blocks(const SketchShape& shape, const uint32_t* sketch, Peeled& out) {
    const size_t n = out.blocks.size(), cells = shape.cells();
    const auto hash = homomorphic_kernels().cells;
    Cells hashed;
    // By first segment: how many there are of each, then where they go.
    std::vector<uint32_t> start(n), place(shape.segments + 1);
    for (size_t i = 0; i < n; i += kHashBlock) {
        const size_t m = n - i < kHashBlock ? n - i : kHashBlock;
        hash(shape, out.blocks.data() + i, m, hashed);
        for (size_t j = 0; j < m; j++) {
            start[i + j] = hashed.of[0][j] >> shape.log;
            place[start[i + j] + 1]++;
        }
    }
    for (uint32_t s = 0; s < shape.segments; s++) place[s + 1] += place[s];
    std::vector<uint32_t> number(n), block(n);  // in that order: which of out.blocks it is, and the block itself
    for (size_t i = 0; i < n; i++) {
        const uint32_t at = place[start[i]]++;
        number[at] = uint32_t(i);
        block[at] = out.blocks[i];
    }
    std::vector<Cell> cell(cells);
    std::vector<Entry> entry(n);
    for (size_t i = 0; i < n; i += kHashBlock) {
        const size_t m = n - i < kHashBlock ? n - i : kHashBlock;
        hash(shape, block.data() + i, m, hashed);
        for (size_t j = 0; j < m; j++)
            for (int k = 0; k < kHashes; k++) {
                const uint32_t c = hashed.of[k][j];
                entry[i + j].cell[k] = c;
                cell[c].count++;
                cell[c].blocks ^= uint32_t(i + j);
            }
    }
    std::vector<uint32_t> sums(sketch, sketch + cells * Lanes);
    // A cell gets into the queue when its count falls to one, which happens once, or begins with it.
    std::vector<uint32_t> queue(cells + 1);
    size_t end = 0;
    for (size_t c = 0; c < cells; c++) {
        queue[end] = uint32_t(c);
        end += cell[c].count == 1;
    }
    for (size_t at = 0; at < end; at++) {
        const uint32_t c = queue[at];
        if (cell[c].count != 1) continue;  // recovered from another cell
        const uint32_t b = cell[c].blocks;
        uint32_t value[Lanes];
        std::memcpy(value, &sums[size_t(c) * Lanes], sizeof value);
        std::memcpy(&out.values[size_t(number[b]) * Lanes], value, sizeof value);
        out.done[number[b]] = 1;
        for (int k = 0; k < kHashes; k++) {
            const uint32_t other = entry[b].cell[k];
            cell[other].blocks ^= b;
            queue[end] = other;
            end += --cell[other].count == 1;
            for (int lane = 0; lane < Lanes; lane++) sums[size_t(other) * Lanes + lane] -= value[lane];
        }
    }
    for (size_t c = 0; c < cells; c++) {
        uint32_t rest = 0;
        for (int lane = 0; lane < Lanes; lane++) rest |= sums[c * Lanes + lane];
        out.consistent &= cell[c].count != 0 || rest == 0;
    }
}

}  // namespace

void peel(const SketchShape& shape, const uint32_t* bitmap, const uint32_t* sketch, size_t words, Peeled& out) {
    const size_t lanes = size_t(shape.lanes);
    list_blocks(bitmap, (words + lanes - 1) / lanes, out.blocks);
    out.done.assign(out.blocks.size(), 0);
    out.values.assign(out.blocks.size() * lanes, 0);
    out.consistent = true;
    (lanes == 1 ? peel_blocks<1> : lanes == 4 ? peel_blocks<4> : peel_blocks<16>)(shape, sketch, out);
    out.nonzero = out.left = 0;
    for (size_t i = 0; i < out.values.size(); i++) out.nonzero += out.values[i] != 0;
    for (size_t i = 0; i < out.blocks.size(); i++)
        if (!out.done[i]) out.left += std::min(lanes, words - size_t(out.blocks[i]) * lanes);
    if (words % lanes && !out.blocks.empty() && out.blocks.back() == words / lanes) {
        // Words beyond the last are nobody's.
        uint32_t* last = out.values.data() + out.values.size() - lanes;
        for (size_t lane = words % lanes; lane < lanes; lane++)
            if (last[lane]) {
                out.consistent = false;
                last[lane] = 0;
                out.nonzero--;
            }
    }
}

void list_peeled(const Peeled& peeled, int lanes, size_t words, int64_t* positions, int32_t* values, int64_t* left) {
    const size_t width = size_t(lanes);
    for (size_t i = 0; i < peeled.blocks.size(); i++) {
        const size_t first = size_t(peeled.blocks[i]) * width;
        if (!peeled.done[i])
            for (size_t lane = 0; lane < width && first + lane < words; lane++) *left++ = int64_t(first + lane);
        else
            for (size_t lane = 0; lane < width; lane++)
                if (const uint32_t value = peeled.values[i * width + lane]) {
                    *positions++ = int64_t(first + lane);
                    *values++ = int32_t(value);
                }
    }
}

}  // namespace gradwire
