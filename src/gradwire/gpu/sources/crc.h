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

// What the nibble n at place p of a word adds to the checksum behind the word.
__constant__ u32 kNibbles[8 * 16] = {
    0x00000000u, 0xb8bc6765u, 0xaa09c88bu, 0x12b5afeeu, 0x8f629757u, 0x37def032u, 0x256b5fdcu, 0x9dd738b9u,
    0xc5b428efu, 0x7d084f8au, 0x6fbde064u, 0xd7018701u, 0x4ad6bfb8u, 0xf26ad8ddu, 0xe0df7733u, 0x58631056u,
    0x00000000u, 0x5019579fu, 0xa032af3eu, 0xf02bf8a1u, 0x9b14583du, 0xcb0d0fa2u, 0x3b26f703u, 0x6b3fa09cu,
    0xed59b63bu, 0xbd40e1a4u, 0x4d6b1905u, 0x1d724e9au, 0x764dee06u, 0x2654b999u, 0xd67f4138u, 0x866616a7u,
    0x00000000u, 0x01c26a37u, 0x0384d46eu, 0x0246be59u, 0x0709a8dcu, 0x06cbc2ebu, 0x048d7cb2u, 0x054f1685u,
    0x0e1351b8u, 0x0fd13b8fu, 0x0d9785d6u, 0x0c55efe1u, 0x091af964u, 0x08d89353u, 0x0a9e2d0au, 0x0b5c473du,
    0x00000000u, 0x1c26a370u, 0x384d46e0u, 0x246be590u, 0x709a8dc0u, 0x6cbc2eb0u, 0x48d7cb20u, 0x54f16850u,
    0xe1351b80u, 0xfd13b8f0u, 0xd9785d60u, 0xc55efe10u, 0x91af9640u, 0x8d893530u, 0xa9e2d0a0u, 0xb5c473d0u,
    0x00000000u, 0x191b3141u, 0x32366282u, 0x2b2d53c3u, 0x646cc504u, 0x7d77f445u, 0x565aa786u, 0x4f4196c7u,
    0xc8d98a08u, 0xd1c2bb49u, 0xfaefe88au, 0xe3f4d9cbu, 0xacb54f0cu, 0xb5ae7e4du, 0x9e832d8eu, 0x87981ccfu,
    0x00000000u, 0x4ac21251u, 0x958424a2u, 0xdf4636f3u, 0xf0794f05u, 0xbabb5d54u, 0x65fd6ba7u, 0x2f3f79f6u,
    0x3b83984bu, 0x71418a1au, 0xae07bce9u, 0xe4c5aeb8u, 0xcbfad74eu, 0x8138c51fu, 0x5e7ef3ecu, 0x14bce1bdu,
    0x00000000u, 0x77073096u, 0xee0e612cu, 0x990951bau, 0x076dc419u, 0x706af48fu, 0xe963a535u, 0x9e6495a3u,
    0x0edb8832u, 0x79dcb8a4u, 0xe0d5e91eu, 0x97d2d988u, 0x09b64c2bu, 0x7eb17cbdu, 0xe7b82d07u, 0x90bf1d91u,
    0x00000000u, 0x1db71064u, 0x3b6e20c8u, 0x26d930acu, 0x76dc4190u, 0x6b6b51f4u, 0x4db26158u, 0x5005713cu,
    0xedb88320u, 0xf00f9344u, 0xd6d6a3e8u, 0xcb61b38cu, 0x9b64c2b0u, 0x86d3d2d4u, 0xa00ae278u, 0xbdbdf21cu,
};

// The checksum (without inversions) of some bytes, for all threads. By a block of 128 threads: one slice each.
__device__ u32 block_crc(const u8* bytes, u64 length) {
    __shared__ u32 nibbles[8 * 16], sums[4];
    int tid = threadIdx.x;
    __syncthreads();
    nibbles[tid] = kNibbles[tid];
    __syncthreads();
    u64 slice = ((length + 127) / 128 + 3) & ~u64(3);
    u64 begin = slice * tid < length ? slice * tid : length, end = begin + slice < length ? begin + slice : length;
    u32 crc = 0;
    u64 address = (u64)(bytes + begin), k = begin;
    int skew = int(address & 3) * 8;
    if (k + 8 <= end) {
        // Words at multiples of four; each word of the slice is put together from two of them.
        const u32* word = reinterpret_cast<const u32*>(address & ~u64(3));
        u32 here = *word++;
        for (; k + 8 <= end; k += 4) {
            u32 next = *word++;
            crc ^= __funnelshift_r(here, next, skew);
            here = next;
            u32 sum = 0;
#pragma unroll
            for (int p = 0; p < 8; p++) sum ^= nibbles[16 * p + (crc >> 4 * p & 15)];
            crc = sum;
        }
    }
    for (; k < end; k++) {
        crc ^= bytes[k];
        crc = crc >> 4 ^ nibbles[16 * 7 + (crc & 15)];
        crc = crc >> 4 ^ nibbles[16 * 7 + (crc & 15)];
    }
    if (crc) crc = times_power(crc, length - end);
    for (int by = 16; by; by >>= 1) crc ^= __shfl_xor_sync(~0u, crc, by);
    if (!(tid & 31)) sums[tid >> 5] = crc;
    __syncthreads();
    return sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}
