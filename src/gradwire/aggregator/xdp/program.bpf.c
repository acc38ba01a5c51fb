// The aggregator's data path (docs/aggregator.md) as an XDP program: it runs for every packet before the kernel's own
// network stack sees it.
//
// - `aggregate`, on each interface, takes DATA of open sessions: it checks the code, adds the words to the bank, and
//   turns the packet that completes a bank into the RESULT, which goes to all entries of the session's device map.
//   Everything else goes its ordinary way, control packets to the aggregator's socket.
// - `worker_0`, `worker_1`, … run on the way out, each on its own copy: they write that worker's address into it.
//
// Traps:
// - Packets of different workers arrive on different CPUs at once. A bank is only touched under its lock, and a worker's
//   bit is set in the same hold as its words are added.
// - Reading a packet again under the lock is safe: nobody else can write to it, so the words are those that were checked.
// - User space may close a session while packets are under way. It takes the number away first and waits for a grace
//   period before it gives the place to another session, so what `lookup` returns stays as it is until we return.
// - A bank belongs to the session that it names; that of an earlier session counts as empty. Nobody has to clear banks.
#include "maps.bpf.h"
#include "siphash.bpf.h"

INLINE void count(u32 which, u64 by) {
    u64* counter = map_lookup(&counts, &which);
    if (counter) *counter += by;
}

INLINE int drop(u32 why) {
    count(why, 1);
    return XDP_DROP;
}

INLINE struct session* lookup(u32 number, u32* index) {
    u32* found = map_lookup(&numbers, &number);
    if (!found) return 0;
    *index = *found;
    return map_lookup(&sessions, index);
}

// For all words of a bank's `sum` and a packet's `word`. T is the type they are taken as: u64 takes two at a time.
#define FOR_WORDS(T, statement)                                                                                        \
    do {                                                                                                               \
        T *sum = (T*)bank->words, *word = (T*)packet->words;                                                           \
        _Pragma("clang loop unroll_count(8)") for (int i = 0; i < (int)(4 * PACKET_WORDS / sizeof(T)); i++) statement; \
    } while (0)

enum outcome { ADDED, COMPLETE, AGAIN, NOT_YET, TOO_OLD, ANOTHER_OPERATION };

// Add a checked packet to its bank; with the last one, or one that comes again when all are in, put the sum into it.
// `total` becomes the sum of the sum's words, for the UDP checksum.
INLINE enum outcome add(struct bank* bank, struct packet* packet, struct session* session, u64* total) {
    enum outcome outcome = ADDED;
    u64 both, all_words = 0;
    u64 bit = 1ull << (packet->header.worker & 63);
    u32 round = packet->header.round, operation = packet->header.operation;
    spin_lock(&bank->lock);
    if (bank->session != session->number) {
        bank->session = session->number;
        bank->round = round & 1;
        bank->in = 0;
    }
    if (round == bank->round + 2) {
        bank->round = round;
        bank->in = 0;
    }
    if (round != bank->round)
        outcome = TOO_OLD;
    else if (bank->in & bit)
        outcome = bank->in == session->all ? AGAIN : NOT_YET;
    else if (bank->in && bank->operation != operation)
        outcome = ANOTHER_OPERATION;
    else {
        u64 before = bank->in;
        bank->in = before | bit;
        if (bank->in == session->all) outcome = COMPLETE;
        bank->operation = operation;
        if (!before)
            FOR_WORDS(u64, sum[i] = word[i]);
        else if (operation == OPERATION_OR)
            FOR_WORDS(u64, sum[i] |= word[i]);
        else
            FOR_WORDS(u32, sum[i] += word[i]);
    }
    if (outcome == COMPLETE || outcome == AGAIN)
        FOR_WORDS(u64, (both = sum[i], word[i] = both, all_words += (u32)both + (both >> 32)));
    spin_unlock(&bank->lock);
    *total = all_words;
    return outcome;
}

// Numbers that are equal modulo 65535; Internet checksums are sums in that sense, in either byte order.
INLINE u16 fold(u64 sum) {
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 65535) + (sum >> 16);
    sum = (sum & 65535) + (sum >> 16);
    return (sum & 65535) + (sum >> 16);
}

INLINE u64 sum_of(const void* data, int bytes) {
    u64 sum = 0;
    for (int i = 0; i < bytes / 2; i++) sum += ((const u16*)data)[i];
    return sum;
}

// Put the sum on its way: to one worker, or to all.
INLINE int answer(struct frame* frame, struct session* session, u32 index, u32 worker, int to_all, u64 total) {
    struct packet* packet = &frame->packet;
    packet->header.kind = KIND_RESULT;
    packet->header.worker = PACKET_NOBODY;
    packet->header.code = siphash(packet, session->key[0], session->key[1]);
    frame->ip.hops = 64;
    frame->ip.service = 0;
    frame->udp.from = frame->udp.to;  // the sender's port is written on the way out
    frame->ip.from = frame->ip.to;
    // Workers' kernels hand on results in batches if they have a checksum, must not be fragmented, and have no
    // identification. What is still missing in the checksum is added on the way out.
    frame->ip.id = 0;
    frame->ip.fragment = HIGH_FIRST(0x4000);
    total += sum_of(packet, PACKET_HEADER_BYTES) + sum_of(&frame->ip.from, 4) + frame->udp.from +
             2 * (u32)frame->udp.bytes + HIGH_FIRST(17);
    frame->udp.checksum = fold(total);
    void* workers = map_lookup(&broadcasts, &index);
    if (!workers) return XDP_DROP;
    count(to_all ? RESULTS : RESENT, 1);
    count(BYTES_OUT, (PACKET_IP_AND_UDP_BYTES + sizeof(struct packet)) * (to_all ? session->workers : 1));
    return to_all ? redirect_map(workers, 0, REDIRECT_BROADCAST) : redirect_map(workers, worker, 0);
}

