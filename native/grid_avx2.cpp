// The grid for x86 with AVX2: the plain loops, vectorised by the compiler.
#ifdef GRADWIRE_X86
#include "grid_loop.h"

namespace gradwire {
const GridKernels avx2_grid = {grid_any, grid_rans};
}
#endif
