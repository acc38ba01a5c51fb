// Packets, and what the program and xdp.py share: maps that both read and write.
#pragma once
#include "kernel_interface.bpf.h"

enum { WORDS = 336, WORKERS = 64, SESSIONS = 64, SLOTS = 16384 }; // as in xdp.py
enum { KIND_DATA = 7, KIND_RESULT = 8, KINDS = 12, ADD = 0, OR = 1 };
enum { FROM_NOBODY = 65535, UNKNOWN_EVERY_NS = 1000000 };

struct message {
    u16 magic;
    u8 version, kind;
    u32 session, round;
    u16 slot, worker;
    u64 operation; // one byte, and seven zeros
    u64 code;
    u32 words[WORDS];
} __attribute__((packed));

struct frame {
    struct ethernet ethernet;
    struct ip ip;
    struct udp udp;
    struct message message;
} __attribute__((packed));

struct place {
    u8 mac[6], own_mac[6];
    u32 ip;
    u16 port, unused;
};

struct session {
    u64 key[2];
    u64 all; // a bit for each worker
    u32 number, workers, first_slot, slots;
    struct place places[WORKERS];
    u64 heard[WORKERS];
};

struct bank {
    struct bpf_spin_lock lock;
    u32 session, round, operation;
    u64 in; // a bit for each worker
    u32 words[WORDS];
};

struct listener {
    u32 ip;
    u16 port, unused;
    u64 unknown_at;
};

enum counter { PACKETS, RESULTS, RESENT, DUPLICATES, OLD, FORGED, MALFORMED, UNKNOWN, CONTROL, BYTES_IN, BYTES_OUT, COUNTERS };
enum { IP_AND_UDP = 28 }; // bytes count with these headers

struct { NUMBER(type, MAP_ARRAY); NUMBER(max_entries, 1); TYPE(key, u32); TYPE(value, struct listener); }
    listeners SECTION(".maps");
struct { NUMBER(type, MAP_HASH); NUMBER(max_entries, SESSIONS); TYPE(key, u32); TYPE(value, u32); }
    numbers SECTION(".maps");
struct { NUMBER(type, MAP_ARRAY); NUMBER(max_entries, SESSIONS); TYPE(key, u32); TYPE(value, struct session); }
    sessions SECTION(".maps");
struct { NUMBER(type, MAP_ARRAY); NUMBER(max_entries, 2 * SLOTS); TYPE(key, u32); TYPE(value, struct bank); }
    banks SECTION(".maps");
struct { NUMBER(type, MAP_PERCPU_ARRAY); NUMBER(max_entries, COUNTERS); TYPE(key, u32); TYPE(value, u64); }
    counts SECTION(".maps");

struct workers_map { NUMBER(type, MAP_DEVMAP); NUMBER(max_entries, WORKERS); NUMBER(key_size, 4); NUMBER(value_size, 8); };
struct { NUMBER(type, MAP_ARRAY_OF_MAPS); NUMBER(max_entries, SESSIONS); NUMBER(key_size, 4);
         struct workers_map *values[]; } broadcasts SECTION(".maps");
