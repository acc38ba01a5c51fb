// Peeling: a cell that holds one unresolved block gives it away, and so on.
//
// Everything lies at random places, so nothing must wait for a place to be read: blocks are taken from the queue a batch
// at a time, hashed together, and their cells fetched before the first of them is touched. What was recovered is put in
// order at the end, by its rank in the bitmap.
#include <algorithm>
#include <cstring>

#include "homomorphic.h"

namespace gradwire {
namespace {

constexpr size_t kBatch = 64;
constexpr Held kOne = Held(1) << 32;
constexpr size_t kKept = size_t(1) << 24;  // words of scratch, beyond which it is given back
constexpr size_t kMany = size_t(1) << 20;

void list_blocks(const uint32_t* bitmap, size_t count, Peeled& p) {
    constexpr size_t kGroups = 256;
    const size_t groups = (count + 31) / 32;
    size_t n = 0;
    p.before.resize(groups);
    for (size_t start = 0; start < groups; start += kGroups) {
        if (p.blocks.size() < n + 32 * kGroups) p.blocks.resize(std::max(2 * n, n + 32 * kGroups));
        uint32_t* out = p.blocks.data();
        for (size_t g = start; g < std::min(groups, start + kGroups); g++) {
            p.before[g] = uint32_t(n);
            for (uint32_t bits = bitmap[g]; bits; bits &= bits - 1) out[n++] = uint32_t(g * 32) + __builtin_ctz(bits);
        }
    }
    while (n && p.blocks[n - 1] >= count) n--;  // bits beyond the last block
    p.blocks.resize(n);
}

// From some number on, cells that are touched one after the other had better lie in a few segments, which caches hold.
void sort_blocks(const SketchShape& shape, Peeled& p) {
    const size_t n = p.blocks.size();
    const auto hash = homomorphic_kernels().cells;
    Cells cells;
    p.start.resize(n);
    p.sorted.resize(n);
    p.place.assign(size_t(shape.segments) + 1, 0);
    for (size_t i = 0; i < n; i += kHashBlock) {
        const size_t m = std::min(n - i, kHashBlock);
        hash(shape, p.blocks.data() + i, m, cells);
        for (size_t j = 0; j < m; j++) {
            p.start[i + j] = cells.of[0][j] >> shape.log;
            p.place[p.start[i + j] + 1]++;
        }
    }
    for (uint32_t s = 0; s < shape.segments; s++) p.place[s + 1] += p.place[s];
    for (size_t i = 0; i < n; i++) p.sorted[p.place[p.start[i]]++] = p.blocks[i];
}

void fill_cells(const SketchShape& shape, Peeled& p) {
    const size_t n = p.blocks.size();
    const auto hash = homomorphic_kernels().cells;
    Cells cells;
    p.held.assign(shape.cells(), 0);
    Held* const held = p.held.data();
    const uint32_t* blocks = p.blocks.data();
    if (n >= kMany) {
        sort_blocks(shape, p);
        blocks = p.sorted.data();
    }
    for (size_t i = 0; i < n; i += kHashBlock) {
        const size_t m = std::min(n - i, kHashBlock);
        hash(shape, blocks + i, m, cells);
        for (size_t j = 0; j < m; j++)
            for (int k = 0; k < kHashes; k++) held[cells.of[k][j]] = (held[cells.of[k][j]] + kOne) ^ blocks[i + j];
    }
}

// Returns how many blocks were recovered.
template <int Lanes>
size_t peel_blocks(const SketchShape& shape, const uint32_t* sketch, Peeled& p) {
    const size_t cells = shape.cells();
    const auto hash = homomorphic_kernels().cells;
    p.sums.assign(sketch, sketch + cells * Lanes);
    p.queue.resize(cells + 1);
    p.found.resize(p.blocks.size());
    p.words.resize(p.blocks.size() * Lanes);
    Held* const held = p.held.data();
    uint32_t *const sums = p.sums.data(), *const queue = p.queue.data();
    // A cell gets into the queue once: when its count falls to one, or if it begins with it.
    size_t end = 0, found = 0;
    for (size_t c = 0; c < cells; c++) {
        queue[end] = uint32_t(c);
        end += held[c] >> 32 == 1;
    }
    uint32_t from[kBatch], block[kBatch];
    Cells of;
    for (size_t at = 0; at < end;) {
        size_t taken = 0;
        for (const size_t stop = std::min(end, at + kBatch); at < stop; at++) {
            const Held h = held[queue[at]];
            from[taken] = queue[at];
            block[taken] = uint32_t(h);
            taken += h >> 32 == 1;  // otherwise it was recovered from another cell
        }
        hash(shape, block, taken, of);
        for (int k = 0; k < kHashes; k++)
            for (size_t i = 0; i < taken; i++) {
                __builtin_prefetch(&held[of.of[k][i]], 1);
                __builtin_prefetch(&sums[size_t(of.of[k][i]) * Lanes], 1);
            }
        for (size_t i = at; i < std::min(end, at + kBatch); i++) __builtin_prefetch(&held[queue[i]]);
        for (size_t i = 0; i < taken; i++) {
            const uint32_t b = block[i];
            if (held[from[i]] >> 32 != 1) continue;  // twice in this batch
            uint32_t value[Lanes];
            std::memcpy(value, sums + size_t(from[i]) * Lanes, sizeof value);
            std::memcpy(p.words.data() + found * Lanes, value, sizeof value);
            p.found[found++] = b;
            for (int k = 0; k < kHashes; k++) {
                const uint32_t c = of.of[k][i];
                const Held h = (held[c] - kOne) ^ b;
                held[c] = h;
                queue[end] = c;
                end += h >> 32 == 1;
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
    return found;
}

template <int Lanes>
void recover(const SketchShape& shape, const uint32_t* bitmap, const uint32_t* sketch, Peeled& p) {
    const size_t found = peel_blocks<Lanes>(shape, sketch, p);
    p.done.assign(p.blocks.size(), 0);
    p.values.assign(p.blocks.size() * Lanes, 0);
    for (size_t i = 0; i < found; i++) {
        const uint32_t b = p.found[i], rank = p.before[b / 32] + ones(bitmap[b / 32] & ((1u << b % 32) - 1));
        p.done[rank] = 1;
        std::memcpy(p.values.data() + size_t(rank) * Lanes, p.words.data() + i * Lanes, 4 * Lanes);
    }
}

}  // namespace

Peeled& peel_scratch() {
    static thread_local Peeled peeled;
    return peeled;
}

void Peeled::trim() {
    if (blocks.capacity() + 2 * values.capacity() + sums.capacity() + 2 * held.capacity() > kKept) {
        const bool was = consistent;
        *this = Peeled();
        consistent = was;
    }
}

void peel(const SketchShape& shape, const uint32_t* bitmap, const uint32_t* sketch, size_t words, Peeled& p) {
    const size_t lanes = size_t(shape.lanes);
    list_blocks(bitmap, (words + lanes - 1) / lanes, p);
    fill_cells(shape, p);
    (lanes == 1 ? recover<1> : lanes == 4 ? recover<4> : recover<16>)(shape, bitmap, sketch, p);
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
