// Argument checks of the kernels of structured frames.
#include <algorithm>
#include <cmath>

#include "bindings.h"
#include "classes.h"

namespace gradwire {
namespace {

using Scales = nb::ndarray<const int16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Signed = nb::ndarray<const int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DoublesOut = Written<double>;

// Square matrices, one after the other; `inverse` takes their rows where the transform takes their columns.
std::vector<Axis> make_axes(const Floats& matrices, const std::vector<int>& sizes, bool inverse, size_t& kernel) {
    std::vector<Axis> axes;
    size_t position = 0;
    kernel = 1;
    for (int n : sizes) {
        require(n >= 1 && n <= 4096 && position + size_t(n) * n <= matrices.size(), "matrices do not fit the axes");
        Axis axis{n, std::vector<float>(size_t(n) * n), {}};
        for (int a = 0; a < n; a++)
            for (int b = 0; b < n; b++) {
                const float d = matrices.data()[position + size_t(a) * n + b];
                axis.rows[inverse ? size_t(a) * n + b : size_t(b) * n + a] = d;
            }
        position += size_t(n) * n;
        kernel *= n;
        require(kernel <= 4096, "kernels are too large");
        axes.push_back(std::move(axis));
    }
    require(position == matrices.size(), "matrices do not fit the axes");
    if (kernel > 1) small_kernels(axes, kernel);
    return axes;
}

Compensated make_source(const Floats& gradient, const std::optional<Floats>& memory, float decay) {
    require(!memory || memory->size() == gradient.size(), "memory has the wrong size");
    return {gradient.data(), memory ? memory->data() : nullptr, decay};
}

// All of a Rebuild but its symbols, outliers, the factors of rows, and what becomes of the values.
Rebuild make_rebuild(const float* values, int symbols, size_t count, size_t width, const Signed& right, int rank,
                     const std::vector<Axis>& axes, size_t kernel) {
    require(width >= 1 && rank >= 0, "bad width or rank");
    require(right.size() == width * rank, "factors have the wrong size");
    require(kernel == 1 || (width % kernel == 0 && count % width == 0), "rows are not made of whole kernels");
    require(!rank || count % width == 0, "rows must be whole");
    Rebuild r{};
    r.values = values;
    r.symbol_count = symbols;
    r.count = count;
    r.width = width;
    r.right = right.data();
    r.rank = rank;
    r.axes = axes.data();
    r.axis_count = int(axes.size());
    r.kernel = int(kernel);
    r.weight = 1;
    return r;
}

void add_outliers(Rebuild& r, const Ints& positions, const Floats& outliers) {
    require(positions.size() == outliers.size(), "arrays of outliers differ in size");
    for (size_t i = 0; i < positions.size(); i++)
        require(positions.data()[i] >= (i ? positions.data()[i - 1] + 1 : 0) && size_t(positions.data()[i]) < r.count,
                "positions must be ascending, and inside");
    r.positions = positions.data();
    r.outliers = outliers.data();
    r.number = positions.size();
}

void require_table(const Floats& values, int symbols) {
    require(values.size() == 256 && symbols >= 1 && symbols <= 256, "there must be 256 values");
}

void rebuild(std::optional<Bytes> symbols, Floats values, int symbol_count, FloatsOut out, size_t width, Ints positions,
             Floats outliers, Floats left, Signed right, int rank, Floats matrices, const std::vector<int>& sizes,
             std::optional<Floats> gradient, std::optional<Floats> memory, float decay, int threads) {
    size_t kernel;
    const std::vector<Axis> axes = make_axes(matrices, sizes, true, kernel);
    require(!gradient || gradient->size() == out.size(), "gradient has the wrong size");
    const Compensated source = gradient ? make_source(*gradient, memory, decay) : Compensated{};
    require_table(values, symbol_count);
    Rebuild r = make_rebuild(values.data(), symbol_count, out.size(), width, right, rank, axes, kernel);
    add_outliers(r, positions, outliers);
    require(!symbols || symbols->size() == out.size(), "symbols has the wrong size");
    require(left.size() == (out.size() + width - 1) / width * rank, "factors have the wrong size");
    r.symbols = symbols ? symbols->data() : nullptr;
    r.left = left.data();
    r.source = gradient ? &source : nullptr;
    r.far = gradient && source.memory != out.data() && out.size() >= kFar;
    nb::gil_scoped_release release;
    rebuild_rows(r, out.data(), threads);
}

void prepare(Floats gradient, std::optional<Floats> memory, float decay, Floats matrices, const std::vector<int>& sizes,
             FloatsOut x, DoublesOut rows, DoublesOut places, int threads) {
    size_t kernel;
    const std::vector<Axis> axes = make_axes(matrices, sizes, false, kernel);
    const Compensated source = make_source(gradient, memory, decay);
    const size_t width = places.size();
    require(x.size() == gradient.size() && width >= 1, "x has the wrong size");
    require(rows.size() == (x.size() + width - 1) / width, "energies have the wrong size");
    require(kernel == 1 || (width % kernel == 0 && x.size() % width == 0), "rows are not made of whole kernels");
    nb::gil_scoped_release release;
    prepare_rows(source, x.size(), width, axes, int(kernel), x.data(), rows.data(), places.data(), threads);
}

void predict(FloatsOut x, Floats left, Signed right, int rank, float sign, int threads) {
    require(rank >= 1 && right.size() % rank == 0 && right.size() > 0, "factors have the wrong size");
    const size_t width = right.size() / rank;
    require(x.size() % width == 0 && left.size() == x.size() / width * rank, "factors have the wrong size");
    nb::gil_scoped_release release;
    add_prediction(x.data(), x.size(), width, left.data(), right.data(), rank, sign, threads);
}

void remainder(Floats x, Floats left, Signed right, int rank, DoublesOut rows, DoublesOut places, int threads) {
    require(rank >= 1 && right.size() % rank == 0 && right.size() > 0, "factors have the wrong size");
    const size_t width = right.size() / rank;
    require(x.size() % width == 0 && left.size() == x.size() / width * rank, "factors have the wrong size");
    require(places.size() == width && rows.size() == x.size() / width, "energies have the wrong size");
    nb::gil_scoped_release release;
    measure_remainder(x.data(), x.size(), width, left.data(), right.data(), rank, rows.data(), places.data(), threads);
}

void sample_of_remainder(Floats x, Floats left, Signed right, int rank, size_t runs, size_t length, FloatsOut out) {
    require(rank >= 0 && (!rank || (right.size() % rank == 0 && right.size() > 0)), "factors have the wrong size");
    const size_t width = rank ? right.size() / rank : 1;
    require(x.size() % width == 0 && left.size() == x.size() / width * rank, "factors have the wrong size");
    require(runs && length && out.size() == runs * length && x.size() > runs * length, "sample is too large");
    nb::gil_scoped_release release;
    sample_remainder(x.data(), x.size(), width, left.data(), right.data(), rank, runs, length, out.data());
}

void energies(Floats x, DoublesOut rows, DoublesOut places, int threads) {
    const size_t width = places.size();
    require(width >= 1 && rows.size() == (x.size() + width - 1) / width, "energies have the wrong size");
    nb::gil_scoped_release release;
    axis_energies(x.data(), x.size(), width, rows.data(), places.data(), threads);
}

void rows_on_basis(Floats x, Floats basis, FloatsOut out, int threads) {
    const size_t width = basis.size() / kDirections;
    require(width >= 1 && basis.size() % kDirections == 0 && x.size() % width == 0, "basis has the wrong size");
    require(out.size() == x.size() / width * kDirections, "out has the wrong size");
    nb::gil_scoped_release release;
    project_rows(x.data(), x.size() / width, width, basis.data(), out.data(), threads);
}

void on_both_sides(Floats x, Floats basis, FloatsOut left, FloatsOut right, int threads) {
    const size_t width = basis.size() / kDirections;
    require(width >= 1 && basis.size() % kDirections == 0 && x.size() % width == 0, "basis has the wrong size");
    require(left.size() == x.size() / width * kDirections, "left has the wrong size");
    require(right.size() == basis.size(), "right has the wrong size");
    nb::gil_scoped_release release;
    project_both(x.data(), x.size() / width, width, basis.data(), left.data(), right.data(), threads);
}

void products(Floats a, Floats b, DoublesOut out) {
    require(a.size() == b.size() && a.size() % kDirections == 0, "columns differ in size");
    require(out.size() == kDirections * kDirections, "out has the wrong size");
    nb::gil_scoped_release release;
    gram(a.data(), b.data(), a.size() / kDirections, out.data());
}

Classes make_classes(const Scales& rows, const Scales& columns, const Scales& coefficients, int base, size_t number) {
    require(rows.size() && columns.size() && coefficients.size(), "there are no scales");
    require(number >= 1 && number <= 32 && base >= 0 && base <= 255, "bad classes");
    for (const Scales* scales : {&rows, &columns, &coefficients})
        for (size_t i = 0; i < scales->size(); i++)
            require(scales->data()[i] >= 0 && scales->data()[i] <= 63, "bad scale");
    return {rows.data(),         columns.data(), coefficients.data(), rows.size(), columns.size(),
            coefficients.size(), base,           int(number)};
}

void merge(Bytes streams, IntsOut positions, Bytes zeros, Scales rows, Scales columns, Scales coefficients, int base,
           size_t first, BytesOut symbols) {
    const Classes c = make_classes(rows, columns, coefficients, base, positions.size());
    require(zeros.size() == positions.size(), "there must be a zero for each class");
    for (size_t t = 0; t < positions.size(); t++)
        require(positions.data()[t] >= 0 && size_t(positions.data()[t]) <= streams.size(), "bad position");
    require(first % c.width() == 0, "rows must be whole");
    require((first + symbols.size() + c.width() - 1) / c.width() <= c.row_count, "there are more symbols than entries");
    bool good;
    {
        nb::gil_scoped_release release;
        good = merge_classes(c, streams.data(), streams.size(), positions.data(), zeros.data(), first / c.width(),
                             symbols.size(), symbols.data());
    }
    require(good, "a class has too few symbols");
}

// Symbols in order and by class, counts and outliers of x less a prediction; returns how many of the latter there are.
// With `memory_out`, what they leave out of the gradient goes there; without a gradient, of x.
size_t quantize(Floats x, Floats left, Signed right, int rank, float step, float shift, Floats values, Scales rows,
                Scales columns, Scales coefficients, int base, size_t classes, BytesOut symbols, BytesOut streams,
                IntsOut counts, IntsOut positions, Written<int32_t> multiples, float offset,
                std::optional<FloatsOut> memory_out, std::optional<Floats> gradient, std::optional<Floats> memory,
                float decay, Floats matrices, const std::vector<int>& sizes, int threads) {
    const Classes c = make_classes(rows, columns, coefficients, base, classes);
    require(values.size() % 2 == 1 && values.size() >= 3 && values.size() <= 255, "values do not fit a grid");
    require(step > 0 && shift >= 0 && shift <= 1, "bad step or shift");
    const Grid g{1.0f, 1.0f / step, shift, int(values.size() / 2), values.data(), 0, false, false, step, offset};
    require(symbols.size() == x.size() && streams.size() == x.size(), "symbols has the wrong size");
    require((x.size() + c.width() - 1) / c.width() <= c.row_count, "there are more entries than in all rows");
    require(counts.size() == classes * values.size() && multiples.size() == positions.size(), "wrong sizes");
    require(left.size() == (x.size() + c.width() - 1) / c.width() * rank, "factors have the wrong size");
    require(!memory_out || memory_out->size() == x.size(), "memory_out has the wrong size");
    require(!gradient || gradient->size() == x.size(), "gradient has the wrong size");
    Outliers outliers{positions.data(), multiples.data(), 0, positions.size()};
    float table[256] = {};
    std::copy_n(values.data(), values.size(), table);
    size_t kernel;
    const std::vector<Axis> axes = make_axes(matrices, sizes, true, kernel);
    require(kernel == 1 || gradient || !memory_out, "what is transformed is taken from the gradient");
    const Compensated source = gradient ? make_source(*gradient, memory, decay) : Compensated{};
    Remainder r{x.data(), make_rebuild(table, int(values.size()), x.size(), c.width(), right, rank, axes, kernel),
                memory_out ? memory_out->data() : nullptr};
    r.rows.left = left.data();
    r.rows.source = gradient ? &source : nullptr;
    r.rows.far = r.memory && source.memory != r.memory && x.size() >= kFar;
    nb::gil_scoped_release release;
    quantize_classes(g, c, r, symbols.data(), streams.data(), counts.data(), outliers, threads);
    return outliers.count;
}

void rebuild_from_classes(std::optional<Bytes> streams, Bytes zeros, Scales rows, Scales columns, Scales coefficients,
                          int base, Floats values, int symbol_count, FloatsOut out, Ints positions, Floats outliers,
                          Floats scales, Signed left, Signed right, Floats matrices, const std::vector<int>& sizes,
                          float weight, bool add, int threads) {
    const Classes c = make_classes(rows, columns, coefficients, base, zeros.size());
    size_t kernel;
    const std::vector<Axis> axes = make_axes(matrices, sizes, true, kernel);
    const int rank = int(scales.size());
    require_table(values, symbol_count);
    Rebuild r = make_rebuild(values.data(), symbol_count, out.size(), c.width(), right, rank, axes, kernel);
    add_outliers(r, positions, outliers);
    require(!streams || streams->size() == out.size(), "streams has the wrong size");
    require((out.size() + c.width() - 1) / c.width() == c.row_count, "out has the wrong size");
    require(left.size() == c.row_count * rank, "factors have the wrong size");
    r.weight = weight;
    r.add = add;
    const MergedRebuild m{r, &c, streams ? streams->data() : nullptr, zeros.data(), left.data(), scales.data()};
    nb::gil_scoped_release release;
    rebuild_classes(m, out.data(), threads);
}

}  // namespace

void bind_structure(nb::module_& m) {
    m.def("structure_rebuild", rebuild, nb::arg("symbols").none(), nb::arg("values"), nb::arg("symbol_count"),
          nb::arg("out"), nb::arg("width"), nb::arg("positions"), nb::arg("outliers"), nb::arg("left"),
          nb::arg("right"), nb::arg("rank"), nb::arg("matrices"), nb::arg("sizes"), nb::arg("gradient").none(),
          nb::arg("memory").none(), nb::arg("decay"), nb::arg("threads"));
    m.def("structure_prepare", prepare, nb::arg("gradient"), nb::arg("memory").none(), nb::arg("decay"),
          nb::arg("matrices"), nb::arg("sizes"), nb::arg("x"), nb::arg("rows"), nb::arg("places"), nb::arg("threads"));
    m.def("add_prediction", predict);
    m.def("measure_remainder", remainder);
    m.def("sample_remainder", sample_of_remainder);
    m.def("axis_energies", energies);
    m.def("project_rows", rows_on_basis);
    m.def("project_both", on_both_sides);
    m.def("gram", products);
    m.def("merge_classes", merge);
    m.def("quantize_classes", quantize, nb::arg("x"), nb::arg("left"), nb::arg("right"), nb::arg("rank"),
          nb::arg("step"), nb::arg("shift"), nb::arg("values"), nb::arg("rows"), nb::arg("columns"),
          nb::arg("coefficients"), nb::arg("base"), nb::arg("classes"), nb::arg("symbols"), nb::arg("streams"),
          nb::arg("counts"), nb::arg("positions"), nb::arg("multiples"), nb::arg("offset"),
          nb::arg("memory_out").none(), nb::arg("gradient").none(), nb::arg("memory").none(), nb::arg("decay"),
          nb::arg("matrices"), nb::arg("sizes"), nb::arg("threads"));
    m.def("rebuild_classes", rebuild_from_classes, nb::arg("streams").none(), nb::arg("zeros"), nb::arg("rows"),
          nb::arg("columns"), nb::arg("coefficients"), nb::arg("base"), nb::arg("values"), nb::arg("symbol_count"),
          nb::arg("out"), nb::arg("positions"), nb::arg("outliers"), nb::arg("scales"), nb::arg("left"),
          nb::arg("right"), nb::arg("matrices"), nb::arg("sizes"), nb::arg("weight"), nb::arg("add"),
          nb::arg("threads"));
}

}  // namespace gradwire
