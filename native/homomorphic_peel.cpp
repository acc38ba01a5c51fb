// Peeling: a cell that holds one unresolved block gives it away, and so on.
//
// Everything lies at random places, so nothing must wait for a place to be read: blocks are taken from the queue a batch
// at a time, hashed together, and their cells fetched before the first of them is touched.
#include <algorithm>
#include <cstring>

#include "homomorphic.h"

namespace gradwire {
namespace {

constexpr size_t kBatch = 64;
constexpr size_t kKept = size_t(1) << 24;  // words of scratch, beyond which it is given back

void list_blocks(const uint32_t* bitmap, size_t count, Peeled& p) {
    constexpr size_t kGroups = 256;
    const size_t groups = (count + 31) / 32;
    size_t n = 0;
    for (size_t start = 0; start < groups; start += kGroups) {
        const size_t room = n + 32 * kGroups + 1;  // one may be written that is not there
        if (p.blocks.size() < room) p.blocks.resize(std::max(2 * n, room));
        uint32_t* out = p.blocks.data();
        for (size_t g = start; g < std::min(groups, start + kGroups); g++) {
            // Two at once, whether they are there or not: how many a word has cannot be foreseen.
            const size_t end = n + ones(bitmap[g]);
            for (uint32_t bits = bitmap[g]; n < end; n += 2) {
                for (int i = 0; i < 2; i++) {
                    out[n + size_t(i)] = uint32_t(g * 32) + uint32_t(__builtin_ctz(bits | 1u << 31));
                    bits &= bits - 1;
                }
            }
            n = end;
        }
    }
    while (n && p.blocks[n - 1] >= count) n--;  // bits beyond the last block
    p.blocks.resize(n);
}

// A cell on its way to be empty, in one line of the cache: how many blocks it has, in the bits of its tag from `shift`
// on, and the XOR of their places in the list, in those below; and the sum of their words.
template <typename Tag, int Lanes>
struct Cell {
    Tag tag;
    uint32_t sum[Lanes];
};

// How far to shift counts in a tag of 32 bits, above places of so many blocks; 0 if that leaves too little for them.
int short_tag_shift(size_t blocks) {
    int shift = 1;
    while (blocks >> shift) shift++;
    return shift <= 24 ? shift : 0;
}

template <typename Tag, int Lanes>
Cell<Tag, Lanes>* room_for_cells(const SketchShape& shape, Peeled& p) {
    p.cells.resize(shape.cells() * sizeof(Cell<Tag, Lanes>) / sizeof(uint64_t) + 1);
    return reinterpret_cast<Cell<Tag, Lanes>*>(p.cells.data());
}

// False if a count has run over, as only an index made for it can cause.
template <typename Tag, int Lanes>
bool fill_cells(const SketchShape& shape, const uint32_t* sketch, int shift, Peeled& p) {
    const size_t n = p.blocks.size(), cells = shape.cells();
    const auto hash = homomorphic_kernels().cells;
    const Tag one = Tag(1) << shift;
    Cells of;
    Cell<Tag, Lanes>* const cell = room_for_cells<Tag, Lanes>(shape, p);
    for (size_t c = 0; c < cells; c++) {
        cell[c].tag = 0;
        std::memcpy(cell[c].sum, sketch + c * Lanes, sizeof cell[c].sum);
    }
    for (size_t i = 0; i < n; i += kHashBlock) {
        const size_t m = std::min(n - i, kHashBlock);
        hash(shape, p.blocks.data() + i, m, of);
        for (size_t j = 0; j < m; j++)
            for (int k = 0; k < kHashes; k++) {
                Tag& tag = cell[of.of[k][j]].tag;
                tag = (tag + one) ^ Tag(i + j);
            }
    }
    size_t counted = 0;
    for (size_t c = 0; c < cells; c++) counted += size_t(cell[c].tag >> shift);
    return counted == n * kHashes;
}

template <typename Tag, int Lanes>
void peel_blocks(const SketchShape& shape, int shift, Peeled& p) {
    const size_t cells = shape.cells();
    const auto hash = homomorphic_kernels().cells;
    const Tag one = Tag(1) << shift, place = one - 1;
    Cell<Tag, Lanes>* const cell = room_for_cells<Tag, Lanes>(shape, p);
    p.queue.resize(cells + 1);
    uint32_t *const queue = p.queue.data(), *const values = p.values.data();
    const uint32_t* const blocks = p.blocks.data();
    uint8_t* const done = p.done.data();
    // A cell gets into the queue once: when its count falls to one, or if it begins with it.
    size_t end = 0;
    for (size_t c = 0; c < cells; c++) {
        queue[end] = uint32_t(c);
        end += cell[c].tag >> shift == 1;
    }
    uint32_t from[kBatch], at_list[kBatch], block[kBatch];
    Cells of;
    for (size_t at = 0; at < end;) {
        size_t taken = 0;
        for (const size_t stop = std::min(end, at + kBatch); at < stop; at++) {
            const Tag tag = cell[queue[at]].tag;
            from[taken] = queue[at];
            at_list[taken] = uint32_t(tag & place);
            taken += tag >> shift == 1;  // otherwise it was recovered from another cell
        }
        for (size_t i = 0; i < taken; i++) {
            block[i] = blocks[at_list[i]];
            __builtin_prefetch(&values[size_t(at_list[i]) * Lanes], 1);
        }
        hash(shape, block, taken, of);
        for (int k = 0; k < kHashes; k++)
            for (size_t i = 0; i < taken; i++) {
                __builtin_prefetch(&cell[of.of[k][i]], 1);
                if (Lanes > 4) __builtin_prefetch(&cell[of.of[k][i]].sum[Lanes - 1], 1);
            }
        for (size_t i = at; i < std::min(end, at + kBatch); i++) __builtin_prefetch(&cell[queue[i]]);
        for (size_t i = 0; i < taken; i++) {
            const uint32_t b = at_list[i];
            if (cell[from[i]].tag >> shift != 1) continue;  // twice in this batch
            uint32_t value[Lanes];
            std::memcpy(value, cell[from[i]].sum, sizeof value);
            std::memcpy(values + size_t(b) * Lanes, value, sizeof value);
            done[b] = 1;
            for (int k = 0; k < kHashes; k++) {
                Cell<Tag, Lanes>& c = cell[of.of[k][i]];
                c.tag = (c.tag - one) ^ b;
                queue[end] = of.of[k][i];
                end += c.tag >> shift == 1;
                for (int lane = 0; lane < Lanes; lane++) c.sum[lane] -= value[lane];
            }
        }
    }
    uint32_t unexplained = 0;
    for (size_t c = 0; c < cells; c++) {
        uint32_t rest = 0;
        for (int lane = 0; lane < Lanes; lane++) rest |= cell[c].sum[lane];
        unexplained |= cell[c].tag >> shift ? 0 : rest;
    }
    p.consistent = !unexplained;
}

template <int Lanes>
void recover(const SketchShape& shape, const uint32_t* sketch, Peeled& p) {
    p.done.assign(p.blocks.size(), 0);
    p.values.assign(p.blocks.size() * Lanes, 0);
    const int shift = short_tag_shift(p.blocks.size());
    if (shift && fill_cells<uint32_t, Lanes>(shape, sketch, shift, p)) {
        peel_blocks<uint32_t, Lanes>(shape, shift, p);
    } else {
        fill_cells<uint64_t, Lanes>(shape, sketch, 32, p);
        peel_blocks<uint64_t, Lanes>(shape, 32, p);
    }
}

}  // namespace

Peeled& peel_scratch() {
    static thread_local Peeled peeled;
    return peeled;
}

void Peeled::trim() {
    if (blocks.capacity() + 2 * values.capacity() + 2 * cells.capacity() > kKept) {
        const bool was = consistent;
        *this = Peeled();
        consistent = was;
    }
}

void peel(const SketchShape& shape, const uint32_t* bitmap, const uint32_t* sketch, size_t words, Peeled& p) {
    const size_t lanes = size_t(shape.lanes);
    list_blocks(bitmap, (words + lanes - 1) / lanes, p);
    (lanes == 1 ? recover<1> : lanes == 4 ? recover<4> : recover<16>)(shape, sketch, p);
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
