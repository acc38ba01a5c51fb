// What the program needs of the kernel's interface, so that clang alone can compile it, without headers of any kernel.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SECTION(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

enum { XDP_ABORTED, XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT };
enum { MAP_HASH = 1, MAP_ARRAY = 2, MAP_PERCPU_ARRAY = 6, MAP_ARRAY_OF_MAPS = 12, MAP_DEVMAP = 14 };
enum { REDIRECT_BROADCAST = 1 << 3 };

struct xdp_md {
    u32 data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex;
};

struct bpf_spin_lock { // the name tells the verifier what it is
    u32 value;
};

static void* (*map_lookup)(void* map, const void* key) = (void*)1;
static u64 (*ktime_ns)(void) = (void*)5;
static long (*redirect_map)(void* map, u64 key, u64 flags) = (void*)51;
static void (*spin_lock)(struct bpf_spin_lock*) = (void*)93;
static void (*spin_unlock)(struct bpf_spin_lock*) = (void*)94;

// A map as libbpf reads it from the types of a struct's fields.
#define NUMBER(name, value) int (*name)[value]
#define TYPE(name, value) value* name

// On Ethernet and in IP the high byte comes first; this program runs on machines where the low one does.
#define HIGH_FIRST(x) ((u16)__builtin_bswap16(x))

struct ethernet {
    u8 to[6], from[6];
    u16 protocol;
} __attribute__((packed));

struct ip {
    u8 version_and_length, service;
    u16 bytes, id, fragment;
    u8 hops, protocol;
    u16 checksum;
    u32 from, to;
} __attribute__((packed));

struct udp {
    u16 from, to, bytes, checksum;
} __attribute__((packed));
