// Work that is large enough to be shared, by threads that start for it and end with it.
//
// They are not kept: a kept thread is not there after fork(), and whoever waits for it waits for ever. Nor are they
// those of an OpenMP, of which a process must not have two; torch's may still be spinning on the other cores when this
// starts, which is why whoever is free takes the next block.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
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

// Threads that have ended when it ends, however that is: a thread that nobody joins would end the whole process.
struct JoiningThreads : std::vector<std::thread> {
    ~JoiningThreads() {
        for (std::thread& each : *this) each.join();
    }
};

// work() on so many threads, of which this is one; returns when all are through. On the others work must not throw.
template <class Work>
void on_threads(size_t threads, const Work& work) {
    JoiningThreads started;
    started.reserve(threads - 1);
    try {
        while (started.size() + 1 < threads) started.emplace_back(std::cref(work));
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
