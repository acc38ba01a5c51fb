// CRC-32 (as zlib's) in parallel. Checksums without the two inversions are linear: that of a whole is the sum of those
// of its parts, each times x^(8·bytes that follow), in polynomials modulo that of CRC-32.
#pragma once
#include "common.h"

const u32 kPolynomial = 0xedb88320u;  // with its bits reversed: the highest bit is x^0
const int kSlice = 64;                // bytes of a thread at a time

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

// a · x^(8·bytes).
__device__ __forceinline__ u32 times_power(u32 a, u64 bytes) {
    for (int k = 0; bytes; k++, bytes >>= 1)
        if (bytes & 1) a = times(a, kPowers[k]);
    return a;
}

// What four bits add to a checksum.
__constant__ u32 kNibbles[16] = {
    0x00000000u, 0x1db71064u, 0x3b6e20c8u, 0x26d930acu, 0x76dc4190u, 0x6b6b51f4u, 0x4db26158u, 0x5005713cu,
    0xedb88320u, 0xf00f9344u, 0xd6d6a3e8u, 0xcb61b38cu, 0x9b64c2b0u, 0x86d3d2d4u, 0xa00ae278u, 0xbdbdf21cu,
};

// The checksum (without inversions) of some bytes, for thread 0. By a block of 128 threads.
__device__ u32 block_crc(const u8* bytes, u64 length) {
    __shared__ u32 nibbles[16], factors[7], sums[4];
    int tid = threadIdx.x;
    __syncthreads();
    if (tid < 16) nibbles[tid] = kNibbles[tid];
    if (tid < 7) factors[tid] = kPowers[6 + tid];  // x^(8·64·2^tid)
    __syncthreads();
    u32 total = 0;
    // Slices are counted from the end, so that all but the first are whole.
    u64 slices = (length + kSlice - 1) / kSlice, tiles = (slices + 127) / 128;
    for (u64 tile = tiles; tile-- > 0;) {
        u64 behind = tile * 128 + (127 - tid);  // slices that follow this thread's
        u32 crc = 0;
        if (behind < slices) {
            u64 end = length - behind * kSlice, begin = end > kSlice ? end - kSlice : 0;
            for (u64 k = begin; k < end; k++) {
                crc ^= bytes[k];
                crc = crc >> 4 ^ nibbles[crc & 15];
                crc = crc >> 4 ^ nibbles[crc & 15];
            }
            int shift = 127 - tid;
            for (int k = 0; k < 7; k++)
                if (shift >> k & 1) crc = times(crc, factors[k]);
        }
        for (int by = 16; by; by >>= 1) crc ^= __shfl_xor_sync(~0u, crc, by);
        if (!(tid & 31)) sums[tid >> 5] = crc;
        __syncthreads();
        if (!tid) total = times(total, kPowers[13]) ^ sums[0] ^ sums[1] ^ sums[2] ^ sums[3];  // x^(8·8192)
        __syncthreads();
    }
    return total;
}
