// BinGrad-b: the means of both sides of the best split.
// A name ends with the largest bucket for which the kernel has registers.
#include "levels.h"

extern "C" __global__ void __launch_bounds__(128, 8) two_means512(Job* job, const Where* tiles) {
    convert<4, TWO_MEANS>(job, tiles);
}

extern "C" __global__ void __launch_bounds__(128, 5) two_means1024(Job* job, const Where* tiles) {
    convert<8, TWO_MEANS>(job, tiles);
}
