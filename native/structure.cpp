// Structured tensors on any machine, the choice between instruction sets, which follows that of kernels(), and threads.
#include "structure.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "kernels.h"
#include "quantize.h"
#include "structure_loops.h"
#include "threads.h"

namespace gradwire {

const StructureLoops portable_structure = structure_loops();

const StructureLoops& structure_kernels() { return GRADWIRE_IN_USE(structure); }

namespace {

constexpr size_t kBlock = 1 << 13;  // entries that stay in the second-level cache
constexpr size_t kGroups = 16;  // of rows, which are added up by themselves

constexpr size_t kMostSums = 1 << 20;  // numbers that they may be added up to, where that leaves four groups

size_t rows_of(size_t count, size_t width) { return (count + width - 1) / width; }

// work(first, last) on rows of so many entries, a few at a time.
template <class Work>
void in_rows(size_t rows, size_t width, int threads, const Work& work) {
    const size_t together = std::max<size_t>(1, kBlock / width);
    in_blocks(rows_of(rows, together), together * width * 8, threads, [&](size_t first, size_t last) {
        for (size_t i = first; i < last; i++) work(i * together, std::min(rows, (i + 1) * together));
    });
}

}  // namespace

void small_kernels(std::vector<Axis>& axes, size_t kernel) {
    if (kernel > 10 && kernel != 16) return;
    const size_t period = std::lcm(kernel, size_t(16));
    for (size_t e = 0; e < period; e += 16)
        if ((e + 15) / kernel * kernel + kernel - e / kernel * kernel > 32) return;
    size_t inner = kernel;
    for (Axis& axis : axes) {
        inner /= size_t(axis.size);
        for (size_t e = 0; e < period; e += 16) {
            Axis::Phase phase{e / kernel * kernel, {}, {}};
            for (int m = 0; m < axis.size; m++)
                for (size_t l = e; l < e + 16; l++) {
                    const size_t k = l / inner % size_t(axis.size), first = l - k * inner;
                    phase.index.push_back(int32_t(first + size_t(m) * inner - phase.from));
                    phase.factor.push_back(axis.rows[size_t(m * axis.size) + k]);
                }
            axis.phases.push_back(std::move(phase));
        }
    }
}

void rebuild_rows(const Rebuild& r, float* out, int threads) {
    in_rows(rows_of(r.count, r.width), r.width, threads,
            [&](size_t first, size_t last) { structure_kernels().rebuild(r, first, last, out + first * r.width); });
}

namespace {

float* room_for(size_t entries) {
    static thread_local std::vector<float> room;
    if (room.size() < entries) room.resize(entries);
    return room.data();
}

// The energies of make(start, entries), for a few rows at a time, by groups of rows whose sums are added up in order: so
// they do not depend on the number of threads.
template <class Make>
void measure_rows(size_t count, size_t width, double* rows, double* places, size_t bytes, int threads,
                  const Make& make) {
    const size_t number = rows_of(count, width), together = rows_of(number, kGroups),
                 groups = rows_of(number, together);
    const size_t block = std::max<size_t>(1, kBlock / width);
    std::vector<double> sums(groups * width);
    in_blocks(groups, together * width * bytes, threads, [&](size_t first, size_t last) {
        for (size_t row = first * together, end = std::min(number, last * together); row < end;) {
            const size_t group = row / together, n = std::min({block, end - row, (group + 1) * together - row});
            const size_t start = row * width, entries = std::min(count, start + n * width) - start;
            structure_kernels().energies(make(start, entries), entries, width, rows + row, sums.data() + group * width);
            row += n;
        }
    });
    std::fill(places, places + width, 0.0);
    for (size_t g = 0; g < groups; g++)
        for (size_t q = 0; q < width; q++) places[q] += sums[g * width + q];
}

}  // namespace

void prepare_rows(const Compensated& source, size_t count, size_t width, const std::vector<Axis>& axes, int kernel,
                  float* x, double* rows, double* places, int threads) {
    measure_rows(count, width, rows, places, 12, threads, [&](size_t start, size_t entries) {
        structure_kernels().compensate(source, start, entries, x + start);
        if (kernel > 1) structure_kernels().transform(x + start, entries, axes.data(), int(axes.size()), kernel);
        return x + start;
    });
}

void add_prediction(float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank, float sign,
                    int threads) {
    in_rows(count / width, width, threads, [&](size_t first, size_t last) {
        structure_kernels().predict(x + first * width, (last - first) * width, width, left + first * rank, right, rank,
                                    sign);
    });
}

void measure_remainder(const float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank,
                       double* rows, double* places, int threads) {
    measure_rows(count, width, rows, places, 4, threads, [&](size_t start, size_t entries) {
        float* const rest = room_for(entries);
        std::copy_n(x + start, entries, rest);
        structure_kernels().predict(rest, entries, width, left + start / width * rank, right, rank, -1.0f);
        return rest;
    });
}

void sample_remainder(const float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank,
                      size_t runs, size_t length, float* out) {
    constexpr size_t kAhead = 16;  // each run is a cache miss or two: have those of several under way
    const auto start_of = [&](size_t r) {
        const size_t stratum = count / runs;
        return std::min(r * stratum + mix(uint32_t(r)) % stratum, count - length);
    };
    std::vector<float> sums(length);
    for (size_t r = 0; r < runs; r++, out += length) {
        __builtin_prefetch(x + start_of(std::min(r + kAhead, runs - 1)));
        const size_t start = start_of(r);
        std::copy_n(x + start, length, out);
        if (!rank) continue;
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (size_t i = 0; i < length;) {  // row by row
            const size_t row = (start + i) / width, q = start + i - row * width, end = std::min(length, i + width - q);
            for (int t = 0; t < rank; t++) {
                const float a = left[row * size_t(rank) + size_t(t)];
                const int8_t* b = right + size_t(t) * width + q;
                for (size_t j = i; j < end; j++) sums[j] += a * float(b[j - i]);
            }
            i = end;
        }
        for (size_t i = 0; i < length; i++) out[i] -= sums[i];
    }
}

void axis_energies(const float* x, size_t count, size_t width, double* rows, double* places, int threads) {
    measure_rows(count, width, rows, places, 4, threads, [&](size_t start, size_t) { return x + start; });
}

void project_rows(const float* x, size_t rows, size_t width, const float* basis, float* out, int threads) {
    // Cut at multiples of four rows, so that a row is summed up alike with any number of threads.
    in_blocks(rows_of(rows, kRowsTogether), kRowsTogether * width * 4, threads, [&](size_t first, size_t last) {
        const size_t start = first * kRowsTogether, stop = std::min(rows, last * kRowsTogether);
        structure_kernels().project_rows(x + start * width, stop - start, width, basis, out + start * kDirections);
    });
}

void project_both(const float* x, size_t rows, size_t width, const float* basis, float* left, float* right,
                  int threads) {
    const size_t number = rows_of(rows, kRowsTogether);
    const size_t size = width * kDirections, most = std::clamp<size_t>(kMostSums / size, 4, kGroups);
    const size_t together = rows_of(number, most), groups = number ? rows_of(number, together) : 0;
    std::vector<float> sums(groups > 1 ? (groups - 1) * size : 0);
    std::fill(right, right + size, 0.0f);
    in_blocks(groups, together * kRowsTogether * width * 8, threads, [&](size_t first, size_t last) {
        for (size_t g = first; g < last; g++)
            for (size_t i = g * together; i < std::min(number, (g + 1) * together); i++) {
                const size_t start = i * kRowsTogether;
                const size_t n = std::min(rows - start, size_t(kRowsTogether));
                float* const to = left + start * kDirections;
                structure_kernels().project_rows(x + start * width, n, width, basis, to);
                structure_kernels().add_columns(x + start * width, n, width, to,
                                                g ? sums.data() + (g - 1) * size : right);
            }
    });
    for (size_t g = 1; g < groups; g++)
        for (size_t q = 0; q < size; q++) right[q] += sums[(g - 1) * size + q];
}

void gram(const float* a, const float* b, size_t count, double* out) { structure_kernels().gram(a, b, count, out); }

}  // namespace gradwire
