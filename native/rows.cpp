// Rows on any machine, the choice between instruction sets, which follows that of kernels(), and threads.
#include "rows.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>

#include "kernels.h"
#include "row_loops.h"
#include "threads.h"

namespace gradwire {

const RowKernels portable_rows = row_kernels<Of2>();

namespace {

const RowKernels& row_kernels_in_use() {
#ifdef GRADWIRE_X86
    if (&kernels() == &avx512_kernels) return avx512_rows;
    if (&kernels() == &avx2_kernels) return avx2_rows;
#endif
    return portable_rows;
}

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

size_t bytes_of_row(const Rows& r) { return r.columns * 4 * (r.memory ? 2 : 1); }

}  // namespace

void row_norms(const Rows& r, double* norms, int threads) {
    const RowKernels& use = row_kernels_in_use();
    in_blocks(r.count, bytes_of_row(r), threads, [&](size_t first, size_t last) { use.norms(r, first, last, norms); });
}

void take_rows(const Rows& r, float gain, const int64_t* chosen, size_t n, void* taken, int threads) {
    const RowKernels& use = row_kernels_in_use();
    const size_t size = r.columns * (r.half_rows ? 2 : 4);
    prefer_large_pages(taken, n * size);
    const auto take = [&](size_t first, size_t last, size_t from, size_t to) {
        use.take(r, first, last, gain, chosen + from, to - from, static_cast<char*>(taken) + from * size);
    };
    if (!r.memory)
        return in_blocks(n, bytes_of_row(r), threads, [&](size_t from, size_t to) { take(0, r.count, from, to); });
    in_blocks(r.count, bytes_of_row(r), threads, [&](size_t first, size_t last) {
        const auto chosen_before = [&](size_t row) {
            return size_t(std::lower_bound(chosen, chosen + n, int64_t(row)) - chosen);
        };
        take(first, last, chosen_before(first), chosen_before(last));
    });
}

}  // namespace gradwire
