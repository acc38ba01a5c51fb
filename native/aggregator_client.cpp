#include "aggregator_client.h"

#ifdef __linux__

#include <algorithm>

namespace gradwire {
namespace {

constexpr int kReceiveBuffer = 16 << 20;
constexpr int kSendBuffer = 1 << 20;  // small: a link that is full makes us wait, and queues on the way stay short
constexpr double kBufferOfPacket = 2816;  // bytes of a receive buffer that one takes, about
constexpr double kAskEvery = 0.25;
constexpr int kUnanswered = 3;  // so many ASKs without an answer: nobody is there
constexpr double kFarewell = 2;  // seconds in which results of a worker that has left may still be got

}  // namespace

AggregatorClient::AggregatorClient(const std::string& ip, uint16_t port, const SipKey& shared) : shared_(shared) {
    SocketAddress address = make_address(ip, port);
    socket_.connect(address);
    header_bytes_ = address.header_bytes();
    socket_.set_buffers(kReceiveBuffer, kSendBuffer);
}

void AggregatorClient::send(const std::string& datagram) {
    if (socket_.send_one(datagram.data(), datagram.size(), nullptr)) bytes_sent += datagram.size() + header_bytes_;
}

std::vector<std::string> AggregatorClient::receive(double seconds) {
    std::vector<std::string> found;
    refused_ = false;
    socket_.wait(seconds);
    for (const Arrival& a : socket_.receive(&refused_))
        for (size_t at = 0; at < a.bytes; at += a.segment) {
            size_t bytes = std::min(a.segment, a.bytes - at);
            bytes_received += bytes + header_bytes_;
            found.emplace_back(reinterpret_cast<const char*>(a.data + at), bytes);
        }
    return found;
}

void AggregatorClient::begin(uint32_t session, const SipKey& key, uint16_t worker, uint32_t slots) {
    session_ = session, key_ = key, worker_ = worker, slots_ = slots;
    flights_.assign(slots, {});
    first_ = base_ = next_ = end_ = order_ = latest_ = 0;
    pace_.begin_session(std::min(double(slots), double(socket_.receive_buffer()) / kBufferOfPacket));
    gone_ = false, left_ = PACKET_NOBODY, unanswered_ = 0;
    silences_.clear();
}

const uint8_t* AggregatorClient::body_of(size_t packet, const OperationWords& w) {
    size_t either = w.either_packets(), of_add = packet - either;
    bool is_or = packet < either;
    const uint32_t* words = is_or ? w.either + packet * kWords : w.add + of_add * kWords;
    size_t left = is_or ? w.either_count - packet * kWords : w.add_count - of_add * kWords;
    return left >= kWords ? reinterpret_cast<const uint8_t*>(words) : padded_[is_or];
}

void AggregatorClient::take(size_t packet, const uint8_t* payload, const OperationWords& w) const {
    size_t either = w.either_packets(), of_add = packet - either;
    bool is_or = packet < either;
    uint32_t* out = is_or ? w.either_out + packet * kWords : w.add_out + of_add * kWords;
    size_t left = is_or ? w.either_count - packet * kWords : w.add_count - of_add * kWords;
    std::memcpy(out, payload, 4 * std::min(left, kWords));
}

// Sends at most a train; returns how many packets the socket has taken.
size_t AggregatorClient::send_some(const uint64_t* packets, size_t count, const OperationWords& w) {
    iovec pieces[2 * kTrain];
    ToCode coded[kTrain];
    uint64_t codes[kTrain];
    for (size_t i = 0; i < count; i++) {
        size_t in_operation = packets[i] - first_;
        Header h = make_header(KIND_DATA, session_, uint32_t(packets[i] / slots_), uint16_t(packets[i] % slots_),
                               worker_, in_operation < w.either_packets() ? OPERATION_OR : OPERATION_ADD);
        std::memcpy(headers_[i], &h, sizeof h);
        coded[i] = {headers_[i], body_of(in_operation, w), key_};
        pieces[2 * i] = {headers_[i], kHeaderBytes};
        pieces[2 * i + 1] = {const_cast<uint8_t*>(coded[i].body), kPayloadBytes};
    }
    packet_kernels().codes(coded, count, codes);
    for (size_t i = 0; i < count; i++) std::memcpy(headers_[i] + kCodedHeader, &codes[i], 8);
    Train train{pieces, count, 2, nullptr};
    size_t sent = socket_.send(&train, 1, 0);
    bytes_sent += sent * (kPacketBytes + header_bytes_);
    full_ = sent < count;
    return sent;
}

void AggregatorClient::send_new(const OperationWords& w, double now) {
    full_ = false;
    while (next_ < limit() && !full_) {
        uint64_t packets[kTrain];
        size_t count = std::min<uint64_t>(kTrain, limit() - next_);
        for (size_t i = 0; i < count; i++) packets[i] = next_ + i;
        size_t sent = send_some(packets, count, w);
        for (size_t i = 0; i < sent; i++) flight(next_ + i) = {now, ++order_, 1, false};
        next_ += sent;
    }
}

void AggregatorClient::send_again(std::vector<uint64_t>& packets, const OperationWords& w) {
    for (size_t at = 0; at < packets.size();) {
        size_t sent = send_some(&packets[at], std::min(kTrain, packets.size() - at), w);
        for (size_t i = 0; i < sent; i++) {
            Flight& f = flight(packets[at + i]);
            f.order = ++order_, f.tries = uint16_t(std::min(f.tries + 1, 1000));
        }
        resent += sent;
        at += sent;
        if (!sent) break;  // the timer will come back to it
    }
    packets.clear();
}

void AggregatorClient::receive_all(const OperationWords* w, double now) {
    for (bool more = true; more;) {
        const auto& arrivals = socket_.receive();
        more = arrivals.size() == kMessages;
        for (const Arrival& a : arrivals)
            for (size_t at = 0; at < a.bytes; at += a.segment) {
                size_t bytes = std::min(a.segment, a.bytes - at);
                bytes_received += bytes + header_bytes_;
                consider(a.data + at, bytes, w);
            }
        if (w) settle(*w, now);
    }
}

void AggregatorClient::consider(const uint8_t* packet, size_t bytes, const OperationWords* w) {
    if (bytes < kHeaderBytes) return;
    Header h = read_header(packet);
    if (!is_ours(h) || !reserved_is_zero(h) || h.session != session_) return;
    if (h.kind != KIND_RESULT) return control(packet, bytes, h.kind);
    if (!w || bytes != kPacketBytes || h.worker != PACKET_NOBODY || h.slot >= slots_) return;
    // The only packet of this slot that can be under way.
    uint64_t n = base_ + (h.slot + slots_ - base_ % slots_) % slots_;
    if (n >= next_ || uint32_t(n / slots_) != h.round || flight(n).arrived) return;
    if (h.operation != (n - first_ < w->either_packets() ? OPERATION_OR : OPERATION_ADD)) return;
    candidates_.push_back({n, packet + kHeaderBytes, h.code});
}

// Verifies results, and copies their words to where they belong.
void AggregatorClient::settle(const OperationWords& w, double now) {
    coded_.clear();
    for (const Candidate& c : candidates_) coded_.push_back({c.payload - kHeaderBytes, c.payload, key_});
    codes_.resize(coded_.size());
    packet_kernels().codes(coded_.data(), coded_.size(), codes_.data());
    double nearest = 0;
    size_t taken = 0;
    for (size_t i = 0; i < candidates_.size(); i++) {
        Flight& f = flight(candidates_[i].packet);
        if (codes_[i] != candidates_[i].code) {
            forged++;
            continue;
        }
        if (f.arrived) continue;  // twice in one batch
        take(candidates_[i].packet - first_, candidates_[i].payload, w);
        f.arrived = true;
        taken++;
        if (f.tries == 1) {
            latest_ = std::max(latest_, f.order);
            // What was sent before the first result came may have waited for a worker that was late.
            if (first_result_ && f.sent >= first_result_)
                nearest = nearest ? std::min(nearest, now - f.sent) : now - f.sent;
        }
    }
    candidates_.clear();
    if (!taken) return;
    if (!first_result_) first_result_ = now;
    if (nearest) pace_.measured(nearest);
    pace_.got_results(taken);
    progress_ = timer_ = valid_ = now;
    unanswered_ = 0;
    while (base_ < next_ && flight(base_).arrived) base_++;
}

void AggregatorClient::control(const uint8_t* packet, size_t bytes, uint8_t kind) {
    Header h = read_header(packet);
    size_t payload = bytes - kHeaderBytes;
    if (kind == KIND_GONE && payload == sizeof(packet_gone) && code_of(shared_, packet, bytes) == h.code) {
        packet_gone gone;
        std::memcpy(&gone, packet + kHeaderBytes, sizeof gone);
        if (gone.session == session_) gone_ = true, left_ = gone.worker, valid_ = seconds_now(), unanswered_ = 0;
    } else if (kind == KIND_TELL && payload <= 2 * kMostWorkers && payload % 2 == 0 &&
               code_of(key_, packet, bytes) == h.code) {
        silences_.resize(payload / 2);
        if (payload) std::memcpy(silences_.data(), packet + kHeaderBytes, payload);
        valid_ = seconds_now();
        unanswered_ = 0;
    }
}

// Packets whose results are missing while those of packets sent later have come.
void AggregatorClient::repair_gaps(const OperationWords& w, double now) {
    if (base_ >= next_ || flight(base_).order + Pace::kReordering > latest_) return;
    for (uint64_t n = base_; n < next_; n++) {
        const Flight& f = flight(n);
        if (!f.arrived && f.order + Pace::kReordering <= latest_) again_.push_back(n);
    }
    if (again_.empty()) return;
    pace_.lost_some(now);
    send_again(again_, w);
    timer_ = now;
}

void AggregatorClient::on_silence(const OperationWords& w, double now) {
    timer_ = now;
    size_t most = pace_.send_after_silence();
    for (uint64_t n = base_; n < next_ && again_.size() < most; n++)
        if (!flight(n).arrived) again_.push_back(n);
    send_again(again_, w);
}

void AggregatorClient::send_short(uint8_t kind, size_t zeros) {
    uint8_t packet[kHeaderBytes + kAskBytes] = {};
    size_t bytes = kHeaderBytes + zeros;
    Header h = make_header(kind, session_, 0, 0, worker_, 0);
    std::memcpy(packet, &h, sizeof h);
    h.code = code_of(key_, packet, bytes);
    std::memcpy(packet, &h, sizeof h);
    if (socket_.send_one(packet, bytes, nullptr)) bytes_sent += bytes + header_bytes_;
}

void AggregatorClient::ask() {
    send_short(KIND_ASK, kAskBytes);
    unanswered_++;
}

void AggregatorClient::leave() { send_short(KIND_LEAVE, 0); }

double AggregatorClient::result_age() const { return first_result_ ? seconds_now() - progress_ : -1; }

Outcome AggregatorClient::look_for_end() {
    receive_all(nullptr, 0);
    return gone_ ? Outcome::gone : unanswered_ >= kUnanswered ? Outcome::silent : Outcome::done;
}

Outcome AggregatorClient::run(const OperationWords& w, double timeout, double silence) {
    for (int is_or = 0; is_or < 2; is_or++) {
        size_t count = is_or ? w.either_count : w.add_count, rest = count % kWords;
        std::memset(padded_[is_or], 0, kPayloadBytes);
        if (rest) std::memcpy(padded_[is_or], (is_or ? w.either : w.add) + count - rest, 4 * rest);
    }
    double now = seconds_now();
    first_ = base_ = next_ = end_;
    end_ = first_ + w.packets();
    first_result_ = 0, progress_ = timer_ = valid_ = asked_ = now;
    pace_.begin_operation();
    unanswered_ = 0;
    candidates_.clear();
    while (base_ < end_) {
        if (gone_ && (left_ == PACKET_NOBODY || now - progress_ > kFarewell)) return Outcome::gone;
        if (stop_) return Outcome::stopped;
        if (now - progress_ > timeout) return Outcome::late;
        if (now - valid_ > silence && unanswered_ >= kUnanswered) return Outcome::silent;
        send_new(w, now);
        receive_all(&w, now);
        now = seconds_now();
        repair_gaps(w, now);
        if (base_ == end_) break;
        if (now - timer_ >= pace_.patience()) on_silence(w, now);
        if (now - progress_ > kAskEvery && now - asked_ > kAskEvery) ask(), asked_ = now;
        if (next_ < limit() && !full_) continue;
        socket_.wait(timer_ + pace_.patience() - now, full_);
        now = seconds_now();
    }
    return Outcome::done;
}

}  // namespace gradwire

#endif
