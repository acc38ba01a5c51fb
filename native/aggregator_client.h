// A worker's side of the aggregator's data path: docs/aggregator.md, "Slots" and "Lost packets".
#pragma once

#ifdef __linux__

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "datagrams.h"
#include "pace.h"
#include "packets.h"

namespace gradwire {

enum class Outcome { done, gone, silent, late, stopped };

// The words of one operation, as one sequence of packets: those to OR, then those to add.
struct OperationWords {
    const uint32_t *either, *add;
    size_t either_count, add_count;
    uint32_t *either_out, *add_out;

    size_t either_packets() const { return (either_count + kWords - 1) / kWords; }
    size_t packets() const { return either_packets() + (add_count + kWords - 1) / kWords; }
};

class AggregatorClient {
  public:
    AggregatorClient(const std::string& ip, uint16_t port, const SipKey& shared);

    // Packets that are not of a session, while joining. `refused` tells that nobody listens at the address.
    void send(const std::string& datagram);
    std::vector<std::string> receive(double seconds);
    bool refused() const { return refused_; }

    void begin(uint32_t session, const SipKey& key, uint16_t worker, uint32_t slots);  // packets count from 0 again
    Outcome run(const OperationWords& words, double timeout, double silence);
    void ask();
    void leave();
    // Reads what has come between operations: `gone` if the session has ended, `silent` if the last three ASKs have had no
    // answer, else `done`.
    Outcome look_for_end();
    void stop() { stop_ = true; }
    bool stopped() const { return stop_; }
    double result_age() const;  // seconds since the last result of the last operation; -1 if there was none

    // Since `begin`: milliseconds since each worker's last packet, as the aggregator said in its last TELL (empty if it
    // sent none); the worker that left, or 65535.
    const std::vector<uint16_t>& silences() const { return silences_; }
    uint32_t who_left() const { return left_; }

    std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, resent{0}, forged{0};

  private:
    struct Flight {  // a packet under way, by slot
        double sent;
        uint64_t order;  // of sending; a packet sent again gets a new one
        uint16_t tries;
        bool arrived;
    };
    Flight& flight(uint64_t packet) { return flights_[packet % slots_]; }
    const uint8_t* body_of(size_t packet, const OperationWords& words);
    void take(size_t packet, const uint8_t* payload, const OperationWords& words) const;

    size_t send_some(const uint64_t* packets, size_t count, const OperationWords& words);
    void send_new(const OperationWords& words, double now);
    void send_again(std::vector<uint64_t>& packets, const OperationWords& words);
    void receive_all(const OperationWords* words, double now);
    void consider(const uint8_t* packet, size_t bytes, const OperationWords* words);
    void settle(const OperationWords& words, double now);
    void control(const uint8_t* packet, size_t bytes, uint8_t kind);
    void repair_gaps(const OperationWords& words, double now);
    void on_silence(const OperationWords& words, double now);
    void send_short(uint8_t kind, size_t zeros);

    Datagrams socket_;
    size_t header_bytes_;  // of IP and UDP, beside each packet
    SipKey shared_, key_;
    uint32_t session_ = 0, slots_ = 1;
    uint16_t worker_ = 0;
    std::atomic<bool> stop_{false};
    bool refused_ = false, gone_ = false, full_ = false;
    uint32_t left_ = PACKET_NOBODY;
    std::vector<uint16_t> silences_;

    // The operation under way. Packets are counted from the start of the session; `first_` is its first.
    uint64_t first_ = 0, base_ = 0, next_ = 0,
             end_ = 0;  // base_: the first without a result; next_: the first not sent
    std::vector<Flight> flights_;
    uint64_t order_ = 0, latest_ = 0;  // the order of the last packet sent; of the latest whose result came
    uint64_t limit() const { return std::min(end_, base_ + pace_.window()); }
    Pace pace_;
    double first_result_ = 0, progress_ = 0, timer_ = 0, valid_ = 0, asked_ = 0;
    int unanswered_ = 0;

    struct Candidate {
        uint64_t packet;
        const uint8_t* payload;
        uint64_t code;
    };
    std::vector<Candidate> candidates_;
    std::vector<ToCode> coded_;
    std::vector<uint64_t> codes_, again_;
    uint8_t headers_[kTrain][kHeaderBytes];
    uint8_t padded_[2][kPayloadBytes];  // the last packet of each kind, filled up with zeros
};

}  // namespace gradwire

#endif
