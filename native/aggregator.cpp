#include "aggregator.h"

#ifdef __linux__

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

namespace gradwire {
namespace {

constexpr int kReceiveBuffer = 32 << 20, kSendBuffer = 16 << 20;
constexpr int kPatience = 20;          // milliseconds a full send buffer is waited for before results count as lost
constexpr size_t kMostControl = 256;   // packets handed on by one poll
constexpr size_t kMostStrangers = 4;   // … of those that belong to no session
constexpr size_t kMostControlBytes = 256;

bool is_for_control_plane(uint8_t kind) {
    return kind == KIND_HELLO || kind == KIND_JOIN || kind == KIND_LEAVE || kind == KIND_ASK;
}

Bank* make_banks(uint32_t slots) {
    void* memory = std::aligned_alloc(64, 2 * size_t(slots) * sizeof(Bank));
    if (!memory) throw std::bad_alloc();
    auto* banks = static_cast<Bank*>(memory);
    for (size_t i = 0; i < 2 * size_t(slots); i++) banks[i].seen = 0, banks[i].round = i & 1;
    return banks;
}

}  // namespace

Aggregator::Aggregator(const std::string& ip, uint16_t port) {
    socket_.bind(make_address(ip, port));
    socket_.set_buffers(kReceiveBuffer, kSendBuffer);
}

void Aggregator::open(uint32_t number, const SipKey& key, std::vector<Peer> workers, uint32_t slots) {
    size_t world = workers.size();
    if (world < 1 || world > kMostWorkers) throw std::invalid_argument("a session has 1 to 64 workers");
    if (slots < 1 || slots > 65536) throw std::invalid_argument("a session has 1 to 65536 slots");
    if (sessions_.count(number)) throw std::invalid_argument("there is a session of this number");
    uint64_t everyone = world == 64 ? ~uint64_t(0) : (uint64_t(1) << world) - 1;
    // Made before it gets its place: where memory is short, there must not be a place without a session.
    std::unique_ptr<ServedSession> made(new ServedSession{number,
                                                          key,
                                                          std::move(workers),
                                                          everyone,
                                                          slots,
                                                          {make_banks(slots), [](Bank* banks) { std::free(banks); }},
                                                          std::vector<double>(world, seconds_now()),
                                                          {},
                                                          {}});
    sessions_[number] = std::move(made);
}

void Aggregator::close(uint32_t number) {
    sessions_.erase(number);
    last_ = nullptr;
}

std::vector<double> Aggregator::silences(uint32_t number) const {
    auto found = sessions_.find(number);
    if (found == sessions_.end()) throw std::invalid_argument("there is no session of this number");
    std::vector<double> seconds = found->second->last_packet;
    double now = seconds_now();
    for (double& t : seconds) t = now - t;
    return seconds;
}

void Aggregator::send(const std::string& datagram, const Peer& to) {
    if (socket_.send_one(datagram.data(), datagram.size(), &to))
        counters_.bytes_out += datagram.size() + to.address.header_bytes();
}

// Serves data until the time is over, or a packet is there for the control plane.
std::vector<Aggregator::Control> Aggregator::poll(double seconds) {
    control_.clear();
    candidates_.clear();  // they are empty, unless memory was short in the middle of the last call
    touched_.clear();
    strangers_ = 0;
    double until = seconds_now() + seconds;
    for (double now = until - seconds; control_.empty(); now = seconds_now()) {
        const std::vector<Arrival>* arrivals = &socket_.receive();
        if (arrivals->empty()) {
            if (now >= until || !socket_.wait(until - now)) break;
            arrivals = &socket_.receive();
            if (arrivals->empty()) break;  // a signal, perhaps
        }
        for (const Arrival& arrival : *arrivals) sort_out(arrival);
        verify_and_apply(now);
        flush();
        if (now >= until) break;
    }
    return std::move(control_);
}

void Aggregator::sort_out(const Arrival& arrival) {
    size_t at = 0;
    do {
        size_t bytes = std::min(arrival.segment, arrival.bytes - at);
        counters_.packets++;
        counters_.bytes_in += bytes + arrival.from.address.header_bytes();
        consider(arrival.data + at, bytes, arrival.from);
        at += std::max<size_t>(bytes, 1);
    } while (at < arrival.bytes);
}

void Aggregator::consider(const uint8_t* packet, size_t bytes, const Peer& from) {
    if (bytes < kHeaderBytes || bytes > kPacketBytes) return void(counters_.malformed++);
    Header header = read_header(packet);
    if (!is_ours(header) || !reserved_is_zero(header)) return void(counters_.malformed++);
    if (header.kind != KIND_DATA) {
        if (bytes > kMostControlBytes || !is_for_control_plane(header.kind)) return void(counters_.malformed++);
        if (control_.size() >= kMostControl) return void(counters_.dropped++);
        counters_.control++;
        control_.emplace_back(std::string(reinterpret_cast<const char*>(packet), bytes), from);
        return;
    }
    if (bytes != kPacketBytes || header.operation > OPERATION_OR) return void(counters_.malformed++);
    if (!last_ || last_->number != header.session) {
        auto found = sessions_.find(header.session);
        if (found == sessions_.end()) {
            counters_.unknown++;
            if (strangers_ < kMostStrangers && control_.size() < kMostControl) {
                strangers_++;
                control_.emplace_back(std::string(reinterpret_cast<const char*>(packet), bytes), from);
            }
            return;
        }
        last_ = found->second.get();
    }
    if (header.slot >= last_->slots || header.worker >= last_->workers.size()) return void(counters_.malformed++);
    candidates_.push_back({last_, header, packet + kHeaderBytes});
}

void Aggregator::verify_and_apply(double now) {
    coded_.clear();
    for (const Candidate& c : candidates_) coded_.push_back({c.words - kHeaderBytes, c.words, c.session->key});
    codes_.resize(coded_.size());
    packet_kernels().codes(coded_.data(), coded_.size(), codes_.data());
    for (size_t i = 0; i < candidates_.size(); i++) {
        const Candidate& c = candidates_[i];
        if (codes_[i] != c.header.code) {
            counters_.forged++;
            continue;
        }
        c.session->last_packet[c.header.worker] = now;
        apply(c);
    }
    candidates_.clear();
}

void Aggregator::apply(const Candidate& packet) {
    ServedSession& s = *packet.session;
    const Header& h = packet.header;
    Bank& bank = s.banks[2 * size_t(h.slot) + (h.round & 1)];
    uint64_t bit = uint64_t(1) << h.worker;
    if (h.round == bank.round + 2) bank.round = h.round, bank.seen = 0;
    if (h.round != bank.round) return void(counters_.old++);
    if (bank.seen & bit) {
        counters_.duplicates++;
        if (bank.seen != s.everyone || s.again.size() >= s.slots) return;
        if (s.complete.empty() && s.again.empty()) touched_.push_back(&s);
        s.again.emplace_back(h.worker, &bank);
        return;
    }
    if (bank.seen && bank.operation != h.operation) return void(counters_.malformed++);
    bool first = !bank.seen;
    bank.seen |= bit;
    if (first) {
        bank.operation = h.operation;
        std::memcpy(bank.words, packet.words, kPayloadBytes);
    } else {
        (h.operation == OPERATION_OR ? packet_kernels().either : packet_kernels().add)(bank.words, packet.words);
    }
    if (bank.seen != s.everyone) return;
    bank.header = make_header(KIND_RESULT, s.number, h.round, h.slot, PACKET_NOBODY, h.operation);
    if (s.complete.empty() && s.again.empty()) touched_.push_back(&s);
    s.complete.push_back(&bank);
}

void Aggregator::flush() {
    for (ServedSession* s : touched_) {
        if (!s->complete.empty()) send_results(*s);
        if (!s->again.empty()) send_again(*s);
        s->complete.clear();
        s->again.clear();
    }
    touched_.clear();
}

void Aggregator::send_results(ServedSession& s) {
    size_t count = s.complete.size(), world = s.workers.size();
    coded_.clear();
    for (Bank* bank : s.complete)
        coded_.push_back({bank->packet(), reinterpret_cast<const uint8_t*>(bank->words), s.key});
    codes_.resize(count);
    packet_kernels().codes(coded_.data(), count, codes_.data());
    for (size_t i = 0; i < count; i++) s.complete[i]->header.code = codes_[i];
    for (size_t at = 0; at < count; at += kTrain) {
        iovec pieces[kTrain];
        Train trains[kMostWorkers];
        size_t packets = std::min(kTrain, count - at);
        for (size_t i = 0; i < packets; i++) pieces[i] = {s.complete[at + i]->packet(), kPacketBytes};
        for (size_t w = 0; w < world; w++) trains[w] = {pieces, packets, 1, &s.workers[w]};
        size_t sent = socket_.send(trains, world, kPatience);
        counters_.dropped += world * packets - sent;
        for (size_t w = 0; w < world; w++) {  // what was not sent are the last ones
            size_t to_worker = std::min(sent, packets);
            counters_.bytes_out += to_worker * (kPacketBytes + s.workers[w].address.header_bytes());
            sent -= to_worker;
        }
    }
    counters_.results += count;
}

void Aggregator::send_again(ServedSession& s) {
    std::stable_sort(s.again.begin(), s.again.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t at = 0; at < s.again.size();) {
        iovec pieces[kTrain];
        size_t packets = 0;
        uint16_t worker = s.again[at].first;
        for (; packets < kTrain && at < s.again.size() && s.again[at].first == worker; at++)
            pieces[packets++] = {s.again[at].second->packet(), kPacketBytes};
        Train train{pieces, packets, 1, &s.workers[worker]};
        size_t sent = socket_.send(&train, 1, kPatience);
        counters_.resent += sent;
        counters_.bytes_out += sent * (kPacketBytes + s.workers[worker].address.header_bytes());
    }
}

}  // namespace gradwire

#endif
