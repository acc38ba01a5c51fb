// The aggregator's data path in user space: docs/aggregator.md, "Slots".
//
// Traps: nothing of a packet is used before its code was found right, beyond what is needed to find the key; a worker's
// bit is set before its words are added; results point into banks until they are sent, at the end of every batch, so
// nothing may be freed in between.
#pragma once

#ifdef __linux__

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "datagrams.h"
#include "packets.h"

namespace gradwire {

struct Bank {
    uint64_t seen;  // a bit for each worker
    uint32_t round;
    uint32_t operation;
    uint8_t unused[16];
    Header header;  // with the words behind it, the result as it is sent; written when complete
    uint32_t words[kWords];
    uint8_t* packet() { return reinterpret_cast<uint8_t*>(&header); }
};
static_assert(sizeof(Bank) % 64 == 0 && offsetof(Bank, words) == 64, "sums are aligned, and packets whole");

struct ServedSession {
    uint32_t number;
    SipKey key;
    std::vector<Peer> workers;
    uint64_t everyone;
    uint32_t slots;
    std::unique_ptr<Bank[], void (*)(Bank*)> banks;  // of slot s: 2s and 2s + 1
    std::vector<double> last_packet;  // when each worker's last one came
    std::vector<Bank*> complete;  // since the last flush
    std::vector<std::pair<uint16_t, Bank*>> again;  // results for one worker
};

struct Counters {
    uint64_t packets, results, resent, duplicates, old, forged, malformed, unknown, dropped, control, bytes_in,
        bytes_out;
};

class Aggregator {
  public:
    using Control = std::pair<std::string, Peer>;

    Aggregator(const std::string& ip, uint16_t port);
    void open(uint32_t number, const SipKey& key, std::vector<Peer> workers, uint32_t slots);
    void close(uint32_t number);
    std::vector<Control> poll(double seconds);
    void send(const std::string& datagram, const Peer& to);
    std::vector<double> silences(uint32_t number) const;  // seconds since each worker's last packet
    const Counters& counters() const { return counters_; }
    int receive_buffer() const { return socket_.receive_buffer(); }
    SocketAddress address() const { return socket_.own_address(); }
    int family() const { return socket_.family(); }

  private:
    struct Candidate {
        ServedSession* session;
        Header header;
        const uint8_t* words;
    };
    void sort_out(const Arrival& arrival);
    void consider(const uint8_t* packet, size_t bytes, const Peer& from);
    void verify_and_apply(double now);
    void apply(const Candidate& packet);
    void flush();
    void send_results(ServedSession& session);
    void send_again(ServedSession& session);

    Datagrams socket_;
    std::unordered_map<uint32_t, std::unique_ptr<ServedSession>> sessions_;
    ServedSession* last_ = nullptr;  // most packets are of the same session as the one before
    std::vector<Candidate> candidates_;
    std::vector<ToCode> coded_;
    std::vector<uint64_t> codes_;
    std::vector<ServedSession*> touched_;
    std::vector<Control> control_;
    size_t strangers_ = 0;  // packets of unknown sessions handed on by this poll
    Counters counters_{};
};

}  // namespace gradwire

#endif
