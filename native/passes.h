// Passes over a whole tensor, on threads: entries are taken in blocks by whoever is free, and results do not depend on
// who took which.
#pragma once

#include "kernels.h"

namespace gradwire {

uint32_t absmax_bits(const float* x, size_t n, int threads);  // as Kernels::absmax_bits

void quantize(const Quantizer& q, const Stream& s, uint8_t* symbols, int threads);  // as Kernels::quantize

void histogram(const uint8_t* symbols, size_t n, int threads, int64_t counts[256]);

uint32_t crc32(const uint8_t* data, size_t n, uint32_t value, int threads);

// Symbols of `width` bits each, packed and back; the latter is false if a symbol is not below the limit, or bits are
// left over.
void pack_bits(const uint8_t* symbols, size_t n, int width, uint8_t* out, int threads);
bool unpack_bits(const uint8_t* data, size_t n, int width, int limit, uint8_t* symbols, int threads);

}  // namespace gradwire
