// The loops of count-sketches with AVX-512.
#ifdef GRADWIRE_X86
#include "sketch_loops.h"

namespace gradwire {
const SketchKernels avx512_sketch = {sketch_add_any, sketch_estimates_any};
}  // namespace gradwire
#endif
