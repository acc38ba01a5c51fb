// QSGD, TernGrad and linear: levels evenly spaced between extremes, or as far as a norm.
// A name ends with the largest bucket for which the kernel has registers.
#include "levels.h"

extern "C" __global__ void __launch_bounds__(128, 8) scaled512(Job* job, const Where* tiles) {
    convert<4, SCALED>(job, tiles);
}

extern "C" __global__ void __launch_bounds__(128, 7) scaled1024(Job* job, const Where* tiles) {
    convert<8, SCALED>(job, tiles);
}

extern "C" __global__ void __launch_bounds__(128, 4) scaled2048(Job* job, const Where* tiles) {
    convert<16, SCALED>(job, tiles);
}
