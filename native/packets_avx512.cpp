// Eight packets at a time.
#include "packet_loops.h"

namespace gradwire {
const PacketKernels avx512_packets = Lanes<Vector8>::kernels();
}
