// CRC-32 (as zlib's) in parallel. Checksums without the two inversions are linear: that of a whole is the sum of those
// of its parts, each times x^(8·bytes that follow), in polynomials modulo that of CRC-32.
#pragma once
#include "common.h"

const u32 kPolynomial = 0xedb88320u;  // with its bits reversed: the highest bit is x^0

__device__ __forceinline__ u32 crc_byte(u32 crc, u8 byte) {
    crc ^= byte;
    for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    return crc;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 product = 0;
    for (int k = 0; k < 32; k++) {
        product ^= a & 0x80000000u ? b : 0;
        a <<= 1;
        b = b >> 1 ^ (b & 1 ? kPolynomial : 0);
    }
    return product;
}

// x^(8·2^k): each is the square of the one before.
__constant__ u32 kPowers[40] = {
    0x00800000u, 0x00008000u, 0xedb88320u, 0xb1e6b092u, 0xa06a2517u, 0xed627daeu, 0x88d14467u, 0xd7bbfe6au,
    0xec447f11u, 0x8e7ea170u, 0x6427800eu, 0x4d47bae0u, 0x09fe548fu, 0x83852d0fu, 0x30362f1au, 0x7b5a9cc3u,
    0x31fec169u, 0x9fec022au, 0x6c8dedc4u, 0x15d6874du, 0x5fde7a4eu, 0xbad90e37u, 0x2e4e5eefu, 0x4eaba214u,
    0xa8a472c0u, 0x429a969eu, 0x148d302au, 0xc40ba6d0u, 0xc4e22c3cu, 0x40000000u, 0x20000000u, 0x08000000u,
    0x00800000u, 0x00008000u, 0xedb88320u, 0xb1e6b092u, 0xa06a2517u, 0xed627daeu, 0x88d14467u, 0xd7bbfe6au,
};

// a · x^(8·bytes), by one thread.
__device__ __forceinline__ u32 times_power(u32 a, u64 bytes) {
    for (int k = 0; bytes; k++, bytes >>= 1)
        if (bytes & 1) a = times(a, kPowers[k]);
    return a;
}

// The same by all lanes of a warp, which have the same arguments: one power each, then a tree of products.
__device__ __forceinline__ u32 times_power_by_warp(u32 a, u64 bytes) {
    int lane = threadIdx.x & 31;
    const u32 one = 0x80000000u;
    u32 mine = bytes >> lane & 1 ? kPowers[lane] : one;
    if (lane < 8 && bytes >> (32 + lane) & 1) mine = times(mine, kPowers[32 + lane]);
    if (lane == 31) mine = times(mine, a);
    for (int by = 16; by; by >>= 1) mine = times(mine, __shfl_xor_sync(~0u, mine, by));
    return mine;
}

