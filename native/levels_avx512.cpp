// The kernels of levels, vectorised by the compiler for this instruction set.
#ifdef GRADWIRE_X86
#include "levels_search.h"

namespace gradwire {

const LevelKernels avx512_levels = {"avx512", stats_loop, search_loop, assign_loop, spread_loop};

}  // namespace gradwire
#endif
