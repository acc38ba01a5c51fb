// Chunks on threads: see chunks.h.
#include "chunks.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>

#include "kept_room.h"
#include "threads.h"

namespace gradwire {
namespace {

Encoded encode_alone(const Cut& cut, const EncodeChunk& encode, uint8_t* out) {
    std::unique_ptr<uint8_t[]> scratch(new uint8_t[cut.chunk]);
    Encoded all{{}, 0};
    for (size_t i = 0; i < cut.chunks(); i++) {
        const Coded coded = encode(i, out, scratch.get());
        if (coded.entries) all.lengths.push_back(coded.bytes);
        all.entries += coded.entries;
        if (coded.entries < cut.entries(i)) break;
        out += coded.bytes;
    }
    return all;
}

// Memory for chunks on their way.
uint8_t* places(size_t bytes) {
    static thread_local KeptRoom room;
    return room.of(bytes);
}

// The chunks of one tensor, and how far each has come. Threads call `work`; what they share is under one lock, which
// they hold only to look at numbers.
class Line {
  public:
    Line(const Cut& cut, const EncodeChunk& encode, float* memory, size_t threads, uint8_t* out)
        : cut_(cut), encode_(encode), memory_(memory), kept_bytes_(memory ? cut.chunk * sizeof(float) : 0),
          room_(rans_bound(cut.chunk, cut.lanes, 1)), end_(cut.chunks()), to_(out), chunks_(end_) {
        const size_t size = (kept_bytes_ + room_ + cut.chunk + 63) / 64 * 64, count = std::min(2 * threads, end_);
        uint8_t* data = places(count * size);
        for (size_t i = 0; i < count; i++) free_.push_back(data + i * size);
        all_.lengths.reserve(end_);
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return !free_.empty() || next_ >= end_; });
            if (next_ >= end_) return;
            const size_t i = next_++;
            uint8_t* const place = free_.back();
            free_.pop_back();
            lock.unlock();
            if (memory_) std::memcpy(place, memory_ + cut_.start(i), cut_.entries(i) * sizeof(float));
            const Coded coded = encode_(i, place + kept_bytes_, place + kept_bytes_ + room_);
            lock.lock();
            chunks_[i] = {place, coded};
            if (coded.entries < cut_.entries(i)) end_ = std::min(end_, i + 1);
            move_along(lock);
        }
    }

    // When all threads are through.
    Encoded finish() {
        if (memory_)
            for (size_t i = end_; i < chunks_.size(); i++)
                if (chunks_[i].place)
                    std::memcpy(memory_ + cut_.start(i), chunks_[i].place, cut_.entries(i) * sizeof(float));
        return std::move(all_);
    }

  private:
    struct OnItsWay {
        uint8_t* place = nullptr;  // until it is coded
        Coded coded{};
    };

    // Copies chunks to where they belong, as long as the next one is coded.
    void move_along(std::unique_lock<std::mutex>& lock) {
        while (moved_ < end_ && chunks_[moved_].place) {
            const OnItsWay chunk = chunks_[moved_++];
            if (chunk.coded.entries) all_.lengths.push_back(chunk.coded.bytes);
            all_.entries += chunk.coded.entries;
            uint8_t* const to = to_;
            to_ += chunk.coded.bytes;
            lock.unlock();
            std::memcpy(to, chunk.place + kept_bytes_, chunk.coded.bytes);
            lock.lock();
            free_.push_back(chunk.place);
            changed_.notify_one();
        }
        if (next_ >= end_) changed_.notify_all();
    }

    const Cut& cut_;
    const EncodeChunk& encode_;
    float* const memory_;
    const size_t kept_bytes_, room_;  // a place holds memory as it was, bytes, and scratch

    std::mutex mutex_;
    std::condition_variable changed_;
    size_t next_ = 0, moved_ = 0;  // the first that nobody has taken, and moved
    size_t end_;                   // chunks from here on are not wanted
    uint8_t* to_;
    std::vector<OnItsWay> chunks_;
    std::vector<uint8_t*> free_;
    Encoded all_{{}, 0};
};

}  // namespace

size_t Cut::threads_of_use() const {
    return std::min(threads_for(count * entry_bytes, threads), std::max<size_t>(chunks(), 1));
}

Encoded encode_chunks(const Cut& cut, const EncodeChunk& encode, float* memory, uint8_t* out) {
    const size_t threads = cut.threads_of_use();
    // With copies of the memory, two threads take as long as one without.
    if (threads == 1 || (memory && threads == 2)) return encode_alone(cut, encode, out);
    Line line(cut, encode, memory, threads, out);
    on_threads(threads, [&] { line.work(); });
    return line.finish();
}

bool decode_chunks(const RansTable& table, const std::vector<Chunk>& chunks, const Cut& cut, Sink sink) {
    const size_t threads = cut.threads_of_use();
    if (threads == 1) return kernels().rans_decode(table, chunks.data(), chunks.size(), cut.lanes, sink);
    constexpr size_t kTogether = 2;  // decoded side by side: faster than one at a time, and as fast as more
    std::mutex mutex;
    size_t next = 0;
    std::atomic<bool> good{true};
    on_threads(threads, [&] {
        while (good) {
            size_t first, n;
            {
                std::lock_guard<std::mutex> guard(mutex);
                // The last ones one by one, so that all threads end together.
                const size_t left = chunks.size() - next;
                first = next;
                next += n = left > threads ? std::min(left, kTogether) : std::min<size_t>(left, 1);
            }
            if (!n) return;
            if (!kernels().rans_decode(table, chunks.data() + first, n, cut.lanes, sink)) good = false;
        }
    });
    return good;
}

}  // namespace gradwire
