// The entry of a rank among those of a bucket, without sorting them.
#pragma once

#include "levels.h"

namespace gradwire {

// The entry of this rank (0: the least) among these n, of which there are more; about from `low` to `high`. Moves them.
// There is room for n + kFew entries.
float select(const LevelKernels& kernels, float* entries, size_t n, float low, float high, size_t rank);

}  // namespace gradwire
