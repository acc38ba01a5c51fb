// The kernels for any machine.
#include "quantize.h"
#include "rans.h"

namespace gradwire {
namespace {

Coded quantize_rans(const Quantizer& q, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                    uint8_t* scratch) {
    if (!all_finite(q, s)) return {0, 0};
    quantize_any(q, s, scratch);
    return {rans_encode_any(t, scratch, s.count, lanes, out), s.count};
}

}  // namespace

const Kernels portable_kernels = {"portable",      absmax_bits_loop, quantize_any,   squared_error_loop,
                                  rans_encode_any, quantize_rans,    rans_decode_any};

}  // namespace gradwire
