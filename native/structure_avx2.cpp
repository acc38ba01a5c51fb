// The loops over structured tensors with AVX2.
#ifdef GRADWIRE_X86
#include "structure_loops.h"

namespace gradwire {
const StructureLoops avx2_structure = structure_loops();
}  // namespace gradwire
#endif
