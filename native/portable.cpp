// The kernels for any machine.
#include "quantize.h"
#include "rans.h"

namespace gradwire {
namespace {

size_t quantize_rans(const Quantizer& q, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                     uint8_t* scratch) {
    quantize_any(q, s, scratch);
    return rans_encode_any(t, scratch, s.count, lanes, out);
}

}  // namespace

const Kernels portable_kernels = {"portable", absmax_bits_loop, quantize_any, rans_encode_any, quantize_rans,
                                  rans_decode_any};

}  // namespace gradwire
