// SipHash-2-4 (Aumasson and Bernstein 2012): a keyed code of short messages, here of packets.
//
// One message is a chain of dependent additions and rotations, 1.4 cycles a byte at best, which would be the largest
// part of what an aggregator does. Packets are independent of each other and of equal length, though, so `PacketKernels`
// takes eight at a time, one in each lane of a vector.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gradwire {

struct SipKey {
    uint64_t k0 = 0, k1 = 0;
    static SipKey from_bytes(const uint8_t* bytes) {
        SipKey key;
        std::memcpy(&key, bytes, 16);
        return key;
    }
};

template <class Word>  // uint64_t, or a vector of them
struct SipState {
    Word v0, v1, v2, v3;

    SipState(Word k0, Word k1)
        : v0(k0 ^ 0x736f6d6570736575ull), v1(k1 ^ 0x646f72616e646f6dull), v2(k0 ^ 0x6c7967656e657261ull),
          v3(k1 ^ 0x7465646279746573ull) {}
    template <int bits>
    static Word rotate(Word x) {
        return (x << bits) | (x >> (64 - bits));
    }
    void round() {
        v0 += v1;
        v1 = rotate<13>(v1);
        v1 ^= v0;
        v0 = rotate<32>(v0);
        v2 += v3;
        v3 = rotate<16>(v3);
        v3 ^= v2;
        v0 += v3;
        v3 = rotate<21>(v3);
        v3 ^= v0;
        v2 += v1;
        v1 = rotate<17>(v1);
        v1 ^= v2;
        v2 = rotate<32>(v2);
    }
    void take(Word word) {
        v3 ^= word;
        round();
        round();
        v0 ^= word;
    }
    Word finish(uint64_t bytes) {  // of a message whose length is a multiple of 8: otherwise its rest goes in here, too
        take(Word{} + (bytes << 56));
        v2 ^= Word{} + 0xff;
        round();
        round();
        round();
        round();
        return v0 ^ v1 ^ v2 ^ v3;
    }
};

// Of `head` followed by `body`; the head's length is a multiple of 8.
inline uint64_t siphash(const SipKey& key, const uint8_t* head, size_t head_bytes, const uint8_t* body,
                        size_t body_bytes) {
    SipState<uint64_t> state(key.k0, key.k1);
    uint64_t word;
    for (size_t i = 0; i < head_bytes; i += 8) std::memcpy(&word, head + i, 8), state.take(word);
    size_t whole = body_bytes & ~size_t(7);
    for (size_t i = 0; i < whole; i += 8) std::memcpy(&word, body + i, 8), state.take(word);
    word = 0;
    if (body_bytes > whole) std::memcpy(&word, body + whole, body_bytes - whole);
    state.take(word | uint64_t(head_bytes + body_bytes) << 56);
    state.v2 ^= 0xff;
    for (int i = 0; i < 4; i++) state.round();
    return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

}  // namespace gradwire
