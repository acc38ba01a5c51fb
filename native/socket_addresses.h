// Addresses of UDP sockets, IPv4 and IPv6, and the address of this host that a packet came to.
//
// A socket bound to [::] carries both versions; there, an IPv4 address is the IPv6 address ::ffff:a.b.c.d ("mapped").
// `ip_of` shows such an address in its plain form, and `for_family` maps it again.
#pragma once

#ifdef __linux__

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace gradwire {

union SocketAddress {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;

    SocketAddress() : v6{} {}
    int family() const { return any.sa_family; }
    socklen_t length() const { return family() == AF_INET6 ? sizeof v6 : sizeof v4; }
    uint16_t port() const { return ntohs(family() == AF_INET6 ? v6.sin6_port : v4.sin_port); }
    bool is_wildcard() const;  // 0.0.0.0 or ::
    size_t header_bytes() const;  // of IP and UDP, in each packet to or from here
};

SocketAddress make_address(const std::string& ip, uint16_t port);  // std::invalid_argument where `ip` is none
SocketAddress for_family(const SocketAddress& address, int family);  // an IPv4 address is mapped if that is AF_INET6
std::string ip_of(const SocketAddress& address);

// Who a packet came from, and the address of this host that it came to, which answers have to come from: a worker's
// socket is connected, and drops what comes from elsewhere. IPv4 is mapped; all zero: the socket has only one address.
struct Peer {
    SocketAddress address;
    in6_addr local{};

    bool has_local() const { return !IN6_IS_ADDR_UNSPECIFIED(&local); }
};

in6_addr mapped(const in_addr& address);
in6_addr local_from(const std::string& ip);  // all zero for an empty text; std::invalid_argument
std::string text_of(const in6_addr& local);  // empty for all zero

// Control messages of sendmsg: how the kernel cuts a train up, and the address that it goes out from.
struct SendControl {
    alignas(cmsghdr) char bytes[CMSG_SPACE(sizeof(uint16_t)) + CMSG_SPACE(sizeof(in6_pktinfo))];
    size_t length = 0;
    bool has_source = false;

    void cut(uint16_t segment);
    void leave_from(const in6_addr& local, int family);
    void clear() { length = 0, has_source = false; }

  private:
    void add(int level, int type, const void* value, size_t size);
};

}  // namespace gradwire

#endif
