// The aggregator and its client, for Python: both let go of the interpreter's lock while they work.
#include "bindings.h"

#include <nanobind/stl/tuple.h>

#include "aggregator.h"
#include "aggregator_client.h"
#include "packets.h"

namespace gradwire {
namespace {

SipKey key_from(nb::bytes bytes) {
    require(bytes.size() == 16, "a key has 16 bytes");
    return SipKey::from_bytes(reinterpret_cast<const uint8_t*>(bytes.c_str()));
}

}  // namespace

#ifdef __linux__
namespace {

using Address = std::pair<std::string, uint16_t>;
using PeerText = std::tuple<std::string, uint16_t, std::string>;  // with the address of this host that it reaches
using Ints32 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints32Out = Written<int32_t>;

std::string string_from(nb::bytes bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes bytes_from(const std::string& s) { return nb::bytes(s.data(), s.size()); }
PeerText text_from(const Peer& peer) { return {ip_of(peer.address), peer.address.port(), text_of(peer.local)}; }

Peer peer_from(const PeerText& text, int family) {
    const auto& [ip, port, local] = text;
    return {for_family(make_address(ip, port), family), local_from(local)};
}

nb::dict dict_from(const Counters& c) {
    nb::dict d;
    d["packets"] = c.packets, d["results"] = c.results, d["resent"] = c.resent, d["duplicates"] = c.duplicates;
    d["old"] = c.old, d["forged"] = c.forged, d["malformed"] = c.malformed, d["unknown"] = c.unknown;
    d["dropped"] = c.dropped, d["control"] = c.control, d["bytes_in"] = c.bytes_in, d["bytes_out"] = c.bytes_out;
    return d;
}

const char* name_of(Outcome outcome) {
    const char* names[] = {"done", "gone", "silent", "late", "stopped"};
    return names[int(outcome)];
}

const char* run(AggregatorClient& client, Ints32 either, Ints32 add, Ints32Out either_out, Ints32Out add_out,
                double timeout, double silence) {
    require(either.size() == either_out.size() && add.size() == add_out.size(), "results have other sizes");
    OperationWords w{reinterpret_cast<const uint32_t*>(either.data()),
                     reinterpret_cast<const uint32_t*>(add.data()),
                     either.size(),
                     add.size(),
                     reinterpret_cast<uint32_t*>(either_out.data()),
                     reinterpret_cast<uint32_t*>(add_out.data())};
    nb::gil_scoped_release release;
    return name_of(client.run(w, timeout, silence));
}

void bind_engine(nb::module_& m) {
    nb::class_<Aggregator>(m, "Aggregator")
        .def(nb::init<const std::string&, uint16_t>())
        .def("open",
             [](Aggregator& a, uint32_t number, nb::bytes key, const std::vector<PeerText>& workers, uint32_t slots) {
        std::vector<Peer> peers;
        for (const PeerText& text : workers) peers.push_back(peer_from(text, a.family()));
        a.open(number, key_from(key), std::move(peers), slots);
    })
        .def("close", &Aggregator::close)
        .def("poll",
             [](Aggregator& a, double seconds) {
        std::vector<Aggregator::Control> control;
        {
            nb::gil_scoped_release release;
            control = a.poll(seconds);
        }
        nb::list packets;
        for (const auto& [packet, from] : control) packets.append(nb::make_tuple(bytes_from(packet), text_from(from)));
        return packets;
    })
        .def("send", [](Aggregator& a, nb::bytes datagram,
                        const PeerText& to) { a.send(string_from(datagram), peer_from(to, a.family())); })
        .def("silences", &Aggregator::silences)
        .def("receive_buffer", &Aggregator::receive_buffer)
        .def("counters", [](const Aggregator& a) {
        return dict_from(a.counters());
    }).def("address", [](const Aggregator& a) { return Address(ip_of(a.address()), a.address().port()); });
}

void bind_client(nb::module_& m) {
    nb::class_<AggregatorClient>(m, "AggregatorClient")
        .def("__init__", [](AggregatorClient* at, const std::string& ip, uint16_t port,
                            nb::bytes key) { new (at) AggregatorClient(ip, port, key_from(key)); })
        .def("send", [](AggregatorClient& c, nb::bytes datagram) { c.send(string_from(datagram)); })
        .def("receive",
             [](AggregatorClient& c, double seconds) {
        std::vector<std::string> found;
        {
            nb::gil_scoped_release release;
            found = c.receive(seconds);
        }
        nb::list packets;
        for (const auto& packet : found) packets.append(bytes_from(packet));
        return packets;
    })
        .def("refused", &AggregatorClient::refused)
        .def("begin",
             [](AggregatorClient& c, uint32_t session, nb::bytes key, uint16_t worker, uint32_t slots) {
        require(slots >= 1 && slots <= 65536 && worker < kMostWorkers, "bad session");
        c.begin(session, key_from(key), worker, slots);
    })
        .def("run", &run)
        .def("ask", &AggregatorClient::ask)
        .def("leave", &AggregatorClient::leave)
        .def("look_for_end", [](AggregatorClient& c) { return name_of(c.look_for_end()); })
        .def("stop", &AggregatorClient::stop)
        .def("stopped", &AggregatorClient::stopped)
        .def("result_age", &AggregatorClient::result_age)
        .def("silences", &AggregatorClient::silences)
        .def("who_left", &AggregatorClient::who_left)
        .def_prop_ro("bytes_sent", [](const AggregatorClient& c) { return c.bytes_sent.load(); })
        .def_prop_ro("bytes_received", [](const AggregatorClient& c) { return c.bytes_received.load(); })
        .def_prop_ro("resent", [](const AggregatorClient& c) {
        return c.resent.load();
    }).def_prop_ro("forged", [](const AggregatorClient& c) { return c.forged.load(); });
}

}  // namespace
#endif

void bind_aggregator(nb::module_& m) {
    m.def("siphash", [](nb::bytes key, nb::bytes message) {
        auto* bytes = reinterpret_cast<const uint8_t*>(message.c_str());
        return siphash(key_from(key), bytes, 0, bytes, message.size());
    });
    m.def("packet_codes", [](const std::vector<nb::bytes>& keys, const std::vector<nb::bytes>& packets) {
        std::vector<ToCode> coded;
        require(keys.size() == packets.size(), "a key for each packet");
        for (size_t i = 0; i < keys.size(); i++) {
            require(packets[i].size() == kPacketBytes, "packets of data have 1376 bytes");
            auto* at = reinterpret_cast<const uint8_t*>(packets[i].c_str());
            coded.push_back({at, at + kHeaderBytes, key_from(keys[i])});
        }
        std::vector<uint64_t> codes(coded.size());
        packet_kernels().codes(coded.data(), coded.size(), codes.data());
        return codes;
    });
#ifdef __linux__
    bind_engine(m);
    bind_client(m);
#endif
}

}  // namespace gradwire