INLINE int take_data(struct frame* frame, void* end, struct session* session, u32 index) {
    struct packet* packet = &frame->packet;
    if ((void*)(frame + 1) > end) return drop(MALFORMED);
    // Without this, clang joins both tests to one for equality, of which the verifier learns nothing.
    asm volatile("" : "+r"(end));
    if ((void*)(frame + 1) < end || frame->ip.bytes != HIGH_FIRST(sizeof *frame - 14) ||
        frame->udp.bytes != HIGH_FIRST(sizeof *frame - 34))
        return drop(MALFORMED);
    u32 worker = packet->header.worker, slot = packet->header.slot;
    if (worker >= session->workers || worker >= WORKERS || slot >= session->slots ||
        packet->header.operation > OPERATION_OR)
        return drop(MALFORMED);
    if (siphash(packet, session->key[0], session->key[1]) != packet->header.code) return drop(FORGED);
    session->last_packet_ns[worker] = ktime_ns();
    u32 bank_index = 2 * (session->first_slot + slot) + (packet->header.round & 1);
    struct bank* bank = map_lookup(&banks, &bank_index);
    if (!bank) return drop(MALFORMED);
    u64 total;
    switch (add(bank, packet, session, &total)) {
        case COMPLETE: return answer(frame, session, index, worker, 1, total);
        case AGAIN: count(DUPLICATES, 1); return answer(frame, session, index, worker, 0, total);
        case NOT_YET: return drop(DUPLICATES);
        case TOO_OLD: return drop(OLD);
        case ANOTHER_OPERATION: return drop(MALFORMED);
        default: return XDP_DROP;
    }
}

SECTION("xdp") int aggregate(struct xdp_md* context) {
    struct frame* frame = (void*)(long)context->data;
    void* end = (void*)(long)context->data_end;
    u32 zero = 0, index;
    struct listener* listener = map_lookup(&listeners, &zero);
    if (!listener || (void*)&frame->packet > end || frame->ethernet.protocol != HIGH_FIRST(0x0800) ||
        frame->ip.version_and_length != 0x45 || frame->ip.protocol != 17 || frame->ip.to != listener->ip ||
        frame->udp.to != listener->port || frame->ip.fragment & HIGH_FIRST(0x3fff))
        return XDP_PASS;  // of fragments, the kernel makes whole packets for the socket
    count(PACKETS, 1);
    count(BYTES_IN, end - (void*)&frame->ip);
    struct packet* packet = &frame->packet;
    if ((void*)packet->words > end || packet->header.magic != PACKET_MAGIC ||
        packet->header.version != PACKET_VERSION || packet->header.kind < KIND_HELLO || packet->header.kind > KIND_TELL)
        return drop(MALFORMED);
    if (packet->header.kind != KIND_DATA) {
        count(CONTROL, 1);
        return XDP_PASS;
    }
    struct session* session = lookup(packet->header.session, &index);
    if (session) return take_data(frame, end, session, index);
    // The control plane tells the sender that its session is gone. A flood shall not keep it from anything else.
    u64 now = ktime_ns(), before = listener->unknown_at;
    count(UNKNOWN, 1);
    if (now - before < UNKNOWN_EVERY_NS) return XDP_DROP;
    listener->unknown_at = now;
    return XDP_PASS;
}

INLINE int to_worker(struct xdp_md* context, u32 worker) {
    struct frame* frame = (void*)(long)context->data;
    void* end = (void*)(long)context->data_end;
    u32 index;
    if ((void*)frame->packet.words > end) return XDP_DROP;
    struct session* session = lookup(frame->packet.header.session, &index);
    if (!session) return XDP_DROP;
    struct route* route = &session->routes[worker];
    __builtin_memcpy(frame->ethernet.to, route->mac, 6);
    __builtin_memcpy(frame->ethernet.from, route->own_mac, 6);
    frame->ip.to = route->ip;
    frame->udp.to = route->port;
    u16 checksum = ~fold(frame->udp.checksum + sum_of(&frame->ip.to, 4) + frame->udp.to);
    frame->udp.checksum = checksum ? checksum : 65535;  // 0 would say that there is none
    frame->ip.checksum = 0;
    frame->ip.checksum = ~fold(sum_of(&frame->ip, 20));
    return XDP_PASS;
}

// The way out does not tell a program which entry of the map it is there for, so each worker has its own.
// clang-format off
#define ONE(n) SECTION("xdp/devmap") int worker_##n(struct xdp_md* context) { return to_worker(context, n); }
#define EIGHT(t) ONE(0##t##0) ONE(0##t##1) ONE(0##t##2) ONE(0##t##3) ONE(0##t##4) ONE(0##t##5) ONE(0##t##6) ONE(0##t##7)
EIGHT(0) EIGHT(1) EIGHT(2) EIGHT(3) EIGHT(4) EIGHT(5) EIGHT(6) EIGHT(7)

char licence[] SECTION("license") = "Apache-2.0";
