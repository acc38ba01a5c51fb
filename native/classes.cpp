// Symbols to classes and back: see classes.h.
#include "classes.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "threads.h"

namespace gradwire {
namespace {

constexpr size_t kKept = 1 << 19;  // bytes of orders that are kept
constexpr size_t kBlock = 1 << 13;  // entries of rows that are done together: they stay in the caches
constexpr size_t kGroup = 1 << 17;  // entries of rows that a thread takes at a time

size_t rows_of(size_t count, size_t width) { return (count + width - 1) / width; }

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

// `count` symbols of the rows from `first_row` on.
void split_rows(const Classes& c, Orders& orders, size_t first_row, const uint8_t* symbols, size_t count,
                uint8_t* streams, int64_t* positions) {
    const size_t width = c.width();
    for (size_t row = first_row, start = 0; start < count; row++, start += width) {
        const size_t n = std::min(width, count - start);
        const uint8_t* from = symbols + start;
        const Order* order;
        if (orders.even()) {
            int64_t& position = positions[orders.class_of(row, 0)];
            std::memcpy(streams + position, from, n);
            position += n;
        } else if (n == width && (order = orders.of(row))) {
            const uint16_t* places = order->places.get();
            for (int t = 0, i = 0; t < c.number; t++) {
                const int end = int(order->ends[t]);
                uint8_t* to = streams + positions[t];
                positions[t] += end - i;
                for (; i + 8 <= end; i += 8, to += 8) {
                    const uint8_t eight[8] = {from[places[i]],     from[places[i + 1]], from[places[i + 2]],
                                              from[places[i + 3]], from[places[i + 4]], from[places[i + 5]],
                                              from[places[i + 6]], from[places[i + 7]]};
                    std::memcpy(to, eight, 8);
                }
                for (; i < end; i++) *to++ = from[places[i]];
            }
        } else {
            for (size_t q = 0; q < n; q++) streams[positions[orders.class_of(row, q)]++] = from[q];
        }
    }
}

bool merge_rows(const Classes& c, Orders& orders, const uint8_t* streams, size_t size, int64_t* positions,
                const uint8_t* zeros, size_t first_row, size_t count, uint8_t* symbols) {
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
            const uint16_t* places = order->places.get();
            for (int t = 0, i = 0; t < c.number; t++) {
                const int end = int(order->ends[t]);
                if (positions[t] + (end - i) > int64_t(size)) return false;
                const uint8_t *from = streams + positions[t], zero = zeros[t];
                positions[t] += end - i;
                for (; i + 4 <= end; i += 4, from += 4) {
                    to[places[i]] = uint8_t(from[0] + zero);
                    to[places[i + 1]] = uint8_t(from[1] + zero);
                    to[places[i + 2]] = uint8_t(from[2] + zero);
                    to[places[i + 3]] = uint8_t(from[3] + zero);
                }
                for (; i < end; i++) to[places[i]] = uint8_t(*from++ + zero);
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

void count_rows(const Classes& c, Orders& orders, size_t first_row, size_t count, int64_t* counts) {
    const size_t width = c.width();
    for (size_t row = first_row, start = 0; start < count; row++, start += width) {
        const size_t n = std::min(width, count - start);
        const Order* order;
        if (orders.even())
            counts[orders.class_of(row, 0)] += int64_t(n);
        else if (n == width && (order = orders.of(row)))
            for (int t = 0; t < c.number; t++) counts[t] += order->ends[t] - (t ? order->ends[t - 1] : 0);
        else
            for (size_t q = 0; q < n; q++) counts[orders.class_of(row, q)]++;
    }
}

// Groups of rows, and where the symbols of each class begin in every group.
struct Groups {
    size_t rows, together, number;
    std::vector<int64_t> positions;  // of group after group

    Groups(const Classes& c, Orders& orders, size_t count, bool alone) {
        const size_t width = c.width(), classes = size_t(c.number);
        rows = rows_of(count, width);
        together = alone ? rows : std::max<size_t>(1, kGroup / width);
        number = rows_of(rows, together);
        positions.assign(classes * (number + 1), 0);
        for (size_t g = 0; g < number; g++)
            count_rows(c, orders, g * together, entries(g, count, width), positions.data() + (g + 1) * classes);
        // Counts of each group to where its classes begin: behind those of all groups before, and of all classes before.
        std::vector<int64_t> total(classes);
        for (size_t g = 1; g <= number; g++)
            for (size_t t = 0; t < classes; t++) {
                total[t] += positions[g * classes + t];
                positions[g * classes + t] = total[t];
            }
        int64_t before = 0;
        for (size_t t = 0; t < classes; before += total[t++])
            for (size_t g = 0; g <= number; g++) positions[g * classes + t] += before;
    }
    size_t entries(size_t group, size_t count, size_t width) const {
        return std::min(count, (group + 1) * together * width) - group * together * width;
    }
};

// Quantizes the rows of a group, a few at a time, and shares them out.
void quantize_group(const Grid& g, const Classes& c, Orders& orders, const float* x, size_t first_row, size_t start,
                    size_t entries, uint8_t* symbols, uint8_t* streams, int64_t* positions, Outliers& outliers) {
    const size_t width = c.width(), together = std::max<size_t>(1, kBlock / width) * width;
    for (size_t i = 0; i < entries; i += together, first_row += together / width) {
        const size_t n = std::min(together, entries - i);
        const Stream part{x + start + i, nullptr, nullptr, n, start + i};
        grid_kernels().quantize(g, part, symbols + start + i, outliers);
        split_rows(c, orders, first_row, symbols + start + i, n, streams, positions);
    }
}

}  // namespace

bool merge_classes(const Classes& c, const uint8_t* streams, size_t size, int64_t* positions, const uint8_t* zeros,
                   size_t first_row, size_t count, uint8_t* symbols) {
    Orders orders(c);
    return merge_rows(c, orders, streams, size, positions, zeros, first_row, count, symbols);
}

void count_classes(const Classes& c, size_t first_row, size_t count, int64_t* counts) {
    Orders orders(c);
    count_rows(c, orders, first_row, count, counts);
}

void quantize_classes(const Grid& g, const Classes& c, const float* x, size_t count, uint8_t* symbols, uint8_t* streams,
                      int64_t* counts, Outliers& outliers, int threads) {
    const size_t width = c.width(), useful = threads_for(count * 6, threads), kinds = 2 * size_t(g.largest) + 1;
    Orders orders(c);
    Groups groups(c, orders, count, useful == 1);
    const std::vector<int64_t> begins = groups.positions;
    // Whether an outlier finds room depends on all before it: threads go ahead as if there were room for all, and if
    // there is not, which is rare, all is done again by one.
    std::vector<std::vector<int64_t>> where(groups.number);
    std::vector<std::vector<int32_t>> what(groups.number);
    std::atomic<bool> full{false};
    if (useful > 1) {
        std::atomic<size_t> next{0};
        on_threads(useful, [&] {
            Orders own(c);
            std::vector<int64_t> room(groups.together * width / 8 + 16);
            std::vector<int32_t> room2(room.size());
            for (size_t i; !full && (i = next.fetch_add(1)) < groups.number;) {
                Outliers some{room.data(), room2.data(), 0, room.size()};
                const size_t first = i * groups.together;
                quantize_group(g, c, own, x, first, first * width, groups.entries(i, count, width), symbols, streams,
                               groups.positions.data() + i * size_t(c.number), some);
                if (some.count == some.capacity) full = true;
                where[i].assign(room.data(), room.data() + some.count);
                what[i].assign(room2.data(), room2.data() + some.count);
            }
        });
        size_t total = 0;
        for (const auto& each : where) total += each.size();
        if (total > outliers.capacity) full = true;
    }
    if (useful == 1 || full) {
        groups.positions = begins;
        outliers.count = 0;
        for (size_t i = 0; i < groups.number; i++) {
            const size_t first = i * groups.together;
            quantize_group(g, c, orders, x, first, first * width, groups.entries(i, count, width), symbols, streams,
                           groups.positions.data() + i * size_t(c.number), outliers);
        }
    } else {
        for (size_t i = 0; i < groups.number; i++) {
            std::copy(where[i].begin(), where[i].end(), outliers.positions + outliers.count);
            std::copy(what[i].begin(), what[i].end(), outliers.multiples + outliers.count);
            outliers.count += where[i].size();
        }
    }
    in_blocks(size_t(c.number), std::max<size_t>(1, count / size_t(c.number)), threads, [&](size_t first, size_t last) {
        for (size_t t = first; t < last; t++) {
            int64_t all[256] = {};
            const size_t begin = size_t(begins[t]), end = size_t(begins[groups.number * size_t(c.number) + t]);
            structure_kernels().count_symbols(streams + begin, end - begin, all);
            std::copy_n(all, kinds, counts + t * kinds);
        }
    });
}

void rebuild_classes(const MergedRebuild& m, float* out, int threads) {
    const Classes& c = *m.classes;
    const Rebuild& all = m.all;
    const size_t width = all.width, useful = threads_for(all.count * 8, threads), rank = size_t(all.rank);
    Orders orders(c);
    Groups groups(c, orders, all.count, useful == 1);
    const size_t together = std::max<size_t>(1, kBlock / width);
    std::atomic<size_t> next{0};
    const auto work = [&](Orders& own) {
        std::vector<uint8_t> symbols(std::min(groups.rows, together) * width);
        std::vector<float> left(together * rank);
        for (size_t g; (g = next.fetch_add(1)) < groups.number;) {
            int64_t* positions = groups.positions.data() + g * size_t(c.number);
            const size_t last = std::min(groups.rows, (g + 1) * groups.together);
            for (size_t row = g * groups.together; row < last; row += together) {
                const size_t end = std::min(last, row + together), start = row * width;
                const size_t n = std::min(all.count, end * width) - start;
                Rebuild part = all;
                if (m.streams) {
                    merge_rows(c, own, m.streams, all.count, positions, m.zeros, row, n, symbols.data());
                    part.symbols = symbols.data();
                }
                for (size_t i = 0; i < (end - row) * rank; i++)
                    left[i] = float(m.rows[row * rank + i]) * m.scales[i % rank];
                part.left = left.data();
                part.first_row = row;
                structure_kernels().rebuild(part, row, end, out + start);
            }
        }
    };
    if (useful == 1) return work(orders);
    on_threads(useful, [&] {
        Orders own(c);
        work(own);
    });
}

}  // namespace gradwire
