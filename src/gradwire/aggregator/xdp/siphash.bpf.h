// SipHash-2-4 (Aumasson and Bernstein 2012) of a packet of data, whose length is always the same. State, block and
// pointer fit the ten registers there are. BPF has no rotation; each takes two shifts and an or.
#pragma once
#include "maps.bpf.h"

#define ROTATE(x, by) ((x) << (by) | (x) >> (64 - (by)))
#define SIP_ROUND                                                                                                      \
    a += b, b = ROTATE(b, 13), b ^= a, a = ROTATE(a, 32), c += d, d = ROTATE(d, 16), d ^= c, a += d,                   \
            d = ROTATE(d, 21), d ^= a, c += b, b = ROTATE(b, 17), b ^= c, c = ROTATE(c, 32)
#define SIP_BLOCK(block)                                                                                               \
    do {                                                                                                               \
        u64 m = (block);                                                                                               \
        d ^= m, SIP_ROUND, SIP_ROUND, a ^= m;                                                                          \
    } while (0)

// Three blocks in front of the code and 168 behind it. A function, since it is used twice.
static __attribute__((noinline)) u64 siphash(const struct packet* packet, u64 key0, u64 key1) {
    const u64* block = (const u64*)packet;
    u64 a = key0 ^ 0x736f6d6570736575, b = key1 ^ 0x646f72616e646f6d;
    u64 c = key0 ^ 0x6c7967656e657261, d = key1 ^ 0x7465646279746573;
    SIP_BLOCK(block[0]);
    SIP_BLOCK(block[1]);
    SIP_BLOCK(block[2]);
#pragma clang loop unroll_count(2)
    for (int i = 4; i < 4 + PACKET_WORDS / 2; i++) SIP_BLOCK(block[i]);
    SIP_BLOCK((u64)((PACKET_CODED_BYTES + 4 * PACKET_WORDS) & 255) << 56);
    c ^= 255;
    SIP_ROUND, SIP_ROUND, SIP_ROUND, SIP_ROUND;
    return a ^ b ^ c ^ d;
}
