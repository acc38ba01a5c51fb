// Symbols to classes and back: see classes.h.
#include "classes.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>

#include "threads.h"

namespace gradwire {
namespace {

constexpr int kMostClasses = 32;
constexpr size_t kKept = 1 << 20;  // bytes of orders that are kept
constexpr size_t kBlock = 1 << 13;  // entries of rows that are done together: they stay in the caches
constexpr size_t kGroup = 1 << 17;  // entries of rows that a thread takes at a time

size_t rows_of(size_t count, size_t width) { return (count + width - 1) / width; }

// In which order the entries of a row stand in the streams, for one scale of the row: by class, then by place.
struct Order {
    std::vector<uint32_t> counts;  // of the classes
    std::unique_ptr<uint16_t[]> places;  // class after class
    ClassParts parts;  // in place of places, where there are loops for them
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
        if (!kept_[scale].counts.empty()) return &kept_[scale];
        const bool in_parts = structure_kernels().parts.split;
        const size_t bytes = in_parts ? sizeof(ClassPart) * rows_of(width, 64) * size_t(c_.number) : 2 * width;
        if (width > UINT16_MAX || (taken_ += bytes) > kKept) return nullptr;
        Order& order = kept_[scale];
        order.counts.assign(c_.number, 0);
        if (in_parts)
            make_parts(row, order);
        else
            make_places(row, order);
        return &order;
    }

  private:
    void make_places(size_t row, Order& order) const {
        const size_t width = pattern_.size();
        order.places.reset(new uint16_t[width]);
        for (size_t q = 0; q < width; q++) order.counts[class_of(row, q)]++;
        std::vector<uint32_t> next(c_.number);
        std::exclusive_scan(order.counts.begin(), order.counts.end(), next.begin(), 0u);
        for (size_t q = 0; q < width; q++) order.places[next[class_of(row, q)]++] = uint16_t(q);
    }
    void make_parts(size_t row, Order& order) const {
        const size_t width = pattern_.size();
        for (size_t first = 0; first < width; first += 64) {
            uint64_t masks[kMostClasses] = {};
            for (size_t q = first; q < std::min(width, first + 64); q++)
                masks[class_of(row, q)] |= uint64_t(1) << (q - first);
            for (int t = 0; t < c_.number; t++) {
                if (!masks[t]) continue;
                const int number = __builtin_popcountll(masks[t]);
                order.parts.parts.push_back({masks[t], uint16_t(order.counts[t]), uint8_t(t), uint8_t(number)});
                order.counts[t] += uint32_t(number);
            }
            order.parts.ends.push_back(uint32_t(order.parts.parts.size()));
        }
    }

