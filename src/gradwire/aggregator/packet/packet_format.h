// The packet that workers and the aggregator exchange (docs/aggregator.md, "The packets"): its definition for C and C++.
//
// The XDP program (C for BPF, compiled without any system header) and the native module (C++17) include this file.
// packet_format.py beside it is the same for Python; a test compares every constant and every field of the two.
//
// Numbers are little-endian. Every field lies at a multiple of its own size, so that no compiler adds padding, and the
// structs are the bytes on the wire; the assertions at the end prove it.
#pragma once

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packets are little-endian, and are read and written as they lie in memory"
#endif

#ifdef __cplusplus
#define PACKET_STRUCT struct
#define PACKET_ASSERT(condition) static_assert(condition, #condition)
namespace gradwire {
#else
// The XDP program reads packets where they arrived, behind 42 bytes of other headers, so that nothing is aligned.
#define PACKET_STRUCT struct __attribute__((packed))
#define PACKET_ASSERT(condition) _Static_assert(condition, #condition)
#endif

typedef __UINT8_TYPE__ packet_u8;
typedef __UINT16_TYPE__ packet_u16;
typedef __UINT32_TYPE__ packet_u32;
typedef __UINT64_TYPE__ packet_u64;

enum {
    PACKET_MAGIC = 'G' | 'W' << 8,
    PACKET_VERSION = 1,
    PACKET_HEADER_BYTES = 32,
    PACKET_CODED_BYTES = 24,  // of the header: those in front of the code, which the code covers like the payload
    PACKET_WORDS = 336,  // 32-bit words of a DATA or RESULT packet, always all of them
    PACKET_BYTES = 1376,  // of a whole DATA or RESULT packet; no other packet is longer
    PACKET_NOBODY = 65535,  // a worker number that means no worker
    PACKET_MOST_WORKERS = 64,  // of a job: a bit of a 64-bit word each
    PACKET_KEY_BYTES = 16,
    PACKET_NONCE_BYTES = 16,
    PACKET_COOKIE_BYTES = 8,
    PACKET_JOB_BYTES = 16,  // of a job's name
    PACKET_HELLO_BYTES = 64,  // payload of HELLO: a nonce and zeros, so that no reply is longer than its cause
    PACKET_REASON_BYTES = 48,  // of a refusal, at most
    PACKET_ASK_BYTES = 128,  // payload of ASK: zeros, as long as the longest TELL, for the same reason
    PACKET_IP_AND_UDP_BYTES = 28,  // IPv4 and UDP headers: an interface counts them beside the packet
    PACKET_IPV6_AND_UDP_BYTES = 48  // the same with IPv6
};

enum packet_kind {
    KIND_HELLO = 1,
    KIND_CHALLENGE = 2,
    KIND_JOIN = 3,
    KIND_WAIT = 4,
    KIND_ACCEPT = 5,
    KIND_REFUSE = 6,
    KIND_DATA = 7,
    KIND_RESULT = 8,
    KIND_LEAVE = 9,
    KIND_GONE = 10,
    KIND_ASK = 11,
    KIND_TELL = 12
};

enum packet_operation { OPERATION_ADD = 0, OPERATION_OR = 1 };

PACKET_STRUCT packet_header {
    packet_u16 magic;
    packet_u8 version;
    packet_u8 kind;
    packet_u32 session;  // 0 before there is one
    packet_u32 round;  // of the slot
    packet_u16 slot;
    packet_u16 worker;  // the sender; PACKET_NOBODY if that is the aggregator
    packet_u64 operation;  // of DATA and RESULT, in the first byte; the other seven are zero in all packets
    packet_u64 code;  // SipHash-2-4 of what is in front of it, followed by the payload
};

// DATA and RESULT.
PACKET_STRUCT packet {
    struct packet_header header;
    packet_u32 words[PACKET_WORDS];
};

// Payloads of the control plane. HELLO, REFUSE and TELL vary in length, or are plain: docs/aggregator.md has them.
PACKET_STRUCT packet_challenge {
    packet_u8 nonce[PACKET_NONCE_BYTES];
    packet_u8 cookie[PACKET_COOKIE_BYTES];
};

PACKET_STRUCT packet_join {
    packet_u8 nonce[PACKET_NONCE_BYTES];
    packet_u8 cookie[PACKET_COOKIE_BYTES];
    packet_u8 job[PACKET_JOB_BYTES];
    packet_u16 world;  // workers of the job
    packet_u16 zero;
    packet_u32 slots;  // that the worker wants
    packet_u64 time;  // nanoseconds; a later JOIN of the same worker takes the place of an earlier one
    packet_u64 operations;  // that this worker has done
};

PACKET_STRUCT packet_wait {
    packet_u8 nonce[PACKET_NONCE_BYTES];
    packet_u64 joined;  // a bit for each worker that has joined
};

PACKET_STRUCT packet_accept {
    packet_u8 nonce[PACKET_NONCE_BYTES];
    packet_u8 session_nonce[PACKET_NONCE_BYTES];
    packet_u32 session;
    packet_u32 slots;
    packet_u64 first_operation;
};

PACKET_STRUCT packet_gone {
    packet_u32 session;
    packet_u32 worker;  // that left, or PACKET_NOBODY
};

PACKET_ASSERT(sizeof(struct packet_header) == PACKET_HEADER_BYTES);
PACKET_ASSERT(__builtin_offsetof(struct packet_header, code) == PACKET_CODED_BYTES);
PACKET_ASSERT(sizeof(struct packet) == PACKET_BYTES);
PACKET_ASSERT(sizeof(struct packet_challenge) == 24);
PACKET_ASSERT(sizeof(struct packet_join) == 64);
PACKET_ASSERT(sizeof(struct packet_wait) == 24);
PACKET_ASSERT(sizeof(struct packet_accept) == 48);
PACKET_ASSERT(sizeof(struct packet_gone) == 8);

#ifdef __cplusplus
}  // namespace gradwire
#endif
