// signSGD: the signs times the mean magnitude.
// A name ends with the largest bucket for which the kernel has registers.
#include "levels.h"

extern "C" __global__ void __launch_bounds__(128, 8) signs512(Job* job, const Where* tiles) {
    convert<4, SIGNS>(job, tiles);
}

extern "C" __global__ void __launch_bounds__(128, 7) signs1024(Job* job, const Where* tiles) {
    convert<8, SIGNS>(job, tiles);
}

extern "C" __global__ void __launch_bounds__(128, 4) signs2048(Job* job, const Where* tiles) {
    convert<16, SIGNS>(job, tiles);
}
