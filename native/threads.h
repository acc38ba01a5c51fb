// Work that is large enough to be shared, by threads that start for it and end with it.
//
// They are not kept: a kept thread is not there after fork(), and whoever waits for it waits for ever. Nor are they
// those of an OpenMP, of which a process must not have two; torch's may still be spinning on the other cores when this
// starts, which is why whoever is free takes the next block.
#pragma once

#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace gradwire {

constexpr size_t kBlockBytes = 1 << 18;
constexpr size_t kWorthAThread = 1 << 21;  // bytes for each, about 100 µs of work; starting one takes 20 µs

// work(first, last) over [0, count), in blocks; `bytes` is what one of them reads.
template <class Work>
void in_blocks(size_t count, size_t bytes, int threads, const Work& work) {
    const size_t useful = count * bytes / kWorthAThread;
    const size_t helpers = threads > 1 && useful > 1 ? (useful < size_t(threads) ? useful : size_t(threads)) - 1 : 0;
    if (!helpers) {
        if (count) work(size_t(0), count);
        return;
    }
    const size_t block = kBlockBytes / bytes + 1;
    std::atomic<size_t> next{0};
    const auto take_blocks = [&] {
        for (size_t first; (first = next.fetch_add(block)) < count;)
            work(first, first + block < count ? first + block : count);
    };
    std::vector<std::thread> started;
    try {
        for (size_t i = 0; i < helpers; i++) started.emplace_back(take_blocks);
    } catch (const std::system_error&) {  // no more threads: those that are there do it
    }
    take_blocks();
    for (std::thread& each : started) each.join();
}

}  // namespace gradwire
