// Argument checks of the sparse kernels.
#include "bindings.h"

namespace gradwire {

void bind_sparse(nb::module_& m) { (void)m; }

}  // namespace gradwire
