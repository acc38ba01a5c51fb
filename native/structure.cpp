// Structured tensors on any machine, the choice between instruction sets, which follows that of kernels(), and threads.
#include "structure.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels.h"
#include "structure_loops.h"
#include "threads.h"

namespace gradwire {

const StructureLoops portable_structure = structure_loops();

namespace {

constexpr size_t kBlock = 1 << 13;  // entries that stay in the second-level cache
constexpr size_t kGroups = 16;  // of rows, whose energies are added up by themselves

const StructureLoops& loops() { return GRADWIRE_IN_USE(structure); }

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

void rebuild_rows(const Rebuild& r, float* out, int threads) {
    in_rows(rows_of(r.count, r.width), r.width, threads,
            [&](size_t first, size_t last) { loops().rebuild(r, first, last, out + first * r.width); });
}

void prepare_rows(const Compensated& source, size_t count, size_t width, const std::vector<Axis>& axes, int kernel,
                  float* x, double* rows, double* places, int threads) {
    const size_t number = rows_of(count, width), together = rows_of(number, kGroups),
                 groups = rows_of(number, together);
    const size_t block = std::max<size_t>(1, kBlock / width);
    std::vector<double> sums(groups * width);
    in_blocks(groups, together * width * 12, threads, [&](size_t first, size_t last) {
        for (size_t row = first * together, end = std::min(number, last * together); row < end;) {
            const size_t group = row / together, n = std::min({block, end - row, (group + 1) * together - row});
            const size_t start = row * width, entries = std::min(count, start + n * width) - start;
            loops().compensate(source, start, entries, x + start);
            if (kernel > 1) loops().transform(x + start, entries, axes.data(), int(axes.size()), kernel);
            loops().energies(x + start, entries, width, rows + row, sums.data() + group * width);
            row += n;
        }
    });
    std::fill(places, places + width, 0.0);
    for (size_t g = 0; g < groups; g++)
        for (size_t q = 0; q < width; q++) places[q] += sums[g * width + q];
}

void add_prediction(float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank, float sign,
                    int threads) {
    in_rows(count / width, width, threads, [&](size_t first, size_t last) {
        loops().predict(x + first * width, (last - first) * width, width, left + first * rank, right, rank, sign);
    });
}

void axis_energies(const float* x, size_t count, size_t width, double* rows, double* places, int threads) {
    const size_t number = rows_of(count, width), together = rows_of(number, kGroups),
                 groups = rows_of(number, together);
    std::vector<double> sums(groups * width);
    in_blocks(groups, together * width * 4, threads, [&](size_t first, size_t last) {
        for (size_t g = first; g < last; g++) {
            const size_t start = g * together * width, stop = std::min(count, start + together * width);
            loops().energies(x + start, stop - start, width, rows + g * together, sums.data() + g * width);
        }
    });
    std::fill(places, places + width, 0.0);
    for (size_t g = 0; g < groups; g++)
        for (size_t q = 0; q < width; q++) places[q] += sums[g * width + q];
}

void project_rows(const float* x, size_t rows, size_t width, const float* basis, float* out, int threads) {
    // Cut at multiples of four rows, so that a row is summed up alike with any number of threads.
    in_blocks(rows_of(rows, kRowsTogether), kRowsTogether * width * 4, threads, [&](size_t first, size_t last) {
        const size_t start = first * kRowsTogether, stop = std::min(rows, last * kRowsTogether);
        loops().project_rows(x + start * width, stop - start, width, basis, out + start * kDirections);
    });
}

void project_columns(const float* x, size_t rows, size_t width, const float* basis, float* out, int threads) {
    constexpr size_t kStripe = 256;
    in_blocks(rows_of(width, kStripe), rows * kStripe * 4, threads, [&](size_t first, size_t last) {
        for (size_t i = first; i < last; i++)
            loops().project_columns(x, rows, width, i * kStripe, std::min(width, (i + 1) * kStripe), basis, out);
    });
}

void gram(const float* a, const float* b, size_t count, double* out) { loops().gram(a, b, count, out); }

// ── classes ──

namespace {

constexpr size_t kKept = 1 << 19;  // bytes of orders that are kept

// In which order the entries of a row stand in the streams, for one scale of the row: by class, then by place.
struct Order {
    std::unique_ptr<uint16_t[]> places;
    std::vector<uint32_t> ends;  // of the classes
};

class Orders {
  public:
    explicit Orders(const Classes& c) : c_(c), pattern_(c.width()) {
        for (size_t j = 0, q = 0; j < c.column_count; j++)
            for (size_t l = 0; l < c.coefficient_count; l++, q++)
                pattern_[q] = int16_t(c.columns[j] + c.coefficients[l] - c.base);
        even_ = std::all_of(pattern_.begin(), pattern_.end(), [&](int16_t p) { return p == pattern_[0]; });
    }

