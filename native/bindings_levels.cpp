// Argument checks of the levels kernels.
#include <algorithm>
#include <mutex>
#include <vector>

#include "bindings.h"
#include "levels.h"
#include "threads.h"

namespace gradwire {
namespace {

using Doubles = Written<double>;

// No bucket may be empty, and they fill the tensor: entries outside it are never touched.
Buckets make_buckets(Ints starts, size_t entries) {
    require(starts.size() >= 2 && starts.data()[0] == 0, "buckets must start at 0");
    for (size_t i = 1; i < starts.size(); i++)
        require(starts.data()[i] > starts.data()[i - 1], "buckets must not be empty");
    require(size_t(starts.data()[starts.size() - 1]) == entries, "buckets do not fill the tensor");
    return {starts.data(), starts.size() - 1};
}

constexpr size_t kSearchBytes =
    32;  // searching the levels of an entry takes as long as copying so many bytes, or longer

// work(first, buckets): these buckets, of which the first is number `first`, on threads.
template <class Work>
void in_buckets(Buckets b, size_t entry_bytes, int threads, const Work& work) {
    const size_t bytes = entry_bytes * size_t(b.starts[b.count]) / b.count + 1;
    in_blocks(b.count, bytes, threads,
              [&](size_t first, size_t last) { work(first, Buckets{b.starts + first, last - first}); });
}

// The same for kernels that do not mind where a bucket is cut: it may be as large as the tensor.
template <class Work>
void in_pieces(Buckets b, size_t entry_bytes, int threads, const Work& work) {
    in_aligned_blocks(size_t(b.starts[b.count]), entry_bytes, threads, [&](size_t start, size_t end) {
        const int64_t* first = std::upper_bound(b.starts, b.starts + b.count, int64_t(start)) - 1;
        const int64_t* last = std::lower_bound(first, b.starts + b.count, int64_t(end));
        std::vector<int64_t> starts(first, last + 1);
        starts.front() = int64_t(start);
        starts.back() = int64_t(end);
        work(size_t(first - b.starts), Buckets{starts.data(), starts.size() - 1});
    });
}

void require_levels(int levels) { require(levels >= 2 && levels <= kMaxLevels, "bad number of levels"); }

void stats(Floats gradient, std::optional<Floats> memory, float decay, Ints starts, Doubles out, int threads) {
    std::optional<FloatsOut> none;
    const Stream s = make_stream(gradient, memory, none);
    const Buckets b = make_buckets(starts, s.count);
    require(out.size() == b.count * kStats, "out has the wrong size");
    nb::gil_scoped_release release;
    in_buckets(b, s.entry_bytes(), threads,
               [&](size_t first, Buckets some) { level_kernels().stats(s, decay, some, out.data() + first * kStats); });
}

void search(Floats gradient, std::optional<Floats> memory, float decay, Ints starts, std::optional<Floats> limits,
            int levels, int method, FloatsOut out, int threads) {
    std::optional<FloatsOut> none;
    const Stream s = make_stream(gradient, memory, none);
    const Buckets b = make_buckets(starts, s.count);
    require_levels(levels);
    require(method >= 0 && method <= int(Search::pair), "unknown search");
    require(s.count <= 0x7fffffff, "too many entries to search");
    const Search how = Search(method);
    require(how == Search::two || how == Search::pair ? levels == 2 : levels >= 3, "bad number of levels");
    require((how != Search::greedy && how != Search::polished) || !((levels - 1) & (levels - 2)),
            "levels must be a power of two and 1");
    require(!limits || limits->size() == b.count, "limits has the wrong size");
    require(out.size() == b.count * (how == Search::pair ? 1 : size_t(levels)), "out has the wrong size");
    nb::gil_scoped_release release;
    const size_t width = how == Search::pair ? 1 : size_t(levels);
    in_buckets(b, kSearchBytes, threads, [&](size_t first, Buckets some) {
        search_levels(s, decay, some, limits ? limits->data() + first : nullptr, levels, how,
                      out.data() + first * width);
    });
}

void assign(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out, float decay,
            Floats values, int levels, Ints starts, std::optional<uint64_t> seed, BytesOut symbols, IntsOut counts,
            int threads) {
    const Stream s = make_stream(gradient, memory, memory_out);
    const Buckets b = make_buckets(starts, s.count);
    require_levels(levels);
    require(values.size() == b.count * size_t(levels), "values has the wrong size");
    require(symbols.size() == s.count, "symbols has the wrong size");
    require(counts.size() == size_t(levels), "counts has the wrong size");
    nb::gil_scoped_release release;
    std::mutex mutex;
    in_pieces(b, s.entry_bytes() + 1, threads, [&](size_t first, Buckets some) {
        int64_t found[kMaxLevels] = {};
        level_kernels().assign(s, decay, some, values.data() + first * size_t(levels), levels, seed.has_value(),
                               seed.value_or(0), symbols.data(), found);
        std::lock_guard<std::mutex> guard(mutex);
        for (int i = 0; i < levels; i++) counts.data()[i] += found[i];
    });
}

void spread(Bytes symbols, Floats values, int levels, Ints starts, FloatsOut out, bool accumulate, int threads) {
    const Buckets b = make_buckets(starts, symbols.size());
    require(levels >= 1 && levels <= kMaxValues, "bad number of levels");
    require(values.size() == b.count * size_t(levels), "values has the wrong size");
    require(out.size() == symbols.size(), "out has the wrong size");
    nb::gil_scoped_release release;
    in_pieces(b, accumulate ? 9 : 5, threads, [&](size_t first, Buckets some) {
        level_kernels().spread(symbols.data(), some, values.data() + first * size_t(levels), levels, out.data(),
                               accumulate);
    });
}

}  // namespace

void bind_levels(nb::module_& m) {
    m.def("bucket_stats", &stats, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("decay"), nb::arg("starts"),
          nb::arg("out"), nb::arg("threads"));
    m.def("search_levels", &search, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("decay"), nb::arg("starts"),
          nb::arg("limits").none(), nb::arg("levels"), nb::arg("method"), nb::arg("out"), nb::arg("threads"));
    m.def("assign_levels", &assign, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("memory_out").none(),
          nb::arg("decay"), nb::arg("values"), nb::arg("levels"), nb::arg("starts"), nb::arg("seed").none(),
          nb::arg("symbols"), nb::arg("counts"), nb::arg("threads"));
    m.def("spread_levels", &spread);
}

}  // namespace gradwire
