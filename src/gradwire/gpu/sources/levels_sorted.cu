// BinGrad: levels from sorted entries. A name ends with the largest bucket that the kernel has registers for.
#include "levels.h"

extern "C" __global__ void __launch_bounds__(128, 6) sorted512(Job* job, const Where* tiles) {
    convert<4, SORTED>(job, tiles);
}
extern "C" __global__ void __launch_bounds__(128, 4) sorted1024(Job* job, const Where* tiles) {
    convert<8, SORTED>(job, tiles);
}
