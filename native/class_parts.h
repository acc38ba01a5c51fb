// Rows shared out to classes and put together again, 64 entries at a time: for structure_loops.h, where vectors can
// gather some of their bytes.
#pragma once

#include "structure.h"

#ifdef __AVX512VBMI2__
#include <immintrin.h>

namespace gradwire {
namespace {

inline __mmask64 first_bytes(size_t n) { return n < 64 ? (uint64_t(1) << n) - 1 : ~uint64_t(0); }

void split_parts(const ClassParts& row, const uint8_t* symbols, size_t width, uint8_t* streams,
                 const int64_t* positions, const int64_t* limits) {
    const ClassPart* part = row.parts.data();
    const uint32_t* end = row.ends.data();
    for (size_t q = 0; q < width; q += 64) {
        const __m512i x = _mm512_maskz_loadu_epi8(first_bytes(width - q), symbols + q);
        for (const ClassPart* const last = row.parts.data() + *end++; part < last; part++) {
            const __m512i of_class = _mm512_maskz_compress_epi8(part->mask, x);
            const int64_t at = positions[part->of_class] + part->offset;
            if (at + 64 <= limits[part->of_class])  // what is written too much is written over later
                _mm512_storeu_si512(streams + at, of_class);
            else
                _mm512_mask_storeu_epi8(streams + at, first_bytes(part->number), of_class);
        }
    }
}

void merge_parts(const ClassParts& row, const uint8_t* streams, size_t size, const int64_t* positions,
                 const uint8_t* zeros, size_t width, uint8_t* symbols) {
    const ClassPart* part = row.parts.data();
    const uint32_t* end = row.ends.data();
    for (size_t q = 0; q < width; q += 64) {
        __m512i x = _mm512_setzero_si512();
        for (const ClassPart* const last = row.parts.data() + *end++; part < last; part++) {
            const size_t at = size_t(positions[part->of_class]) + part->offset;
            const __m512i of_class = at + 64 <= size ? _mm512_loadu_si512(streams + at)
                                                     : _mm512_maskz_loadu_epi8(first_bytes(part->number), streams + at);
            x = _mm512_mask_expand_epi8(x, part->mask,
                                        _mm512_add_epi8(of_class, _mm512_set1_epi8(char(zeros[part->of_class]))));
        }
        _mm512_mask_storeu_epi8(symbols + q, first_bytes(width - q), x);
    }
}

constexpr ClassPartLoops class_part_loops() { return {split_parts, merge_parts}; }

}  // namespace
}  // namespace gradwire
#else
namespace gradwire {
namespace {
constexpr ClassPartLoops class_part_loops() { return {nullptr, nullptr}; }
}  // namespace
}  // namespace gradwire
#endif
