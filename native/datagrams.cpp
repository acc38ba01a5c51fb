#include "datagrams.h"

#ifdef __linux__

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/udp.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "packets.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace gradwire {

struct Datagrams::Room {
    std::unique_ptr<uint8_t[]> bytes{new uint8_t[kMessages * kMessageRoom]};
    mmsghdr messages[kMessages];
    iovec pieces[kMessages];
    sockaddr_in from[kMessages];
    alignas(cmsghdr) char control[kMessages][CMSG_SPACE(sizeof(int))];
};

namespace {

constexpr int kTrainsAtOnce = kMostWorkers;

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

bool is_full(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS; }

void set_one_buffer(int fd, int forced, int plain, int bytes) {
    if (setsockopt(fd, SOL_SOCKET, forced, &bytes, sizeof bytes))
        setsockopt(fd, SOL_SOCKET, plain, &bytes, sizeof bytes);
}

}  // namespace

double seconds_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

sockaddr_in make_address(const std::string& ip, uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    if (inet_pton(AF_INET, ip.c_str(), &address.sin_addr) != 1)
        throw std::invalid_argument("not an IPv4 address: " + ip);
    return address;
}

std::string ip_of(const sockaddr_in& address) {
    char text[INET_ADDRSTRLEN];
    return inet_ntop(AF_INET, &address.sin_addr, text, sizeof text) ? text : "";
}

Datagrams::Datagrams() : room_(new Room) {
    fd_ = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd_ < 0) fail("cannot make a UDP socket");
    int on = 1, discover = IP_PMTUDISC_DONT;
    setsockopt(fd_, IPPROTO_UDP, UDP_GRO, &on, sizeof on);
    setsockopt(fd_, IPPROTO_IP, IP_MTU_DISCOVER, &discover, sizeof discover);  // rather in fragments than not at all
    arrivals_.reserve(kMessages);
}

Datagrams::~Datagrams() { close(fd_); }

void Datagrams::bind(const sockaddr_in& address) {
    if (::bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address)) fail("cannot bind");
}

void Datagrams::connect(const sockaddr_in& address) {
    if (::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address)) fail("cannot connect");
}

void Datagrams::set_buffers(int receive, int send) {
    set_one_buffer(fd_, SO_RCVBUFFORCE, SO_RCVBUF, receive);
    set_one_buffer(fd_, SO_SNDBUFFORCE, SO_SNDBUF, send);
}

int Datagrams::receive_buffer() const {
    int bytes = 0;
    socklen_t length = sizeof bytes;
    getsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &bytes, &length);
    return bytes;
}

sockaddr_in Datagrams::own_address() const {
    sockaddr_in address{};
    socklen_t length = sizeof address;
    if (getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length)) fail("the socket has no address");
    return address;
}

bool Datagrams::wait(double seconds, bool for_room) const {
    pollfd p{fd_, short(for_room ? POLLIN | POLLOUT : POLLIN), 0};
    return poll(&p, 1, int(std::ceil(std::fmax(0, std::fmin(seconds, 60)) * 1000))) > 0;
}

bool Datagrams::send_one(const void* data, size_t bytes, const sockaddr_in* to) {
    for (int tries = 0; tries < 2; tries++) {  // a first call may report that an earlier packet was refused
        if (sendto(fd_, data, bytes, MSG_DONTWAIT, reinterpret_cast<const sockaddr*>(to), to ? sizeof *to : 0) >= 0)
            return true;
        if (is_full(errno)) return false;
    }
    return false;
}

// Messages taken by the kernel or lost on the way out; what is left met a full buffer. Sets segments_ to false, and
// stops, where the kernel refuses to cut trains up.
size_t Datagrams::send_messages(mmsghdr* messages, size_t count, int patience) {
    size_t done = 0;
    while (done < count) {
        int sent = sendmmsg(fd_, messages + done, unsigned(count - done), MSG_DONTWAIT);
        if (sent > 0) {
            done += size_t(sent);
        } else if (errno == EINTR || errno == ECONNREFUSED) {
            continue;  // the refusal is of an earlier packet, and is reported once
        } else if (is_full(errno)) {
            pollfd p{fd_, POLLOUT, 0};
            if (!patience || poll(&p, 1, patience) <= 0) break;
        } else if (messages[done].msg_hdr.msg_control &&
                   (errno == EIO || errno == EINVAL || errno == EOPNOTSUPP || errno == EMSGSIZE)) {
            segments_ = false;
            break;
        } else {
            done++;  // no route, or a firewall: as if it were lost
        }
    }
    return done;
}

