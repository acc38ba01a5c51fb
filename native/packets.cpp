// Packets on any machine, and the choice between instruction sets, which follows that of kernels().
#include "kernels.h"
#include "packet_loops.h"

namespace gradwire {
namespace {
const PacketKernels portable_packets = Lanes<Vector2>::kernels();
}

const PacketKernels& packet_kernels() { return GRADWIRE_IN_USE(packets); }

}  // namespace gradwire
