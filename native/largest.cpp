// The K largest of M keys without sorting them: the K-th is found by partition, then one pass in order takes what is
// above it, and of its equals as many as are missing.
#include <algorithm>
#include <cstring>
#include <vector>

#include "rows.h"

namespace gradwire {
namespace {

// Unsigned numbers in the order of the keys, with NaN on top.
uint64_t ordered(double key) {
    if (key != key) return UINT64_MAX;
    key += 0.0;  // -0.0 is 0.0
    uint64_t bits;
    std::memcpy(&bits, &key, sizeof bits);
    return bits >> 63 ? ~bits : bits | uint64_t(1) << 63;
}

}  // namespace

void largest(const double* keys, size_t n, size_t count, int64_t* places) {
    if (!count) return;
    std::vector<uint64_t> all(n);
    for (size_t j = 0; j < n; j++) all[j] = ordered(keys[j]);
    std::vector<uint64_t> parted = all;
    const auto last = parted.begin() + std::ptrdiff_t(n - count);
    std::nth_element(parted.begin(), last, parted.end());
    const uint64_t least = *last;
    size_t equals = size_t(std::count(last, parted.end(), least)), found = 0;
    for (size_t j = 0; j < n && found < count; j++) {
        const bool equal = all[j] == least && equals;
        equals -= equal;
        places[found] = int64_t(j);
        found += all[j] > least || equal;
    }
}

}  // namespace gradwire
