// Stores past the caches, for error memory that goes to a buffer of its own (Stream::far).
//
// Such stores are ordered with nothing: whoever made some must call _mm_sfence before he returns. They want aligned
// addresses, which Stream::streams makes sure of for the first entry, and rows of whole vectors for all others.
#pragma once
#include <immintrin.h>

namespace gradwire {
namespace {

#ifdef __AVX512F__
inline void store(float* at, __m512 values, bool far) {
    if (far)
        _mm512_stream_ps(at, values);
    else
        _mm512_storeu_ps(at, values);
}
#else
inline void store(float* at, __m256 values, bool far) {
    if (far)
        _mm256_stream_ps(at, values);
    else
        _mm256_storeu_ps(at, values);
}
#endif

}  // namespace
}  // namespace gradwire
