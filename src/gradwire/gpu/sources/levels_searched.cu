// ORQ: levels that are found one between two others.
// A name ends with the largest bucket for which the kernel has registers.
#include "levels.h"

extern "C" __global__ void __launch_bounds__(128, 5) searched512(Job* job, const Where* tiles) {
    convert<4, SEARCHED>(job, tiles);
}

extern "C" __global__ void __launch_bounds__(128, 5) searched1024(Job* job, const Where* tiles) {
    convert<8, SEARCHED>(job, tiles);
}

extern "C" __global__ void __launch_bounds__(128, 4) searched2048(Job* job, const Where* tiles) {
    convert<16, SEARCHED>(job, tiles);
}
