// The loops of count-sketches with AVX2.
#ifdef GRADWIRE_X86
#include "sketch_loops.h"

namespace gradwire {
const SketchKernels avx2_sketch = {sketch_add_any, sketch_estimates_any};
}  // namespace gradwire
#endif
