// The loops over structured tensors with AVX-512.
#ifdef GRADWIRE_X86
#include "structure_loops.h"

namespace gradwire {
const StructureLoops avx512_structure = structure_loops();
}  // namespace gradwire
#endif
