// The kernels of levels, vectorised by the compiler for this instruction set.
#ifdef GRADWIRE_X86
#include "levels_loops.h"

namespace gradwire {

const LevelKernels avx2_levels = GRADWIRE_LEVEL_KERNELS(assign_loop, spread_loop);

}  // namespace gradwire
#endif
