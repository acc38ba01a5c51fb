#include "socket_addresses.h"

#ifdef __linux__

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/udp.h>

#include <cstring>
#include <stdexcept>

#include "packets.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

namespace gradwire {

bool SocketAddress::is_wildcard() const {
    return family() == AF_INET6 ? IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr) : v4.sin_addr.s_addr == INADDR_ANY;
}

size_t SocketAddress::header_bytes() const {
    return family() == AF_INET6 && !IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) ? kIpv6AndUdp : kIpAndUdp;
}

SocketAddress make_address(const std::string& ip, uint16_t port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_flags = AI_NUMERICHOST;  // and no name: looking one up may take long
    hints.ai_socktype = SOCK_DGRAM;
    SocketAddress address;
    if (ip.empty() || getaddrinfo(ip.c_str(), nullptr, &hints, &found) || !found)
        throw std::invalid_argument("not an IP address: " + ip);
    std::memcpy(static_cast<void*>(&address), found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    (address.family() == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port) = htons(port);
    return address;
}

SocketAddress for_family(const SocketAddress& address, int family) {
    if (address.family() == family) return address;
    if (family != AF_INET6) throw std::invalid_argument("an IPv6 address, where this socket is one of IPv4");
    SocketAddress out;
    out.v6.sin6_family = AF_INET6;
    out.v6.sin6_port = address.v4.sin_port;
    out.v6.sin6_addr = mapped(address.v4.sin_addr);
    return out;
}

std::string ip_of(const SocketAddress& address) {
    if (address.family() != AF_INET6) return text_of(mapped(address.v4.sin_addr));
    if (IN6_IS_ADDR_V4MAPPED(&address.v6.sin6_addr)) return text_of(address.v6.sin6_addr);
    char text[NI_MAXHOST];  // with the interface of an address that needs one: fe80::1%eth0
    if (getnameinfo(&address.any, address.length(), text, sizeof text, nullptr, 0, NI_NUMERICHOST)) return "";
    return text;
}

in6_addr mapped(const in_addr& address) {
    in6_addr out{};
    out.s6_addr[10] = out.s6_addr[11] = 0xff;
    std::memcpy(out.s6_addr + 12, &address, 4);
    return out;
}

in6_addr local_from(const std::string& ip) {
    in_addr v4;
    in6_addr v6{};
    if (ip.empty()) return v6;
    if (inet_pton(AF_INET, ip.c_str(), &v4) == 1) return mapped(v4);
    if (inet_pton(AF_INET6, ip.c_str(), &v6) != 1) throw std::invalid_argument("not an IP address: " + ip);
    return v6;
}

std::string text_of(const in6_addr& local) {
    char text[INET6_ADDRSTRLEN];
    if (IN6_IS_ADDR_V4MAPPED(&local)) return inet_ntop(AF_INET, local.s6_addr + 12, text, sizeof text) ? text : "";
    if (IN6_IS_ADDR_UNSPECIFIED(&local)) return "";
    return inet_ntop(AF_INET6, &local, text, sizeof text) ? text : "";
}

void SendControl::add(int level, int type, const void* value, size_t size) {
    auto* header = reinterpret_cast<cmsghdr*>(bytes + length);
    std::memset(header, 0, CMSG_SPACE(size));
    header->cmsg_level = level, header->cmsg_type = type, header->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(header), value, size);
    length += CMSG_SPACE(size);
}

void SendControl::cut(uint16_t segment) { add(IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof segment); }

void SendControl::leave_from(const in6_addr& local, int family) {
    has_source = true;
    if (family == AF_INET6) {  // a mapped address, too, on a socket that carries both versions
        in6_pktinfo from{};
        from.ipi6_addr = local;
        add(IPPROTO_IPV6, IPV6_PKTINFO, &from, sizeof from);
    } else {
        in_pktinfo from{};
        std::memcpy(&from.ipi_spec_dst, local.s6_addr + 12, 4);
        add(IPPROTO_IP, IP_PKTINFO, &from, sizeof from);
    }
}

}  // namespace gradwire

#endif
