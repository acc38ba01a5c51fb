// Passes on threads: see passes.h.
#include "passes.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "threads.h"

namespace gradwire {

uint32_t absmax_bits(const float* x, size_t n, int threads) {
    std::mutex mutex;
    uint32_t most = 0;
    in_aligned_blocks(n, sizeof(float), threads, [&](size_t first, size_t last) {
        const uint32_t found = kernels().absmax_bits(x + first, last - first);
        std::lock_guard<std::mutex> guard(mutex);
        most = std::max(most, found);
    });
    return most;
}

void quantize(const Quantizer& q, const Stream& s, uint8_t* symbols, int threads) {
    in_aligned_blocks(s.count, s.entry_bytes() + 1, threads, [&](size_t first, size_t last) {
        kernels().quantize(q, s.part(first, last - first), symbols + first);
    });
}

void histogram(const uint8_t* symbols, size_t n, int threads, int64_t counts[256]) {
    std::mutex mutex;
    std::fill_n(counts, 256, 0);
    in_aligned_blocks(n, 1, threads, [&](size_t first, size_t last) {
        int64_t found[4][256] = {};  // four, since most symbols are alike: one would wait for itself
        size_t i = first;
        for (; i + 4 <= last; i += 4)
            for (int k = 0; k < 4; k++) found[k][symbols[i + k]]++;
        for (; i < last; i++) found[0][symbols[i]]++;
        std::lock_guard<std::mutex> guard(mutex);
        for (int s = 0; s < 256; s++) counts[s] += found[0][s] + found[1][s] + found[2][s] + found[3][s];
    });
}

uint32_t crc32(const uint8_t* data, size_t n, uint32_t value, int threads) {
    const size_t parts = threads_for(n, threads), size = (n + parts - 1) / parts;
    if (parts == 1) return crc32(data, n, value);
    const auto length = [&](size_t i) { return std::min(size, n - i * size); };
    std::vector<uint32_t> found(parts);
    std::atomic<size_t> next{0};
    on_threads(parts, [&] {
        for (size_t i; (i = next++) < parts;) found[i] = crc32(data + i * size, length(i), i ? 0 : value);
    });
    for (size_t i = 1; i < parts; i++) found[0] = crc32_joined(found[0], found[i], length(i));
    return found[0];
}

// A block begins at a whole byte, as it begins at a multiple of eight symbols.
void pack_bits(const uint8_t* symbols, size_t n, int width, uint8_t* out, int threads) {
    in_aligned_blocks(n, 2, threads, [&](size_t first, size_t last) {
        pack_bits(symbols + first, last - first, width, out + first / 8 * width);
    });
}

bool unpack_bits(const uint8_t* data, size_t n, int width, int limit, uint8_t* symbols, int threads) {
    std::atomic<bool> good{true};
    in_aligned_blocks(n, 2, threads, [&](size_t first, size_t last) {
        if (!unpack_bits(data + first / 8 * width, last - first, width, limit, symbols + first)) good = false;
    });
    return good;
}

}  // namespace gradwire
