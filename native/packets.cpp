// Packets on any machine, and the choice between instruction sets, which follows that of kernels().
#include "kernels.h"
#include "packet_loops.h"

namespace gradwire {
namespace {
const PacketKernels portable_packets = Lanes<Vector2>::kernels();
#ifdef GRADWIRE_NEON  // whose vectors are those of the portable loops
constexpr const PacketKernels& neon_packets = portable_packets;
#endif
}  // namespace

const PacketKernels& packet_kernels() { return GRADWIRE_IN_USE(packets); }

}  // namespace gradwire
