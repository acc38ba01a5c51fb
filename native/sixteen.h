// Vectors of sixteen numbers, for loops that are compiled once per instruction set.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "quantize.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are handed over within a file alone

namespace gradwire {
namespace {

// Sixteen numbers, which compilers keep in as many registers as they need.
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));

// a·b + c, by any rounding: for fits.
GRADWIRE_INLINE Sixteen multiply_add(float a, Sixteen b, Sixteen c) {
#ifdef __AVX512F__
    return Sixteen(_mm512_fmadd_ps(_mm512_set1_ps(a), __m512(b), __m512(c)));
#else
    return a * b + c;
#endif
}

GRADWIRE_INLINE Sixteen load16(const float* x) { return *reinterpret_cast<const Sixteen*>(x); }
inline void store16(float* x, Sixteen v) { *reinterpret_cast<Sixteen*>(x) = v; }

}  // namespace
}  // namespace gradwire
