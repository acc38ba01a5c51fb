// The kernels of levels for any machine, and the choice between instruction sets.
#include <cstring>

#include "levels_search.h"

namespace gradwire {

const LevelKernels portable_levels = {"portable", stats_loop, search_loop, assign_loop, spread_loop};

const LevelKernels& level_kernels() {
#ifdef GRADWIRE_X86
    for (const LevelKernels* k : {&avx2_levels, &avx512_levels})
        if (!std::strcmp(k->name, kernels().name)) return *k;
#endif
    return portable_levels;
}

}  // namespace gradwire
