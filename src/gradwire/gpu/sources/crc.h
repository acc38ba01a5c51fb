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
#pragma unroll
    for (int k = 0; k < 32; k++) {
        product ^= b & u32(int(a << k) >> 31);
        b = b >> 1 ^ (kPolynomial & u32(int(b << 31) >> 31));
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
#pragma unroll 1
    for (int by = 16; by; by >>= 1) mine = times(mine, __shfl_xor_sync(~0u, mine, by));
    return mine;
}

// The nibble n at place p, times x^4096: by which a thread's checksum grows from one of its words to the next, 128 words
// further on.
__device__ const u32 kNibbles[8 * 16] = {
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

// x^(32·(128 − t)) for thread t: what its last word is multiplied by, as its own and those of the threads behind it are
// the last of all.
__device__ const u32 kLast[128] = {
    0x8e7ea170u, 0xeba0f9aeu, 0x72bdf11eu, 0x1cc717f9u, 0x4f534f3eu, 0xe79239cau, 0xd9e0ef74u, 0x8cd6e113u, 0x8ab14358u,
    0xa2cb9784u, 0xbc9ed98eu, 0xa263b6c9u, 0x830613d1u, 0xdb18f902u, 0x4f554704u, 0x568695d9u, 0xb34988bbu, 0x66b34d20u,
    0xb58b1f03u, 0x9a4277eeu, 0x1b6dc110u, 0x7cece3f7u, 0x25bcaae9u, 0x25b80554u, 0x8d8f12afu, 0x7751cae2u, 0xb3223ae9u,
    0xa87e4002u, 0xa0f5c8a8u, 0x22385622u, 0x060de9b8u, 0xfbca92d8u, 0xb72d2b3cu, 0x6989a1f5u, 0x00a4faf7u, 0x3f576891u,
    0xc4c8be0au, 0x4dcdede8u, 0x3cd38aedu, 0x8f354ad1u, 0x894eaf8cu, 0x957960adu, 0x25eab73cu, 0xd6ab402bu, 0x6d17bcf2u,
    0xe389101du, 0x8cd2ef79u, 0x074deae6u, 0x7c69160du, 0x8adc392bu, 0x602c3714u, 0x1958399eu, 0xfda1dcfau, 0x7fb797e1u,
    0x88525a16u, 0xfb91403cu, 0x08229c67u, 0xd552260cu, 0x7e6d1af6u, 0x53a4f44au, 0x76ad8866u, 0xb134d283u, 0xd3dcf3d3u,
    0x8aa13bc5u, 0xec447f11u, 0x99168a18u, 0x13e8221eu, 0xed837b26u, 0x8fd2cd3cu, 0xe23e954eu, 0x47b9ce5au, 0xc8acdd81u,
    0x6b1d2b53u, 0x92f8befeu, 0xd4277e25u, 0xd9ad6d87u, 0x291ea462u, 0xf38a3556u, 0x33fbca3bu, 0xc10ec5e0u, 0x62b6ca4bu,
    0x974ac562u, 0x82e02e2fu, 0xc0b55b0eu, 0x784d2a56u, 0x855712b3u, 0xe172334du, 0x71aa1df0u, 0x0eaee722u, 0xa5abe9f8u,
    0x3969324du, 0xfee3053eu, 0xdb54814cu, 0x1fa0943du, 0x3eb2bd08u, 0xf44779b9u, 0xd7bbfe6au, 0xa53ff440u, 0x00cc3374u,
    0xf5449b3fu, 0x6325605cu, 0xebe7e356u, 0xd777606eu, 0x6f8346e1u, 0xe5b592b8u, 0xc65a272cu, 0xc0b95347u, 0xe3ab4f2au,
    0x4721589fu, 0x5705a9cau, 0x329ecc11u, 0xaa2215eau, 0x88d14467u, 0xe3720acbu, 0xd95efd26u, 0x1ed8f66eu, 0x15141c31u,
    0xba1aca03u, 0xa700e96au, 0x78ed02d5u, 0xed627daeu, 0xad2a31b3u, 0x32b39da3u, 0xba8ccbe8u, 0xa06a2517u, 0x6655004fu,
    0xb1e6b092u, 0xedb88320u,
};

// The checksum (without inversions) of some bytes, for all threads. By a block of 128 threads, each of which has every
// 128th word, counted from the end, so that loads are coalesced and all end alike. Zeros in front change nothing.
__device__ u32 block_crc(const u8* bytes, u64 length) {
    __shared__ u32 nibbles[8 * 16], sums[4];
    int tid = threadIdx.x;
    u32 last = kLast[tid];
    __syncthreads();
    nibbles[tid] = kNibbles[tid];
    __syncthreads();
    int words = int((length + 3) / 4), spare = 4 * words - int(length);  // bytes that the first word lacks
    const u8* start = bytes - spare;
    const u32* from = reinterpret_cast<const u32*>((u64)(start) & ~u64(3));
    int skew = int((u64)(start) & 3) * 8, k = (words + tid) & 127;
    u32 crc = 0;
    auto add = [&](u32 word) {
        u32 sum = 0;
#pragma unroll
        for (int p = 0; p < 8; p++) sum ^= nibbles[16 * p + (crc >> 4 * p & 15)];
        crc = sum ^ word;
    };
    auto word_at = [&](int i) { return skew ? __funnelshift_r(from[i], from[i + 1], skew) : from[i]; };
    if (!k && words) {
        for (int j = spare; j < 4; j++) crc |= u32(start[j]) << 8 * j;
        k += 128;
    }
    for (; k + 896 < words; k += 1024) {  // eight words are loaded before the first is used
        u32 word[8];
#pragma unroll
        for (int j = 0; j < 8; j++) word[j] = word_at(k + 128 * j);
#pragma unroll
        for (int j = 0; j < 8; j++) add(word[j]);
    }
    for (; k < words; k += 128) add(word_at(k));
    crc = times(last, crc);
    for (int by = 16; by; by >>= 1) crc ^= __shfl_xor_sync(~0u, crc, by);
    if (!(tid & 31)) sums[tid >> 5] = crc;
    __syncthreads();
    return sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}

// Copies bytes, and returns their checksum (without inversions) to thread 0. By the first 128 threads of a block, which
// has every thread call it: whole words at their destination, each from two words of the source, so that they are read
// once for both. What is copied may be read four bytes at a time up to the next multiple of four.
__device__ u32 copy_with_crc(u8* to, const u8* from, u64 length) {
    __shared__ u32 nibbles[8 * 16], sums[4];
    int tid = threadIdx.x;
    bool works = tid < 128;
    u32 last = works ? kLast[tid] : 0;
    __syncthreads();
    if (works) nibbles[tid] = kNibbles[tid];
    __syncthreads();
    int lead = int((u64)(to) & 3);  // bytes that the first word lacks
    int words = int((lead + length) / 4), tail = int((lead + length) & 3);
    if (!words) tail = int(length);
    u32 crc = 0;
    if (works) {
        const u8* start = from - lead;
        const u32* source = reinterpret_cast<const u32*>((u64)(start) & ~u64(3));
        u32* target = reinterpret_cast<u32*>(to - lead);
        int skew = int((u64)(start) & 3) * 8, k = (words + tid) & 127;  // the last word is that of thread 127
        auto add = [&](u32 word) {
            u32 sum = 0;
#pragma unroll
            for (int p = 0; p < 8; p++) sum ^= nibbles[16 * p + (crc >> 4 * p & 15)];
            crc = sum ^ word;
        };
        auto word_at = [&](int i) { return skew ? __funnelshift_r(source[i], source[i + 1], skew) : source[i]; };
        if (tid < tail) to[length - tail + tid] = from[length - tail + tid];
        if (!k && words) {
            for (int j = lead; j < 4; j++) {
                to[j - lead] = from[j - lead];
                crc |= u32(from[j - lead]) << 8 * j;
            }
            k += 128;
        }
        for (; k + 896 < words; k += 1024) {  // eight words are loaded before the first is used
            u32 word[8];
#pragma unroll
            for (int j = 0; j < 8; j++) word[j] = word_at(k + 128 * j);
#pragma unroll
            for (int j = 0; j < 8; j++) target[k + 128 * j] = word[j];
#pragma unroll
            for (int j = 0; j < 8; j++) add(word[j]);
        }
        for (; k < words; k += 128) {
            u32 word = word_at(k);
            target[k] = word;
            add(word);
        }
        crc = times(last, crc);
        for (int by = 16; by; by >>= 1) crc ^= __shfl_xor_sync(~0u, crc, by);
        if (!(tid & 31)) sums[tid >> 5] = crc;
    }
    __syncthreads();
    crc = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    for (int j = 0; j < tail && !tid; j++) crc = crc_byte(crc, from[length - tail + j]);
    return crc;
}
