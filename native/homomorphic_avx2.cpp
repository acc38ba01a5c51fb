// The loops of the homomorphic code with AVX2.
#ifdef GRADWIRE_X86
#include "homomorphic_loops.h"

namespace gradwire {
const HomomorphicKernels avx2_homomorphic = {cells_any, bloom_query_any, fixed_any};
}  // namespace gradwire
#endif
