// What the native module does with packets (their format is that of packet_format.h): headers, and the message code of
// many packets at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "packet_format.h"
#include "siphash.h"

namespace gradwire {

// The constants of packet_format.h as sizes: those of an enum are ints, which std::min and others do not mix with sizes.
constexpr size_t kHeaderBytes = PACKET_HEADER_BYTES, kCodedHeader = PACKET_CODED_BYTES, kWords = PACKET_WORDS;
constexpr size_t kPacketBytes = PACKET_BYTES, kPayloadBytes = kPacketBytes - kHeaderBytes;
constexpr size_t kIpAndUdp = PACKET_IP_AND_UDP_BYTES, kIpv6AndUdp = PACKET_IPV6_AND_UDP_BYTES;
constexpr size_t kMostWorkers = PACKET_MOST_WORKERS, kAskBytes = PACKET_ASK_BYTES;

using Header = packet_header;

inline bool is_ours(const Header& h) { return h.magic == PACKET_MAGIC && h.version == PACKET_VERSION; }
inline bool reserved_is_zero(const Header& h) { return h.operation >> 8 == 0; }

inline Header read_header(const uint8_t* packet) {
    Header h;
    std::memcpy(&h, packet, sizeof h);
    return h;
}

inline Header make_header(uint8_t kind, uint32_t session, uint32_t round, uint16_t slot, uint16_t worker,
                          uint64_t operation) {
    return {PACKET_MAGIC, PACKET_VERSION, kind, session, round, slot, worker, operation, 0};
}

// The code of any packet: bytes 0 to 23, then the payload.
inline uint64_t code_of(const SipKey& key, const uint8_t* packet, size_t bytes) {
    return siphash(key, packet, kCodedHeader, packet + kHeaderBytes, bytes - kHeaderBytes);
}

// A packet of data whose code is wanted: the coded part of its header, and its words, which need not lie behind it.
struct ToCode {
    const uint8_t *head, *body;
    SipKey key;
};

// What is done to every packet, once for each instruction set.
struct PacketKernels {
    void (*codes)(const ToCode* packets, size_t count, uint64_t* out);
    void (*add)(uint32_t* sum, const uint8_t* words);  // kWords of them
    void (*either)(uint32_t* sum, const uint8_t* words);
};

const PacketKernels& packet_kernels();  // the ones that belong to kernels()
extern const PacketKernels avx2_packets, avx512_packets;

}  // namespace gradwire
