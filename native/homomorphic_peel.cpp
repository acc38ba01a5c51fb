// Peeling: a cell that holds one unresolved block gives it away, and so on.
//
// Blocks are put in the order of their first segments, so that what happens at a time lies in a few segments; and what
// is next is fetched a batch ahead, since every step would otherwise wait for the one before: cell, block, its cells.
#include <algorithm>
#include <cstring>

#include "homomorphic.h"

namespace gradwire {
namespace {

constexpr size_t kBatch = 32;
constexpr Held kOne = Held(1) << 32;
constexpr size_t kKept = size_t(1) << 26;  // bytes of scratch, some

void list_blocks(const uint32_t* bitmap, size_t count, std::vector<uint32_t>& blocks) {
    constexpr size_t kGroups = 256;
    const size_t groups = (count + 31) / 32;
    size_t n = 0;
    for (size_t start = 0; start < groups; start += kGroups) {
        if (blocks.size() < n + 32 * kGroups) blocks.resize(std::max(2 * n, n + 32 * kGroups));
        uint32_t* out = blocks.data();
        for (size_t g = start; g < std::min(groups, start + kGroups); g++)
            for (uint32_t bits = bitmap[g]; bits; bits &= bits - 1) out[n++] = uint32_t(g * 32) + __builtin_ctz(bits);
    }
    while (n && blocks[n - 1] >= count) n--;  // bits beyond the last block
    blocks.resize(n);
}

// Blocks by first segment: how many there are of each, then where they go.
void sort_blocks(const SketchShape& shape, Peeled& p) {
    const size_t n = p.blocks.size();
    const auto hash = homomorphic_kernels().cells;
    Cells cells;
    p.start.resize(n);
    p.number.resize(n);
    p.sorted.resize(n);
    p.place.assign(shape.segments + 1, 0);
    for (size_t i = 0; i < n; i += kHashBlock) {
        const size_t m = std::min(n - i, kHashBlock);
        hash(shape, p.blocks.data() + i, m, cells);
        for (size_t j = 0; j < m; j++) {
            p.start[i + j] = cells.of[0][j] >> shape.log;
            p.place[p.start[i + j] + 1]++;
        }
    }
    for (uint32_t s = 0; s < shape.segments; s++) p.place[s + 1] += p.place[s];
    for (size_t i = 0; i < n; i++) {
        const uint32_t at = p.place[p.start[i]]++;
        p.number[at] = uint32_t(i);
        p.sorted[at] = p.blocks[i];
    }
}

void fill_cells(const SketchShape& shape, Peeled& p) {
    const size_t n = p.blocks.size();
    const auto hash = homomorphic_kernels().cells;
    Cells cells;
    p.adds.resize(n);
    p.held.assign(shape.cells(), 0);
    for (size_t i = 0; i < n; i += kHashBlock) {
        const size_t m = std::min(n - i, kHashBlock);
        hash(shape, p.sorted.data() + i, m, cells);
        for (size_t j = 0; j < m; j++)
            for (int k = 0; k < kHashes; k++) {
                Held& held = p.held[cells.of[k][j]];
                p.adds[i + j].cell[k] = cells.of[k][j];
                held = (held + kOne) ^ (i + j);
            }
    }
}

template <int Lanes>
void peel_blocks(const SketchShape& shape, const uint32_t* sketch, Peeled& p) {
    const size_t cells = shape.cells();
    p.sums.assign(sketch, sketch + cells * Lanes);
    p.queue.resize(cells + 1);
    Held* const held = p.held.data();
    const Adds* const adds = p.adds.data();
    const uint32_t* const number = p.number.data();
    uint32_t *const sums = p.sums.data(), *const values = p.values.data(), *const queue = p.queue.data();
    // A cell gets into the queue once: when its count falls to one, or if it begins with it.
    size_t end = 0;
    for (size_t c = 0; c < cells; c++) {
        queue[end] = uint32_t(c);
        end += held[c] >> 32 == 1;
    }
    uint32_t from[kBatch], block[kBatch];
    for (size_t at = 0; at < end;) {
        size_t taken = 0;
        for (const size_t stop = std::min(end, at + kBatch); at < stop; at++) {
            const Held h = held[queue[at]];
            const bool alone = h >> 32 == 1;  // otherwise it was recovered from another cell
            const uint32_t b = alone ? uint32_t(h) : 0;
            from[taken] = queue[at];
            block[taken] = b;
            taken += alone;
            __builtin_prefetch(&adds[b]);
            __builtin_prefetch(&number[b]);
        }
        for (size_t i = 0; i < taken; i++) {
            for (const uint32_t c : adds[block[i]].cell) {
                __builtin_prefetch(&held[c], 1);
                __builtin_prefetch(&sums[size_t(c) * Lanes], 1);
            }
            __builtin_prefetch(&values[size_t(number[block[i]]) * Lanes], 1);
        }
        for (size_t i = 0; i < taken; i++) {
            const uint32_t b = block[i];
            if (held[from[i]] >> 32 != 1) continue;  // twice in this batch
            uint32_t value[Lanes];
            std::memcpy(value, sums + size_t(from[i]) * Lanes, sizeof value);
            std::memcpy(values + size_t(number[b]) * Lanes, value, sizeof value);
            p.done[number[b]] = 1;
            for (const uint32_t c : adds[b].cell) {
                held[c] = (held[c] - kOne) ^ b;
                queue[end] = c;
                end += held[c] >> 32 == 1;
                for (int lane = 0; lane < Lanes; lane++) sums[size_t(c) * Lanes + lane] -= value[lane];
            }
        }
    }
    uint32_t unexplained = 0;
    for (size_t c = 0; c < cells; c++) {
        uint32_t rest = 0;
        for (int lane = 0; lane < Lanes; lane++) rest |= sums[c * Lanes + lane];
        unexplained |= held[c] >> 32 ? 0 : rest;
    }
    p.consistent = !unexplained;
}

}  // namespace

Peeled& peel_scratch() {
    static thread_local Peeled peeled;
    return peeled;
}

void Peeled::trim() {
    if (adds.capacity() * sizeof(Adds) + values.capacity() * 4 + held.capacity() * sizeof(Held) > kKept) {
        const bool was = consistent;
        *this = Peeled();
        consistent = was;
    }
}

void peel(const SketchShape& shape, const uint32_t* bitmap, const uint32_t* sketch, size_t words, Peeled& p) {
    const size_t lanes = size_t(shape.lanes);
    list_blocks(bitmap, (words + lanes - 1) / lanes, p.blocks);
    p.done.assign(p.blocks.size(), 0);
    p.values.assign(p.blocks.size() * lanes, 0);
    sort_blocks(shape, p);
    fill_cells(shape, p);
    (lanes == 1 ? peel_blocks<1> : lanes == 4 ? peel_blocks<4> : peel_blocks<16>)(shape, sketch, p);
    p.nonzero = p.left = 0;
    for (size_t i = 0; i < p.values.size(); i++) p.nonzero += p.values[i] != 0;
    for (size_t i = 0; i < p.blocks.size(); i++)
        p.left += p.done[i] ? 0 : std::min(lanes, words - size_t(p.blocks[i]) * lanes);
    if (words % lanes && !p.blocks.empty() && p.blocks.back() == words / lanes) {
        // Words beyond the last are nobody's.
        uint32_t* last = p.values.data() + p.values.size() - lanes;
        for (size_t lane = words % lanes; lane < lanes; lane++)
            if (last[lane]) {
                p.consistent = false;
                last[lane] = 0;
                p.nonzero--;
            }
    }
}

void list_peeled(const Peeled& p, int lanes, size_t words, int64_t* positions, int32_t* values, int64_t* left) {
    const size_t width = size_t(lanes);
    for (size_t i = 0; i < p.blocks.size(); i++) {
        const size_t first = size_t(p.blocks[i]) * width;
        if (!p.done[i])
            for (size_t lane = 0; lane < width && first + lane < words; lane++) *left++ = int64_t(first + lane);
        else
            for (size_t lane = 0; lane < width; lane++)
                if (const uint32_t value = p.values[i * width + lane]) {
                    *positions++ = int64_t(first + lane);
                    *values++ = int32_t(value);
                }
    }
}

}  // namespace gradwire
