// The loops over rows with AVX2.
#ifdef GRADWIRE_X86
#include "row_loops.h"

namespace gradwire {
const RowKernels avx2_rows = row_kernels<Of4, Of8>();
}  // namespace gradwire
#endif
