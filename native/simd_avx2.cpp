// The kernels for x86 with AVX2: the plain loops of quantize.h, vectorised by the compiler, and rANS rows of eight.
#ifdef GRADWIRE_X86
#include <immintrin.h>

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

const Kernels avx2_kernels = {"avx2", absmax_bits_loop, quantize_any, squared_error_loop, rans_encode_any, quantize_rans,
                              rans_decode_any};

}  // namespace gradwire
#endif