// The nibble n at place p, times x^4096: by which a thread's checksum grows from one of its words to the next, 128 words
// further on.
__constant__ u32 kNibbles[8 * 16] = {
    0x00000000u, 0x1072db28u, 0x20e5b650u, 0x30976d78u, 0x41cb6ca0u, 0x51b9b788u, 0x612edaf0u, 0x715c01d8u, 0x8396d940u,
    0x93e40268u, 0xa3736f10u, 0xb301b438u, 0xc25db5e0u, 0xd22f6ec8u, 0xe2b803b0u, 0xf2cad898u, 0x00000000u, 0xdc5cb4c1u,
    0x63c86fc3u, 0xbf94db02u, 0xc790df86u, 0x1bcc6b47u, 0xa458b045u, 0x78040484u, 0x5450b94du, 0x880c0d8cu, 0x3798d68eu,
    0xebc4624fu, 0x93c066cbu, 0x4f9cd20au, 0xf0080908u, 0x2c54bdc9u, 0x00000000u, 0xa8a1729au, 0x8a33e375u, 0x229291efu,
    0xcf16c0abu, 0x67b7b231u, 0x452523deu, 0xed845144u, 0x455c8717u, 0xedfdf58du, 0xcf6f6462u, 0x67ce16f8u, 0x8a4a47bcu,
    0x22eb3526u, 0x0079a4c9u, 0xa8d8d653u, 0x00000000u, 0x8ab90e2eu, 0xce031a1du, 0x44ba1433u, 0x4777327bu, 0xcdce3c55u,
    0x89742866u, 0x03cd2648u, 0x8eee64f6u, 0x04576ad8u, 0x40ed7eebu, 0xca5470c5u, 0xc999568du, 0x432058a3u, 0x079a4c90u,
    0x8d2342beu, 0x00000000u, 0xc6adcfadu, 0x562a991bu, 0x908756b6u, 0xac553236u, 0x6af8fd9bu, 0xfa7fab2du, 0x3cd26480u,
    0x83db622du, 0x4576ad80u, 0xd5f1fb36u, 0x135c349bu, 0x2f8e501bu, 0xe9239fb6u, 0x79a4c900u, 0xbf0906adu, 0x00000000u,
    0xdcc7c21bu, 0x62fe8277u, 0xbe39406cu, 0xc5fd04eeu, 0x193ac6f5u, 0xa7038699u, 0x7bc44482u, 0x508b0f9du, 0x8c4ccd86u,
    0x32758deau, 0xeeb24ff1u, 0x95760b73u, 0x49b1c968u, 0xf7888904u, 0x2b4f4b1fu, 0x00000000u, 0xa1161f3au, 0x995d3835u,
    0x384b270fu, 0xe9cb762bu, 0x48dd6911u, 0x70964e1eu, 0xd1805124u, 0x08e7ea17u, 0xa9f1f52du, 0x91bad222u, 0x30accd18u,
    0xe12c9c3cu, 0x403a8306u, 0x7871a409u, 0xd967bb33u, 0x00000000u, 0x11cfd42eu, 0x239fa85cu, 0x32507c72u, 0x473f50b8u,
    0x56f08496u, 0x64a0f8e4u, 0x756f2ccau, 0x8e7ea170u, 0x9fb1755eu, 0xade1092cu, 0xbc2edd02u, 0xc941f1c8u, 0xd88e25e6u,
    0xeade5994u, 0xfb118dbau,
};

// The checksum (without inversions) of some bytes, for all threads. By a block of 128 threads, each of which has every
// 128th word, so that loads are coalesced.
__device__ u32 block_crc(const u8* bytes, u64 length) {
    __shared__ u32 nibbles[8 * 16], sums[4];
    int tid = threadIdx.x;
    __syncthreads();
    nibbles[tid] = kNibbles[tid];
    __syncthreads();
    u64 words = length / 4;
    const u32* from = reinterpret_cast<const u32*>((u64)(bytes) & ~u64(3));
    int skew = int((u64)(bytes) & 3) * 8;
    u32 crc = 0;
    u64 k = tid;
    auto add = [&](u32 word) {
        u32 sum = 0;
#pragma unroll
        for (int p = 0; p < 8; p++) sum ^= nibbles[16 * p + (crc >> 4 * p & 15)];
        crc = sum ^ word;
    };
    auto word_at = [&](u64 i) { return skew ? __funnelshift_r(from[i], from[i + 1], skew) : from[i]; };
    for (; k + 896 < words; k += 1024) {  // eight words are loaded before the first is used
        u32 word[8];
#pragma unroll
        for (int j = 0; j < 8; j++) word[j] = word_at(k + 128 * j);
#pragma unroll
        for (int j = 0; j < 8; j++) add(word[j]);
    }
    for (; k < words; k += 128) add(word_at(k));
    // Behind its last word this thread has k − 128 … words of others, and the tail.
    if (crc) crc = times_power(crc, length - 4 * (k - 128));
    if (!tid) {
        u32 tail = 0;
        for (u64 j = 4 * words; j < length; j++) tail = crc_byte(tail, bytes[j]);
        crc ^= tail;
    }
    for (int by = 16; by; by >>= 1) crc ^= __shfl_xor_sync(~0u, crc, by);
    if (!(tid & 31)) sums[tid >> 5] = crc;
    __syncthreads();
    return sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}
