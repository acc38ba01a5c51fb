// What the XDP program and engine.py share: maps that both read and write, and what lies in them.
#pragma once
#include "kernel_interface.bpf.h"
#include "packet_format.h"

enum { WORKERS = PACKET_MOST_WORKERS, SESSIONS = 64, SLOTS = 16384 }; // as in engine.py
enum { UNKNOWN_EVERY_NS = 1000000 };

struct frame {
    struct ethernet ethernet;
    struct ip ip;
    struct udp udp;
    struct packet packet;
} __attribute__((packed));

// How a worker is reached: worker_routes.py.
struct route {
    u8 mac[6], own_mac[6];
    u32 ip;
    u16 port, unused;
};

struct session {
    u64 key[2];
    u64 all; // a bit for each worker
    u32 number, workers, first_slot, slots;
    struct route routes[WORKERS];
    u64 last_packet_ns[WORKERS];
};

struct bank {
    struct bpf_spin_lock lock;
    u32 session, round, operation;
    u64 in; // a bit for each worker
    u32 words[PACKET_WORDS];
};

struct listener {
    u32 ip;
    u16 port, unused;
    u64 unknown_at;
};

enum counter {
    PACKETS,
    RESULTS,
    RESENT,
    DUPLICATES,
    OLD,
    FORGED,
    MALFORMED,
    UNKNOWN,
    CONTROL,
    BYTES_IN,
    BYTES_OUT,
    COUNTERS
};

struct {
    NUMBER(type, MAP_ARRAY);
    NUMBER(max_entries, 1);
    TYPE(key, u32);
    TYPE(value, struct listener);
} listeners SECTION(".maps");
struct {
    NUMBER(type, MAP_HASH);
    NUMBER(max_entries, SESSIONS);
    TYPE(key, u32);
    TYPE(value, u32);
} numbers SECTION(".maps");
struct {
    NUMBER(type, MAP_ARRAY);
    NUMBER(max_entries, SESSIONS);
    TYPE(key, u32);
    TYPE(value, struct session);
} sessions SECTION(".maps");
struct {
    NUMBER(type, MAP_ARRAY);
    NUMBER(max_entries, 2 * SLOTS);
    TYPE(key, u32);
    TYPE(value, struct bank);
} banks SECTION(".maps");
struct {
    NUMBER(type, MAP_PERCPU_ARRAY);
    NUMBER(max_entries, COUNTERS);
    TYPE(key, u32);
    TYPE(value, u64);
} counts SECTION(".maps");

struct workers_map {
    NUMBER(type, MAP_DEVMAP);
    NUMBER(max_entries, WORKERS);
    NUMBER(key_size, 4);
    NUMBER(value_size, 8);
};
struct {
    NUMBER(type, MAP_ARRAY_OF_MAPS);
    NUMBER(max_entries, SESSIONS);
    NUMBER(key_size, 4);
    struct workers_map* values[];
} broadcasts SECTION(".maps");
