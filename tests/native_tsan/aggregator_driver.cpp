// The aggregator's native code under ThreadSanitizer: one engine, and the workers of several jobs, a thread each.
//
//     scripts/sanitize.sh aggregator
//
// Threads are those of the programs: the engine's, which alone calls it; for each worker one that runs its operations;
// and one that reads its counters and stops it, as the training's thread does. It exits with 1 after a wrong sum, and
// ThreadSanitizer makes that 66 after a data race.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "aggregator.h"
#include "aggregator_client.h"
#include "packet_loops.h"

namespace gradwire {
// The usual choice between instruction sets would need all kernels of the module.
const PacketKernels& packet_kernels() {
    static const PacketKernels portable = Lanes<Vector2>::kernels();
    return portable;
}
}  // namespace gradwire

using namespace gradwire;

namespace {

constexpr uint32_t kJobs = 3, kWorkers = 3, kSlots = 32, kOperations = 30, kSessions = 2;
constexpr size_t kEither = 700, kAdd = 20000;

std::atomic<int> wrong{0}, finished{0};
std::atomic<uint32_t> open_sessions{0};  // of each job, all opened so far

SipKey key_of(uint32_t session) { return {session * 0x9e3779b97f4a7c15ull, ~uint64_t(session)}; }

uint32_t number_of(uint32_t job, uint32_t session) { return 1 + job + kJobs * session; }

uint32_t word(uint32_t job, uint32_t worker, uint32_t operation, size_t i) {
    return uint32_t((job * 7919 + worker * 104729 + operation * 1299709 + i) * 2654435761u);
}

// A HELLO that says which job and worker it is from, in fields that HELLO does not use.
std::string hello(uint32_t job, uint32_t worker) {
    Header h = make_header(KIND_HELLO, job, 0, 0, uint16_t(worker), 0);
    return {reinterpret_cast<const char*>(&h), sizeof h};
}

void serve(Aggregator& engine) {
    std::vector<std::vector<Peer>> peers(kJobs, std::vector<Peer>(kWorkers));
    std::vector<std::vector<bool>> known(kJobs, std::vector<bool>(kWorkers));
    uint32_t count = 0, opened = 0;
    while (finished < int(kJobs * kWorkers)) {
        for (const auto& [packet, from] : engine.poll(0.005)) {
            Header h = read_header(reinterpret_cast<const uint8_t*>(packet.data()));
            if (h.kind != KIND_HELLO || h.session >= kJobs || h.worker >= kWorkers) continue;
            if (!known[h.session][h.worker]) known[h.session][h.worker] = true, count++;
            peers[h.session][h.worker] = from;
            engine.send(packet, from);
        }
        if (count == kJobs * kWorkers && opened < kSessions) {  // the second while the first is being used
            for (uint32_t job = 0; job < kJobs; job++)
                engine.open(number_of(job, opened), key_of(number_of(job, opened)), peers[job], kSlots);
            open_sessions = ++opened;
        }
        for (uint32_t job = 0; job < kJobs && opened; job++) engine.silences(number_of(job, opened - 1));
    }
    for (uint32_t job = 0; job < kJobs; job++)
        for (uint32_t session = 0; session < opened; session++) engine.close(number_of(job, session));
}

void work(AggregatorClient& client, uint32_t job, uint32_t worker) {
    std::vector<uint32_t> either(kEither), add(kAdd), either_out(kEither), add_out(kAdd);
    OperationWords w{either.data(), add.data(), kEither, kAdd, either_out.data(), add_out.data()};
    for (uint32_t session = 0; session < kSessions; session++) {
        while (open_sessions <= session) client.send(hello(job, worker)), client.receive(0.01);
        client.begin(number_of(job, session), key_of(number_of(job, session)), uint16_t(worker), kSlots);
        for (uint32_t operation = 0; operation < kOperations; operation++) {
            for (size_t i = 0; i < kEither; i++) either[i] = word(job, worker, operation, i);
            for (size_t i = 0; i < kAdd; i++) add[i] = word(job, worker, operation, i);
            if (client.run(w, 60, 60) != Outcome::done) wrong++;
            for (size_t i = 0; i < kAdd; i++) {
                uint32_t sum = 0, ored = 0;
                for (uint32_t peer = 0; peer < kWorkers; peer++)
                    sum += word(job, peer, operation, i), ored |= word(job, peer, operation, i);
                if (add_out[i] != sum || (i < kEither && either_out[i] != ored)) wrong++;
            }
            if (operation % 8 == 0) client.ask(), client.look_for_end();
        }
    }
    // An operation that no other worker takes part in, until the watching thread stops it.
    if (worker == 0 && client.run(w, 60, 60) != Outcome::stopped) wrong++;
    client.leave();
    finished++;
}

}  // namespace

int main() {
    Aggregator engine("127.0.0.1", 0);
    std::vector<std::unique_ptr<AggregatorClient>> clients;
    for (uint32_t i = 0; i < kJobs * kWorkers; i++)
        clients.push_back(std::make_unique<AggregatorClient>("127.0.0.1", engine.address().port(), key_of(0)));
    std::thread server(serve, std::ref(engine));
    std::vector<std::thread> workers;
    for (uint32_t i = 0; i < kJobs * kWorkers; i++)
        workers.emplace_back(work, std::ref(*clients[i]), i / kWorkers, i % kWorkers);
    // Each worker is stopped when it has received what its sums take, and some time has passed.
    uint64_t enough = kSessions * kOperations * (kAdd + kEither) * 4, seen = 0;
    for (auto& client : clients) {
        while (client->bytes_received < enough) {
            seen += client->bytes_sent + client->resent + client->forged + client->stopped();
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    for (auto& client : clients) client->stop();
    for (auto& worker : workers) worker.join();
    server.join();
    const Counters& c = engine.counters();
    std::printf("%u workers of %u jobs, %llu packets, %llu sums, %d wrong (%d)\n", kJobs * kWorkers, kJobs,
                (unsigned long long)c.packets, (unsigned long long)c.results, wrong.load(), int(seen > 0));
    return wrong ? 1 : 0;
}
