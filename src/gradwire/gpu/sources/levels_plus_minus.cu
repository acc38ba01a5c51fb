// BinGrad-pb: the best levels b and −b.
// A name ends with the largest bucket for which the kernel has registers.
#include "levels.h"

extern "C" __global__ void __launch_bounds__(128, 7) plus_minus512(Job* job, const Where* tiles) {
    convert<4, PLUS_MINUS>(job, tiles);
}

extern "C" __global__ void __launch_bounds__(128, 4) plus_minus1024(Job* job, const Where* tiles) {
    convert<8, PLUS_MINUS>(job, tiles);
}
