// Index and sketch of the homomorphic code, and the choice of its loops.
#include "homomorphic.h"

#include <cstring>

#include "homomorphic_loops.h"

namespace gradwire {

const HomomorphicKernels portable_homomorphic = {cells_any, bloom_query_any, fixed_any};

const HomomorphicKernels& homomorphic_kernels() { return GRADWIRE_IN_USE(homomorphic); }

SketchShape::SketchShape(uint32_t segments, int log, int lanes, uint32_t seed)
    : segments(segments), log(log), lanes(lanes), key(mix(seed ^ kGolden)), key2(mix(key + kOther)) {}

bool are_ascending(const int64_t* positions, size_t n, int64_t limit) {
    bool good = !n || (positions[0] >= 0 && positions[n - 1] < limit);
    for (size_t i = 1; i < n; i++) good &= positions[i] > positions[i - 1];
    return good;
}

size_t count_bits(const uint32_t* words, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += ones(words[i]);
    return count;
}

size_t count_blocks(const int64_t* positions, size_t n, int lanes_log) {
    size_t count = n ? 1 : 0;
    for (size_t i = 1; i < n; i++) count += (positions[i] >> lanes_log) != (positions[i - 1] >> lanes_log);
    return count;
}

void index_bitmap(const int64_t* positions, size_t n, int lanes_log, uint32_t* bitmap) {
    for (size_t i = 0; i < n; i++) {
        const uint64_t block = uint64_t(positions[i]) >> lanes_log;
        bitmap[block / 32] |= 1u << (block % 32);
    }
}

void bloom_build(const uint32_t* bitmap, size_t groups, uint32_t* index, uint32_t index_words, int probes,
                 uint32_t seed) {
    const uint32_t key = mix(seed ^ kOther);
    for (size_t g = 0; g < groups; g++) {
        const uint32_t bits = bitmap[g];
        if (!bits) continue;
        const uint32_t hash = mix(uint32_t(g) ^ key);
        for (int i = 0; i < probes; i++) {
            const uint32_t h = probe(hash, i);
            index[(uint64_t(h) * index_words) >> 32] |= (bits << (h & 31)) | (bits >> (-h & 31));
        }
    }
}

namespace {

template <int Lanes>
void add_blocks(const SketchShape& shape, const int64_t* positions, const int32_t* values, size_t n, uint32_t* sketch) {
    constexpr int kLog = Lanes == 1 ? 0 : Lanes == 4 ? 2 : 4;
    uint32_t block[kHashBlock], word[kHashBlock][Lanes];
    Cells cells;
    const auto hash = homomorphic_kernels().cells;
    for (size_t i = 0; i < n;) {
        size_t m = 0;
        for (; i < n && m < kHashBlock; m++) {
            const uint64_t b = uint64_t(positions[i]) >> kLog;
            block[m] = uint32_t(b);
            if (Lanes == 1) {
                word[m][0] = uint32_t(values[i++]);
            } else {
                std::memset(word[m], 0, sizeof word[m]);
                for (; i < n && uint64_t(positions[i]) >> kLog == b; i++)
                    word[m][positions[i] & (Lanes - 1)] = uint32_t(values[i]);
            }
        }
        hash(shape, block, m, cells);
        for (size_t j = 0; j < m; j++)
            for (int k = 0; k < kHashes; k++) {
                uint32_t* cell = sketch + size_t(cells.of[k][j]) * Lanes;
                for (int lane = 0; lane < Lanes; lane++) cell[lane] += word[j][lane];
            }
    }
}

}  // namespace

void sketch_words(const SketchShape& shape, const int64_t* positions, const int32_t* values, size_t n,
                  uint32_t* sketch) {
    (shape.lanes == 1   ? add_blocks<1>
     : shape.lanes == 4 ? add_blocks<4>
                        : add_blocks<16>)(shape, positions, values, n, sketch);
}

size_t align_words(const uint32_t* bitmap, size_t words, int lanes_log, const int64_t* own, const int32_t* own_values,
                   size_t n, int64_t* positions, int32_t* values) {
    const size_t lanes = size_t(1) << lanes_log, blocks = (words + lanes - 1) >> lanes_log;
    size_t at = 0, next = 0, met = 0;
    for (size_t group = 0; group < (blocks + 31) / 32; group++)
        for (uint32_t bits = bitmap[group]; bits; bits &= bits - 1) {
            const size_t first = (group * 32 + size_t(__builtin_ctz(bits))) << lanes_log;
            for (size_t word = first; word < first + lanes && word < words; word++) {
                while (next < n && own[next] < int64_t(word)) next++;  // one that is not marked, as all should be
                const bool here = next < n && own[next] == int64_t(word);
                positions[at] = int64_t(word);
                values[at++] = here ? own_values[next] : 0;
                next += here;
                met += here;
            }
        }
    return met;
}

void put_words(float* out, size_t n, const int64_t* positions, const int32_t* words, size_t count, int bits,
               double factor) {
    const int fields = 32 / bits, shift = 32 - bits;
    for (size_t i = 0; i < count; i++) {
        uint32_t rest = uint32_t(words[i]);
        const size_t first = size_t(positions[i]) * fields, end = first + fields < n ? first + fields : n;
        for (size_t entry = first; entry < end; entry++) {
            const int32_t q = int32_t(rest << shift) >> shift;  // the low field, with its sign
            out[entry] = float(double(q) * factor);
            if (bits < 32) rest = uint32_t((int64_t(int32_t(rest)) - q) >> bits);
        }
    }
}

}  // namespace gradwire
