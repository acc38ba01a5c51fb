// CRC-32 (IEEE 802.3, as zlib's), eight bytes at a time from tables; by carry-less multiplication on x86, or by arm64's
// instruction for it, where there is one.
#include <cstring>

#include "kernels.h"
#ifdef GRADWIRE_X86
#include <immintrin.h>
#endif
#if defined(GRADWIRE_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace gradwire {
namespace {

struct Tables {
    uint32_t at[8][256];
    Tables() {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
            at[0][i] = c;
        }
        for (int k = 1; k < 8; k++)
            for (int i = 0; i < 256; i++) at[k][i] = at[0][at[k - 1][i] & 255] ^ (at[k - 1][i] >> 8);
    }
};
const Tables tables;

uint32_t by_tables(const uint8_t* p, size_t n, uint32_t c) {
    const auto& t = tables.at;
    for (; n >= 8; p += 8, n -= 8) {
        uint32_t a = c ^ (p[0] | p[1] << 8 | p[2] << 16 | uint32_t(p[3]) << 24);
        c = t[7][a & 255] ^ t[6][a >> 8 & 255] ^ t[5][a >> 16 & 255] ^ t[4][a >> 24] ^ t[3][p[4]] ^ t[2][p[5]] ^
            t[1][p[6]] ^ t[0][p[7]];
    }
    for (; n; n--) c = t[0][(c ^ *p++) & 255] ^ (c >> 8);
    return c;
}

#ifdef GRADWIRE_X86
// x^n mod P, bit-reflected, as a multiplier for folding: the distances are those of the loop below.
uint32_t power(unsigned n) {
    uint32_t c = 0x80000000u;  // x^0
    while (n--) c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
    return c;
}

// Fold the data, 64 bytes at a time, into 16 bytes with the same CRC. A block of 128 bits that stands d bits before
// another is added to it as (low half * x^(d+64)) + (high half * x^d); "low" comes first in reflected order. The
// product of two reflected numbers is one bit short, hence the exponents are one less and the results align.
struct Folding {
    uint64_t far_low, far_high, near_low, near_high;
    Folding() {
        far_low = uint64_t(power(4 * 128 + 32)) << 1;
        far_high = uint64_t(power(4 * 128 - 32)) << 1;
        near_low = uint64_t(power(128 + 32)) << 1;
        near_high = uint64_t(power(128 - 32)) << 1;
    }
};
const Folding folding;

__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(const uint8_t* p, size_t n, uint32_t c) {
    const __m128i far = _mm_set_epi64x(int64_t(folding.far_high), int64_t(folding.far_low));
    const __m128i near = _mm_set_epi64x(int64_t(folding.near_high), int64_t(folding.near_low));
    auto fold = [](__m128i x, __m128i k, __m128i next) __attribute__((target("pclmul,sse4.1"))) {
        __m128i low = _mm_clmulepi64_si128(x, k, 0x00), high = _mm_clmulepi64_si128(x, k, 0x11);
        return _mm_xor_si128(_mm_xor_si128(low, high), next);
    };
    auto load = [](const uint8_t* q) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(q)); };
    __m128i x[4];
    for (int i = 0; i < 4; i++) x[i] = load(p + 16 * i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(int(c)));
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64)
        for (int i = 0; i < 4; i++) x[i] = fold(x[i], far, load(p + 16 * i));
    for (int i = 1; i < 4; i++) x[0] = fold(x[0], near, x[i]);
    for (; n >= 16; p += 16, n -= 16) x[0] = fold(x[0], near, load(p));
    uint8_t rest[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), x[0]);
    return by_tables(p, n, by_tables(rest, 16, 0));
}

bool can_fold() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}
const bool folds = can_fold();
#endif

#ifdef GRADWIRE_NEON
// Not every arm64 has the instruction, so that compilers want an option for its intrinsic, and not the same one: hence
// the assembly.
uint32_t by_instruction(const uint8_t* p, size_t n, uint32_t c) {
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t eight;
        std::memcpy(&eight, p, 8);
        __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(c) : "r"(eight));
    }
    return by_tables(p, n, c);
}

bool has_instruction() {
#if defined(__linux__)
    constexpr unsigned long kCrc32 = 1 << 7;  // HWCAP_CRC32
    return getauxval(AT_HWCAP) & kCrc32;
#elif defined(__APPLE__)
    return true;  // since the first of their machines
#else
    return false;
#endif
}
const bool instructed = has_instruction();
#endif

// The product of two polynomials mod P, bit-reflected: the highest bit is x^0.
uint32_t product(uint32_t a, uint32_t b) {
    uint32_t c = 0;
    for (; a; a <<= 1) {
        if (a & 0x80000000u) c ^= b;
        b = b & 1 ? 0xedb88320u ^ (b >> 1) : b >> 1;
    }
    return c;
}

}  // namespace

// Appending n bytes multiplies a CRC by x^8n, which is found by squaring.
uint32_t crc32_joined(uint32_t first, uint32_t second, size_t n) {
    uint32_t factor = 0x80000000u, square = 0x00800000u;  // x^0 and x^8
    for (; n; n >>= 1) {
        if (n & 1) factor = product(factor, square);
        square = product(square, square);
    }
    return product(factor, first) ^ second;
}

uint32_t crc32(const uint8_t* data, size_t n, uint32_t value) {
    uint32_t c = ~value;
#ifdef GRADWIRE_X86
    if (folds && n >= 128) return ~by_folding(data, n, c);
#endif
#ifdef GRADWIRE_NEON
    if (instructed) return ~by_instruction(data, n, c);
#endif
    return ~by_tables(data, n, c);
}

}  // namespace gradwire
