// Argument checks of the levels kernels.
#include "bindings.h"
#include "levels.h"

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

void require_levels(int levels) { require(levels >= 2 && levels <= kMaxLevels, "bad number of levels"); }

void stats(Floats gradient, std::optional<Floats> memory, float decay, Ints starts, Doubles out) {
    std::optional<FloatsOut> none;
    const Stream s = make_stream(gradient, memory, none);
    const Buckets b = make_buckets(starts, s.count);
    require(out.size() == b.count * kStats, "out has the wrong size");
    nb::gil_scoped_release release;
    level_kernels().stats(s, decay, b, out.data());
}

void search(Floats gradient, std::optional<Floats> memory, float decay, Ints starts, std::optional<Floats> limits,
            int levels, int method, FloatsOut out) {
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
    search_levels(s, decay, b, limits ? limits->data() : nullptr, levels, how, out.data());
}

void assign(Floats gradient, std::optional<Floats> memory, std::optional<FloatsOut> memory_out, float decay,
            Floats values, int levels, Ints starts, std::optional<uint64_t> seed, BytesOut symbols, IntsOut counts) {
    const Stream s = make_stream(gradient, memory, memory_out);
    const Buckets b = make_buckets(starts, s.count);
    require_levels(levels);
    require(values.size() == b.count * size_t(levels), "values has the wrong size");
    require(symbols.size() == s.count, "symbols has the wrong size");
    require(counts.size() == size_t(levels), "counts has the wrong size");
    nb::gil_scoped_release release;
    level_kernels().assign(s, decay, b, values.data(), levels, seed.has_value(), seed.value_or(0), symbols.data(),
                           counts.data());
}

void spread(Bytes symbols, Floats values, int levels, Ints starts, FloatsOut out, bool accumulate) {
    const Buckets b = make_buckets(starts, symbols.size());
    require_levels(levels);
    require(values.size() == b.count * size_t(levels), "values has the wrong size");
    require(out.size() == symbols.size(), "out has the wrong size");
    nb::gil_scoped_release release;
    level_kernels().spread(symbols.data(), b, values.data(), levels, out.data(), accumulate);
}

}  // namespace

void bind_levels(nb::module_& m) {
    m.def("bucket_stats", &stats, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("decay"), nb::arg("starts"),
          nb::arg("out"));
    m.def("search_levels", &search, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("decay"), nb::arg("starts"),
          nb::arg("limits").none(), nb::arg("levels"), nb::arg("method"), nb::arg("out"));
    m.def("assign_levels", &assign, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("memory_out").none(),
          nb::arg("decay"), nb::arg("values"), nb::arg("levels"), nb::arg("starts"), nb::arg("seed").none(),
          nb::arg("symbols"), nb::arg("counts"));
    m.def("spread_levels", &spread);
}

}  // namespace gradwire