    const Classes& c_;
    std::vector<int16_t> pattern_;
    std::vector<Order> kept_;
    size_t taken_ = 0;
    bool even_;
};

// `count` symbols of the rows from `first_row` on; `limits` has where the symbols of others begin.
void split_rows(const Classes& c, Orders& orders, size_t first_row, const uint8_t* symbols, size_t count,
                uint8_t* streams, int64_t* positions, const int64_t* limits) {
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
            if (!order->places) {
                structure_kernels().parts.split(order->parts, from, width, streams, positions, limits);
                for (int t = 0; t < c.number; t++) positions[t] += order->counts[t];
                continue;
            }
            const uint16_t* places = order->places.get();
            for (int t = 0; t < c.number; t++) {
                const int number = int(order->counts[t]);
                uint8_t* to = streams + positions[t];
                positions[t] += number;
                int i = 0;
                for (; i + 8 <= number; i += 8, to += 8) {
                    const uint8_t eight[8] = {from[places[i]],     from[places[i + 1]], from[places[i + 2]],
                                              from[places[i + 3]], from[places[i + 4]], from[places[i + 5]],
                                              from[places[i + 6]], from[places[i + 7]]};
                    std::memcpy(to, eight, 8);
                }
                for (; i < number; i++) *to++ = from[places[i]];
                places += number;
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
            for (int t = 0; t < c.number; t++)
                if (positions[t] + order->counts[t] > int64_t(size)) return false;
            if (!order->places) {
                structure_kernels().parts.merge(order->parts, streams, size, positions, zeros, width, to);
                for (int t = 0; t < c.number; t++) positions[t] += order->counts[t];
                continue;
            }
            const uint16_t* places = order->places.get();
            for (int t = 0; t < c.number; t++) {
                const int number = int(order->counts[t]);
                const uint8_t *from = streams + positions[t], zero = zeros[t];
                positions[t] += number;
                int i = 0;
                for (; i + 4 <= number; i += 4, from += 4) {
                    to[places[i]] = uint8_t(from[0] + zero);
                    to[places[i + 1]] = uint8_t(from[1] + zero);
                    to[places[i + 2]] = uint8_t(from[2] + zero);
                    to[places[i + 3]] = uint8_t(from[3] + zero);
                }
                for (; i < number; i++) to[places[i]] = uint8_t(*from++ + zero);
                places += number;
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
            for (int t = 0; t < c.number; t++) counts[t] += order->counts[t];
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

// What is done with the rows of a group.
class GroupWork {
  public:
    GroupWork(const Grid& g, const Classes& c, const Remainder& r, uint8_t* symbols, uint8_t* streams, float* memory)
        : g_(g), c_(c), r_(r), symbols_(symbols), streams_(streams), memory_(memory) {}

    // Quantizes rows, a few at a time, shares them out, and rebuilds them, all while they are in the caches.
    void quantize(Orders& orders, size_t first_row, size_t entries, int64_t* positions, const int64_t* limits,
                  Outliers& outliers) {
        const size_t width = c_.width(), together = std::max<size_t>(1, kBlock / width) * width;
        const size_t start = first_row * width;
        for (size_t i = 0; i < entries; i += together, first_row += together / width) {
            const size_t n = std::min(together, entries - i);
            if (memory_ && !r_.rows.source)
                quantize_and_keep(first_row, start + i, n, outliers);
            else
                quantize_rows(first_row, start + i, n, outliers);
            split_rows(c_, orders, first_row, symbols_ + start + i, n, streams_, positions, limits);
            if (memory_ && r_.rows.source) rebuild(first_row, start + i, n, outliers);
        }
    }

  private:
    const float* left(size_t row) const { return r_.rows.left + row * size_t(r_.rows.rank); }

    // The prediction of some rows, times sign, added to x, or to zero.
    const float* predicted(size_t first_row, size_t n, float sign, const float* x) {
        if (room_.size() < n) room_.resize(n);
        x ? (void)std::copy_n(x, n, room_.data()) : (void)std::fill_n(room_.data(), n, 0.0f);
        structure_kernels().predict(room_.data(), n, c_.width(), left(first_row), r_.rows.right, r_.rows.rank, sign);
        return room_.data();
    }

    void quantize_rows(size_t first_row, size_t start, size_t n, Outliers& outliers) {
        const float* x = r_.rows.rank ? predicted(first_row, n, -1.0f, r_.x + start) : r_.x + start;
        grid_kernels().quantize(g_, {x, nullptr, nullptr, n, start}, symbols_ + start, outliers);
    }
    void quantize_and_keep(size_t first_row, size_t start, size_t n, Outliers& outliers) {
        const float* prediction = r_.rows.rank ? predicted(first_row, n, 1.0f, nullptr) : nullptr;
        structure_kernels().quantize(
            g_, {r_.x + start, prediction, n, start, r_.rows.values, symbols_ + start, memory_ + start}, outliers);
    }
    void rebuild(size_t first_row, size_t start, size_t n, const Outliers& outliers) {
        while (apart_.size() < outliers.count) apart_.push_back(g_.beyond(outliers.multiples[apart_.size()]));
        Rebuild rows = r_.rows;
        rows.symbols = symbols_ + start;
        rows.first_row = first_row;
        rows.left = left(first_row);
        rows.positions = outliers.positions;
        rows.outliers = apart_.data();
        rows.number = outliers.count;
        structure_kernels().rebuild(rows, first_row, first_row + rows_of(n, c_.width()), memory_ + start);
    }

    const Grid& g_;
    const Classes& c_;
    const Remainder& r_;
    uint8_t *symbols_, *streams_;
    float* memory_;
    std::vector<float> room_, apart_;
};

// What is kept of all rows, where there was no time for it before.
void rebuild_all(const Grid& g, const Remainder& r, const uint8_t* symbols, const Outliers& outliers, int threads) {
    std::vector<float> apart;
    for (size_t i = 0; i < outliers.count; i++) apart.push_back(g.beyond(outliers.multiples[i]));
    Rebuild rows = r.rows;
    rows.symbols = symbols;
    rows.positions = outliers.positions;
    rows.outliers = apart.data();
    rows.number = outliers.count;
    rebuild_rows(rows, r.memory, threads);
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

void quantize_classes(const Grid& g, const Classes& c, const Remainder& r, uint8_t* symbols, uint8_t* streams,
                      int64_t* counts, Outliers& outliers, int threads) {
    const size_t count = r.rows.count, width = c.width(), classes = size_t(c.number);
    const size_t useful = threads_for(count * 6, threads), kinds = 2 * size_t(g.largest) + 1;
    Orders orders(c);
    Groups groups(c, orders, count, useful == 1);
    const std::vector<int64_t> begins = groups.positions;
    const auto limits = [&](size_t group) { return begins.data() + (group + 1) * classes; };
    // Whether an outlier finds room depends on all before it: threads go ahead as if there were room for all, and if
    // there is not, which is rare, all is done again by one. Unless x is still there for that, they leave the memory be.
    std::vector<std::vector<int64_t>> where(groups.number);
    std::vector<std::vector<int32_t>> what(groups.number);
    std::atomic<bool> full{false};
    if (useful > 1) {
        std::atomic<size_t> next{0};
        on_threads(useful, [&] {
            Orders own(c);
            GroupWork work(g, c, r, symbols, streams, r.rows.source ? nullptr : r.memory);
            std::vector<int64_t> room(groups.together * width / 8 + 16);
            std::vector<int32_t> room2(room.size());
            for (size_t i; !full && (i = next.fetch_add(1)) < groups.number;) {
                Outliers some{room.data(), room2.data(), 0, room.size()};
                work.quantize(own, i * groups.together, groups.entries(i, count, width),
                              groups.positions.data() + i * classes, limits(i), some);
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
        GroupWork work(g, c, r, symbols, streams, r.memory);
        groups.positions = begins;
        outliers.count = 0;
        for (size_t i = 0; i < groups.number; i++)
            work.quantize(orders, i * groups.together, groups.entries(i, count, width),
                          groups.positions.data() + i * classes, limits(i), outliers);
    } else {
        for (size_t i = 0; i < groups.number; i++) {
            std::copy(where[i].begin(), where[i].end(), outliers.positions + outliers.count);
            std::copy(what[i].begin(), what[i].end(), outliers.multiples + outliers.count);
            outliers.count += where[i].size();
        }
        if (r.memory && r.rows.source) rebuild_all(g, r, symbols, outliers, threads);
    }
    in_blocks(classes, std::max<size_t>(1, count / classes), threads, [&](size_t first, size_t last) {
        for (size_t t = first; t < last; t++) {
            int64_t all[256] = {};
            const size_t begin = size_t(begins[t]), end = size_t(begins[groups.number * classes + t]);
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
