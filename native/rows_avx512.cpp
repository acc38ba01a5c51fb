// The loops over rows with AVX-512.
#ifdef GRADWIRE_X86
#include "row_loops.h"

namespace gradwire {
const RowKernels avx512_rows = row_kernels<Of8, Of16>();
}  // namespace gradwire
#endif
