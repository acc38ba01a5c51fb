// The packets of docs/aggregator.md: sizes, kinds, and the message code over many packets at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "siphash.h"

namespace gradwire {

constexpr size_t kHeaderBytes = 32, kCodedHeader = 24, kWords = 336, kPayloadBytes = 4 * kWords;
constexpr size_t kPacketBytes = kHeaderBytes + kPayloadBytes;
constexpr size_t kIpAndUdp = 28;  // bytes of IPv4 and UDP headers: what an interface counts beside the packet
constexpr uint32_t kMagicVersion = 'G' | 'W' << 8 | 1 << 16;
constexpr uint16_t kNobody = 65535;
constexpr int kMostWorkers = 64;
static_assert(kPacketBytes == 1376, "what docs/aggregator.md says");

enum Kind : uint8_t { kHello = 1, kJoin = 3, kData = 7, kResult = 8, kLeave = 9, kGone = 10, kAsk = 11, kTell = 12 };
enum Adding : uint8_t { kAdd = 0, kOr = 1 };

// Loads and stores are of the machine's order: this is for little-endian machines (checked where it is compiled).
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packets are little-endian");
struct Header {
    uint32_t magic_version_kind;  // the kind is the last byte
    uint32_t session, round;
    uint16_t slot, worker;
    uint8_t adding, zeros[7];
    uint64_t code;

    uint8_t kind() const { return uint8_t(magic_version_kind >> 24); }
    bool is_ours() const { return (magic_version_kind & 0xffffff) == kMagicVersion; }
    bool reserved_is_zero() const {
        uint64_t word;
        std::memcpy(&word, &adding, 8);
        return word >> 8 == 0;
    }
};
static_assert(sizeof(Header) == kHeaderBytes, "packed as it travels");

inline Header read_header(const uint8_t* packet) {
    Header h;
    std::memcpy(&h, packet, sizeof h);
    return h;
}

inline Header make_header(uint8_t kind, uint32_t session, uint32_t round, uint16_t slot, uint16_t worker, uint8_t adding) {
    return {kMagicVersion | uint32_t(kind) << 24, session, round, slot, worker, adding, {}, 0};
}

// The code of any packet: bytes 0 to 23, then the payload.
inline uint64_t code_of(const SipKey& key, const uint8_t* packet, size_t bytes) {
    return siphash(key, packet, kCodedHeader, packet + kHeaderBytes, bytes - kHeaderBytes);
}

}  // namespace gradwire
