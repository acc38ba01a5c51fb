// Packets on any machine, and the choice between instruction sets, which follows that of kernels().
#include "kernels.h"
#include "packet_loops.h"

namespace gradwire {
namespace {
const PacketKernels portable_packets = Lanes<Vector2>::kernels();
}

const PacketKernels& packet_kernels() {
#ifdef GRADWIRE_X86
    if (&kernels() == &avx512_kernels) return avx512_packets;
    if (&kernels() == &avx2_kernels) return avx2_packets;
#endif
    return portable_packets;
}

}  // namespace gradwire
