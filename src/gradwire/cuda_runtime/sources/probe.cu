// Compiled first, to find out whether there is a compiler for this GPU.
extern "C" __global__ void probe() {}
