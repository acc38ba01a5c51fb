// Four packets at a time.
#include "packet_loops.h"

namespace gradwire {
const PacketKernels avx2_packets = Lanes<Vector4>::kernels();
}
