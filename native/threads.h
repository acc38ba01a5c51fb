// Work that is large enough to be shared, by threads that start for it and end by themselves.
//
// They are not kept: a kept thread is not there after fork(), and whoever waits for it waits for ever. Nor are they
// those of an OpenMP, of which a process must not have two; torch's may still be spinning on the other cores when this
// starts, which is why whoever is free takes the next block.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace gradwire {

constexpr size_t kBlockBytes = 1 << 18;
constexpr size_t kWorthAThread = 1 << 21;  // bytes for each, about 100 µs of work; starting one takes 20 µs

// How many of these threads are worth starting for work that reads and writes so many bytes, this one included.
inline size_t threads_for(size_t bytes, int threads) {
    const size_t useful = bytes / kWorthAThread;
    return threads > 1 && useful > 1 ? std::min(useful, size_t(threads)) : 1;
}

// What threads go through to their work. A thread that the system starts too late, since its cores are busy, finds it
// shut and ends: nobody waits for a thread that has done nothing yet.
class Gate {
  public:
    bool enter() {
        std::lock_guard<std::mutex> lock(mutex_);
        inside_ += open_;
        return open_;
    }
    void leave() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!--inside_) empty_.notify_one();
    }
    void shut() {  // and wait for those inside
        std::unique_lock<std::mutex> lock(mutex_);
        open_ = false;
        empty_.wait(lock, [&] { return !inside_; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable empty_;
    size_t inside_ = 0;
    bool open_ = true;
};

// work() on so many threads, of which this is one; returns when all that have begun are through. What one of them does
// not get to do the others must do. On the others work must not throw.
template <class Work>
void on_threads(size_t threads, const Work& work) {
    struct Shutting {
        std::shared_ptr<Gate> gate;
        ~Shutting() { gate->shut(); }
    } shutting{std::make_shared<Gate>()};
    try {
        for (size_t i = 1; i < threads; i++)
            std::thread([gate = shutting.gate, &work] {  // `work` is there as long as the gate is open
                if (!gate->enter()) return;
                work();
                gate->leave();
            })
                .detach();
    } catch (const std::system_error&) {  // no more threads: those that are there do it
    }
    work();
}

// work(first, last) over [0, count), in blocks; `bytes` is what one of them reads.
template <class Work>
void in_blocks(size_t count, size_t bytes, int threads, const Work& work) {
    const size_t useful = threads_for(count * bytes, threads);
    if (useful == 1) {
        if (count) work(size_t(0), count);
        return;
    }
    const size_t block = kBlockBytes / bytes + 1;
    std::atomic<size_t> next{0};
    on_threads(useful, [&] {
        for (size_t first; (first = next.fetch_add(block)) < count;) work(first, std::min(first + block, count));
    });
}

// The same for entries of a tensor: blocks begin at multiples of kAlign, so that vectors stay as aligned as they are.
template <class Work>
void in_aligned_blocks(size_t count, size_t bytes, int threads, const Work& work) {
    constexpr size_t kAlign = 1024;
    in_blocks((count + kAlign - 1) / kAlign, bytes * kAlign, threads,
              [&](size_t first, size_t last) { work(first * kAlign, std::min(last * kAlign, count)); });
}

}  // namespace gradwire
