// The loops of the homomorphic code with AVX-512.
#ifdef GRADWIRE_X86
#include "homomorphic_loops.h"

namespace gradwire {
const HomomorphicKernels avx512_homomorphic = {cells_any, bloom_query_any, fixed_any};
}  // namespace gradwire
#endif