    int class_of(size_t row, size_t q) const { return std::clamp(c_.rows[row] + pattern_[q], 0, c_.number - 1); }
    bool even() const { return even_; }

    // Null where keeping orders would take too much memory.
    const Order* of(size_t row) {
        const size_t width = pattern_.size(), scale = size_t(c_.rows[row]);
        if (scale >= kept_.size()) kept_.resize(scale + 1);
        if (kept_[scale].places) return &kept_[scale];
        if (width > UINT16_MAX || (taken_ += width * 2) > kKept) return nullptr;
        Order& order = kept_[scale];
        order.places.reset(new uint16_t[width]);
        order.ends.assign(c_.number, 0);
        for (size_t q = 0; q < width; q++) order.ends[class_of(row, q)]++;
        uint32_t total = 0;
        std::vector<uint32_t> next(c_.number);
        for (int t = 0; t < c_.number; t++) {
            next[t] = total;
            order.ends[t] = total += order.ends[t];
        }
        for (size_t q = 0; q < width; q++) order.places[next[class_of(row, q)]++] = uint16_t(q);
        return &order;
    }

  private:
    const Classes& c_;
    std::vector<int16_t> pattern_;
    std::vector<Order> kept_;
    size_t taken_ = 0;
    bool even_;
};

}  // namespace

bool split_classes(const Classes& c, const uint8_t* symbols, size_t count, uint8_t* streams, int64_t* positions) {
    Orders orders(c);
    const size_t width = c.width();
    for (size_t row = 0, start = 0; start < count; row++, start += width) {
        const size_t n = std::min(width, count - start);
        const uint8_t* from = symbols + start;
        const Order* order;
        if (orders.even()) {
            int64_t& position = positions[orders.class_of(row, 0)];
            std::memcpy(streams + position, from, n);
            position += n;
        } else if (n == width && (order = orders.of(row))) {
            for (int t = 0, i = 0; t < c.number; t++) {
                uint8_t* to = streams + positions[t] - i;
                const int end = int(order->ends[t]);
                positions[t] += end - i;
                for (; i < end; i++) to[i] = from[order->places[i]];
            }
        } else {
            for (size_t q = 0; q < n; q++) streams[positions[orders.class_of(row, q)]++] = from[q];
        }
    }
    return true;
}

bool merge_classes(const Classes& c, const uint8_t* streams, size_t size, int64_t* positions, const uint8_t* zeros,
                   size_t first_row, size_t count, uint8_t* symbols) {
    Orders orders(c);
    const size_t width = c.width();
    for (size_t row = first_row, start = 0; start < count; row++, start += width) {
        const size_t n = std::min(width, count - start);
        uint8_t* to = symbols + start;
        const Order* order;
        if (orders.even()) {
            const int t = orders.class_of(row, 0);
            if (positions[t] + n > size) return false;
            const uint8_t* from = streams + positions[t];
            for (size_t q = 0; q < n; q++) to[q] = uint8_t(from[q] + zeros[t]);
            positions[t] += n;
        } else if (n == width && (order = orders.of(row))) {
            for (int t = 0, i = 0; t < c.number; t++) {
                const int end = int(order->ends[t]);
                if (positions[t] + (end - i) > int64_t(size)) return false;
                const uint8_t *from = streams + positions[t] - i, zero = zeros[t];
                positions[t] += end - i;
                for (; i < end; i++) to[order->places[i]] = uint8_t(from[i] + zero);
            }
        } else {
            for (size_t q = 0; q < n; q++) {
                const int t = orders.class_of(row, q);
                if (positions[t] >= int64_t(size)) return false;
                to[q] = uint8_t(streams[positions[t]++] + zeros[t]);
            }
        }
    }
    return true;
}

}  // namespace gradwire
