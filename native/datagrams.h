// UDP sockets that send and receive trains of packets: many in one call, and where the kernel can do it (UDP_SEGMENT,
// UDP_GRO) many in one pass through its stack, which is most of what a packet costs.
//
// What the kernel cannot do is found out when it is tried, and done in the plain way from then on.
#pragma once

#ifdef __linux__

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "socket_addresses.h"

namespace gradwire {

constexpr size_t kTrain = 47;      // packets of 1376 bytes that fit into one datagram's 65,507 bytes
constexpr size_t kMessages = 16;   // received in one call
constexpr size_t kMessageRoom = 65536;

double seconds_now();  // of a clock that never goes back

// Packets of equal length for one receiver: `parts` pieces of memory each, one after the other in `pieces`.
struct Train {
    iovec* pieces;
    size_t packets, parts;
    const Peer* to;  // nullptr: whom the socket is connected to
};

// One or more packets that came together from one sender: all are `segment` bytes long but the last.
struct Arrival {
    const uint8_t* data;
    size_t bytes, segment;
    Peer from;
};

class Datagrams {
  public:
    Datagrams();
    ~Datagrams();
    Datagrams(const Datagrams&) = delete;

    // Either makes the socket, and throws std::runtime_error if it cannot. One bound to 0.0.0.0 or [::] notes of every
    // packet which address of this host it came to (`Peer`); [::] takes IPv4, too.
    void bind(const SocketAddress& address);
    void connect(const SocketAddress& address);
    void set_buffers(int receive, int send);  // as near as the system allows
    int receive_buffer() const;  // bytes, as the kernel counts them
    SocketAddress own_address() const;
    int family() const { return family_; }

    // Packets sent, all of them but where the socket's buffer is full (a train that is a datagram goes whole or not at
    // all). Waits for room for at most `patience` milliseconds each time.
    size_t send(const Train* trains, size_t count, int patience);
    bool send_one(const void* data, size_t bytes, const Peer* to);

    // What has arrived, without waiting; valid until the next call. `refused`: the peer's machine said that nobody
    // listens there.
    const std::vector<Arrival>& receive(bool* refused = nullptr);
    // False after `seconds` in which nothing came (and, where asked for, no room to send).
    bool wait(double seconds, bool for_room = false) const;

  private:
    void open(int family);
    void fill(msghdr& message, const Train& train, iovec* pieces, size_t count, SendControl& control) const;
    size_t send_trains(const Train* trains, size_t count, int patience);
    size_t send_packets(const Train* trains, size_t count, int patience);
    size_t send_messages(mmsghdr* messages, size_t count, int patience);

    int fd_ = -1, family_ = 0;
    bool segments_ = true;  // the kernel cuts trains up
    struct Room;
    std::unique_ptr<Room> room_;
    std::vector<Arrival> arrivals_;
};

}  // namespace gradwire

#endif
