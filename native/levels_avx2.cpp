// The kernels of levels, vectorised by the compiler for this instruction set, which has no idea how to pack lanes.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include "levels_loops.h"

namespace gradwire {
namespace {

struct AppendLanes {
    GRADWIRE_INLINE static size_t append(FloatLanes v, IntLanes inside, float* out) {
        const uint64_t bits = unsigned(_mm256_movemask_ps((__m256)inside));
        const uint64_t bytes = _pdep_u64(bits, 0x0101010101010101u) * 255;  // of each lane that is inside
        const __m128i lanes = _mm_cvtsi64_si128(int64_t(_pext_u64(0x0706050403020100u, bytes)));
        _mm256_storeu_ps(out, _mm256_permutevar8x32_ps((__m256)v, _mm256_cvtepu8_epi32(lanes)));
        return size_t(__builtin_popcountll(bits));
    }
};

}  // namespace

const LevelKernels avx2_levels = GRADWIRE_LEVEL_KERNELS(assign_loop, spread_loop, take_between_loop<AppendLanes>,
                                                        count_parts_loop, take_part_loop<AppendLanes>, nullptr);

}  // namespace gradwire
#endif
