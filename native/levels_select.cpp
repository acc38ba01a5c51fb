// Selection by counting: a range is divided into eight parts of the same width, one pass counts the entries of each, and
// one takes those of the part that the rank is in. Some three times that leave so few that all are compared.
//
// Traps:
// - Parts are whatever an instruction set makes of a division in fp32: only their order counts. So ends of the range need
//   not be those of its entries either; what is beyond them belongs to the outer parts.
// - Where most entries are in one part, the next range is that of its own extremes, which also tell if all are equal
//   (zeros). Entries that differ so much that this does not help either are left to the standard library.
#include "levels_select.h"

#include <algorithm>

namespace gradwire {
namespace {

constexpr int kTries = 8;  // at entries of which most are in one part
constexpr float kWhole = float(kParts);

}  // namespace

float select(const LevelKernels& kernels, float* entries, size_t n, float low, float high, size_t rank) {
    float first = low, scale = kWhole / (high - low);
    int tries = 0;
    while (n > size_t(kFew)) {
        uint32_t counts[kParts];
        kernels.count_parts(entries, n, first, scale, counts);
        int part = 0;
        for (; rank >= counts[part]; part++) rank -= counts[part];
        const size_t before = n;
        n = kernels.take_part(entries, n, first, scale, part, entries);
        if (2 * n < before) {
            first += float(part) / scale;
            scale *= kWhole;
            continue;
        }
        kernels.extremes(entries, n, first, high);
        if (first == high) return first;
        if (++tries == kTries) {
            std::nth_element(entries, entries + rank, entries + n);
            return entries[rank];
        }
        scale = kWhole / (high - first);
    }
    return kernels.of_few(entries, n, rank);
}

}  // namespace gradwire
