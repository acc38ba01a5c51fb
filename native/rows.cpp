// Rows on any machine, the choice between instruction sets, which follows that of kernels(), and threads.
#include "rows.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cmath>

#include "kernels.h"
#include "row_loops.h"
#include "threads.h"

namespace gradwire {

const RowKernels portable_rows = row_kernels<Of2, Of4>();

namespace {

// Arrays of 32 MB and more are new pages each time (glibc's malloc keeps none of them), and getting pages of 4 KB takes
// several times as long as writing to them: ask for 2 MB at a time.
void prefer_large_pages(void* data, size_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t kPage = 1 << 21;
    const uintptr_t start = (uintptr_t(data) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (uintptr_t(data) + bytes) / kPage * kPage;
    if (bytes >= size_t(32) << 20) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
}

// One side, with the loops for its types.
struct Use : Side {
    RowLoops loops;
    size_t row_bytes, memory_bytes;

    explicit Use(const Side& side)
        : Side(side), loops(GRADWIRE_IN_USE(rows).of[half_rows][remembers][centred]),
          row_bytes(columns * (half_rows ? 2 : 4)), memory_bytes(columns * (remembers == kNoMemory     ? 0
                                                                            : remembers == kHalfMemory ? 2
                                                                                                       : 4)) {}

    const void* row(size_t j) const { return static_cast<const char*>(rows) + j * row_bytes; }
    void* slot(size_t j) const { return static_cast<char*>(memory) + j * memory_bytes; }
    bool is_zero(size_t j) const { return loops.is_zero(row(j), mean, columns); }
    double norm(size_t j, float keep, float of) const { return loops.norm(row(j), mean, slot(j), columns, keep, of); }
    void join(size_t j, float keep, float of) const { loops.join(row(j), mean, slot(j), columns, keep, of); }
    void take(size_t j, void* taken) const { loops.take(row(j), mean, slot(j), columns, gain, taken); }
};

size_t bytes_of_row(const Use& a, const Use& b) {
    return a.row_bytes + b.row_bytes + 2 * (a.memory_bytes + b.memory_bytes);
}

}  // namespace

void join_rows(const Side (&sides)[2], size_t count, float keep, double* scores, int threads) {
    const Use a(sides[0]), b(sides[1]);
    in_blocks(count, bytes_of_row(a, b), threads, [&](size_t first, size_t last) {
        for (size_t j = first; j < last; j++) {
            const float brings = !a.is_zero(j) && !b.is_zero(j);
            const float scale_a = brings * a.scale, scale_b = brings * b.scale;
            const double of_a = a.norm(j, keep, scale_a), of_b = b.norm(j, keep, scale_b);
            const bool fits = of_a <= a.most && of_b <= b.most;
            scores[j] = fits ? of_a * of_b : NAN;
            if (fits && a.remembers) {  // what is read again is in the cache
                a.join(j, keep, scale_a);
                b.join(j, keep, scale_b);
            }
        }
    });
}

void take_rows(const Side (&sides)[2], const int64_t* chosen, size_t n, void* const (&taken)[2], int threads) {
    const Use a(sides[0]), b(sides[1]);
    char *to_a = static_cast<char*>(taken[0]), *to_b = static_cast<char*>(taken[1]);
    prefer_large_pages(to_a, n * a.row_bytes);
    prefer_large_pages(to_b, n * b.row_bytes);
    in_blocks(n, bytes_of_row(a, b), threads, [&](size_t first, size_t last) {
        for (size_t i = first; i < last; i++) {
            a.take(size_t(chosen[i]), to_a + i * a.row_bytes);
            b.take(size_t(chosen[i]), to_b + i * b.row_bytes);
        }
    });
}

}  // namespace gradwire
