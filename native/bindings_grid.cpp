// Argument checks of the grid kernels.
#include "bindings.h"

namespace gradwire {

void bind_grid(nb::module_& m) { (void)m; }

}  // namespace gradwire