size_t Datagrams::send_trains(const Train* trains, size_t count, int patience) {
    mmsghdr messages[kTrainsAtOnce];
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(uint16_t))] = {};
    auto* segment = reinterpret_cast<cmsghdr*>(control);
    segment->cmsg_level = IPPROTO_UDP;
    segment->cmsg_type = UDP_SEGMENT;
    segment->cmsg_len = CMSG_LEN(sizeof(uint16_t));
    uint16_t bytes = kPacketBytes;
    std::memcpy(CMSG_DATA(segment), &bytes, sizeof bytes);
    size_t packets = 0;
    for (size_t at = 0; at < count;) {
        size_t now = count - at < kTrainsAtOnce ? count - at : kTrainsAtOnce;
        for (size_t i = 0; i < now; i++) {
            const Train& train = trains[at + i];
            msghdr& m = messages[i].msg_hdr;
            m = {const_cast<sockaddr_in*>(train.to),
                 train.to ? socklen_t(sizeof *train.to) : 0,
                 train.pieces,
                 train.packets * train.parts,
                 nullptr,
                 0,
                 0};
            if (train.packets > 1) m.msg_control = control, m.msg_controllen = sizeof control;
        }
        size_t done = send_messages(messages, now, patience);
        for (size_t i = 0; i < done; i++) packets += trains[at + i].packets;
        at += done;
        if (done == now) continue;
        return segments_ ? packets : packets + send_packets(trains + at, count - at, patience);
    }
    return packets;
}

size_t Datagrams::send_packets(const Train* trains, size_t count, int patience) {
    mmsghdr messages[kTrain];
    size_t packets = 0;
    for (size_t t = 0; t < count; t++) {
        const Train& train = trains[t];
        for (size_t i = 0; i < train.packets; i++)
            messages[i].msg_hdr = {const_cast<sockaddr_in*>(train.to),
                                   train.to ? socklen_t(sizeof *train.to) : 0,
                                   train.pieces + i * train.parts,
                                   train.parts,
                                   nullptr,
                                   0,
                                   0};
        size_t done = send_messages(messages, train.packets, patience);
        packets += done;
        if (done < train.packets) break;
    }
    return packets;
}

size_t Datagrams::send(const Train* trains, size_t count, int patience) {
    return segments_ ? send_trains(trains, count, patience) : send_packets(trains, count, patience);
}

const std::vector<Arrival>& Datagrams::receive(bool* refused) {
    Room& r = *room_;
    for (size_t i = 0; i < kMessages; i++) {
        r.pieces[i] = {r.bytes.get() + i * kMessageRoom, kMessageRoom};
        r.messages[i].msg_hdr = {&r.from[i], sizeof r.from[i], &r.pieces[i], 1, r.control[i], sizeof r.control[i], 0};
    }
    arrivals_.clear();
    int count = recvmmsg(fd_, r.messages, kMessages, MSG_DONTWAIT, nullptr);
    if (count < 0 && errno == ECONNREFUSED && refused) *refused = true;
    for (int i = 0; i < count; i++) {
        msghdr& m = r.messages[i].msg_hdr;
        if (m.msg_flags & MSG_TRUNC || m.msg_namelen != sizeof(sockaddr_in)) continue;
        size_t bytes = r.messages[i].msg_len, segment = bytes;
        for (cmsghdr* c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
            int cut;  // the kernel passes an int
            if (c->cmsg_level != IPPROTO_UDP || c->cmsg_type != UDP_GRO) continue;
            std::memcpy(&cut, CMSG_DATA(c), sizeof cut);
            if (cut > 0) segment = size_t(cut);
        }
        arrivals_.push_back({static_cast<const uint8_t*>(r.pieces[i].iov_base), bytes, segment, r.from[i]});
    }
    return arrivals_;
}

}  // namespace gradwire

#endif
