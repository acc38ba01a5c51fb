// Argument checks of the levels kernels.
#include "bindings.h"

namespace gradwire {

void bind_levels(nb::module_& m) { (void)m; }

}  // namespace gradwire
