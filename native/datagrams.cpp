#include "datagrams.h"

#ifdef __linux__

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

#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace gradwire {

struct Datagrams::Room {
    std::unique_ptr<uint8_t[]> bytes{new uint8_t[kMessages * kMessageRoom]};
    mmsghdr messages[kMessages];
    iovec pieces[kMessages];
    SocketAddress from[kMessages];
    alignas(cmsghdr) char control[kMessages][CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(in6_pktinfo))];
};

namespace {

constexpr int kTrainsAtOnce = kMostWorkers;

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

bool is_full(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS; }

bool is_cut(const msghdr& message) {  // by SendControl::cut, which comes first
    auto* first = CMSG_FIRSTHDR(&message);
    return first && first->cmsg_level == IPPROTO_UDP;
}

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

Datagrams::Datagrams() : room_(new Room) { arrivals_.reserve(kMessages); }

Datagrams::~Datagrams() {
    if (fd_ >= 0) close(fd_);
}

void Datagrams::open(int family) {
    if (fd_ >= 0) throw std::runtime_error("this object has a socket already");
    fd_ = socket(family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd_ < 0) fail("cannot make a UDP socket");
    family_ = family;
    int on = 1, off = 0, discover = IP_PMTUDISC_DONT;
    setsockopt(fd_, IPPROTO_UDP, UDP_GRO, &on, sizeof on);
    setsockopt(fd_, IPPROTO_IP, IP_MTU_DISCOVER, &discover, sizeof discover);  // rather in fragments than not at all
    if (family != AF_INET6) return;
    discover = IPV6_PMTUDISC_DONT;
    setsockopt(fd_, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &discover, sizeof discover);
    setsockopt(fd_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // whatever this system's default is
}

void Datagrams::bind(const SocketAddress& address) {
    open(address.family());
    int on = 1;
    bool v6 = family_ == AF_INET6;
    if (address.is_wildcard() &&
        setsockopt(fd_, v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_RECVPKTINFO : IP_PKTINFO, &on, sizeof on))
        fail("cannot ask for the addresses that packets come to");
    if (::bind(fd_, &address.any, address.length())) fail("cannot bind");
}

void Datagrams::connect(const SocketAddress& address) {
    open(address.family());
    if (::connect(fd_, &address.any, address.length())) fail("cannot connect");
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

SocketAddress Datagrams::own_address() const {
    SocketAddress address;
    socklen_t length = sizeof address;
    if (getsockname(fd_, &address.any, &length)) fail("the socket has no address");
    return address;
}

bool Datagrams::wait(double seconds, bool for_room) const {
    pollfd p{fd_, short(for_room ? POLLIN | POLLOUT : POLLIN), 0};
    return poll(&p, 1, int(std::ceil(std::fmax(0, std::fmin(seconds, 60)) * 1000))) > 0;
}

bool Datagrams::send_one(const void* data, size_t bytes, const Peer* to) {
    iovec piece{const_cast<void*>(data), bytes};
    SendControl control;
    msghdr message;
    fill(message, {&piece, 1, 1, to}, &piece, 1, control);
    for (int tries = 0; tries < 2; tries++) {  // a first call may report that an earlier packet was refused
        if (sendmsg(fd_, &message, MSG_DONTWAIT) >= 0) return true;
        if (is_full(errno)) return false;
    }
    return false;
}

// One message of a train: some of its pieces, its receiver, and the address that it goes out from.
void Datagrams::fill(msghdr& m, const Train& train, iovec* pieces, size_t count, SendControl& control) const {
    m = {};
    m.msg_iov = pieces, m.msg_iovlen = count;
    if (train.to) {
        m.msg_name = const_cast<sockaddr*>(&train.to->address.any), m.msg_namelen = train.to->address.length();
        if (train.to->has_local() && !control.has_source) control.leave_from(train.to->local, family_);
    }
    if (control.length) m.msg_control = control.bytes, m.msg_controllen = control.length;
}

// Messages taken by the kernel or lost on the way out; what is left met a full buffer. Where the kernel refuses to cut
// trains up, this sets segments_ to false, and stops.
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
        } else if (is_cut(messages[done].msg_hdr) &&
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
    SendControl controls[kTrainsAtOnce];
    size_t packets = 0;
    for (size_t at = 0; at < count;) {
        size_t now = count - at < kTrainsAtOnce ? count - at : kTrainsAtOnce;
        for (size_t i = 0; i < now; i++) {
            const Train& train = trains[at + i];
            controls[i].clear();
            if (train.packets > 1) controls[i].cut(kPacketBytes);
            fill(messages[i].msg_hdr, train, train.pieces, train.packets * train.parts, controls[i]);
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
        SendControl control;
        for (size_t i = 0; i < train.packets; i++)
            fill(messages[i].msg_hdr, train, train.pieces + i * train.parts, train.parts, control);
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
        if (m.msg_flags & MSG_TRUNC || m.msg_namelen != r.from[i].length()) continue;
        size_t bytes = r.messages[i].msg_len, segment = bytes;
        Peer from{r.from[i]};
        for (cmsghdr* c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
            if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
                int cut;  // the kernel passes an int
                std::memcpy(&cut, CMSG_DATA(c), sizeof cut);
                if (cut > 0) segment = size_t(cut);
            } else if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
                in_pktinfo to;
                std::memcpy(&to, CMSG_DATA(c), sizeof to);
                from.local = mapped(to.ipi_spec_dst);
            } else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
                in6_pktinfo to;
                std::memcpy(&to, CMSG_DATA(c), sizeof to);
                from.local = to.ipi6_addr;
            }
        }
        arrivals_.push_back({static_cast<const uint8_t*>(r.pieces[i].iov_base), bytes, segment, from});
    }
    return arrivals_;
}

}  // namespace gradwire

#endif
