// The search for a grid that meets an error: convert/grid_search.py, step by step.
//
// Trap: Python's math.log2 and ** are the C library's log2 and pow. The same operations in the same order find the same
// grid, so that the bytes do not depend on whether this is used.
#include <cmath>
#include <cstring>
#include <optional>

#include "grid.h"

namespace gradwire {
namespace {

constexpr float kShifts[] = {8 / 16.0f, 7 / 16.0f, 6 / 16.0f, 5 / 16.0f, 4 / 16.0f, 3 / 16.0f, 2 / 16.0f};
constexpr int kShiftCount = 7, kFirst = 2;
constexpr double kExact = 1e-12, kClose = 0.002;
constexpr double kSmallestStep = 0x1p-126, kLargestStep = 0x1p126;

// The nearest bf16 number in the allowed range: convert/minifloat.py.
double round_step(double step) {
    const float nearest = float(std::fmin(std::fmax(step, kSmallestStep), kLargestStep));
    uint32_t bits;
    std::memcpy(&bits, &nearest, 4);
    bits = (bits + 0x8000) & 0xffff0000u;
    float rounded;
    std::memcpy(&rounded, &bits, 4);
    return double(rounded);
}

struct Found {
    double step;
    float shift;
    Measured m;
};

class Search {
  public:
    Search(const Sample& sample, double error) : s_(sample), wanted_(error) {}

    std::optional<Found> find() {
        size_t low = 0, high = s_.n;  // the first that is not negative
        while (low < high) {
            const size_t middle = (low + high) / 2;
            s_.x[middle] < 0 ? low = middle + 1 : high = middle;
        }
        const double mean = (s_.first[s_.n] - 2 * s_.first[low]) / double(s_.n);
        std::optional<Found> best = solve(kShifts[kFirst], mean * std::pow(2.0, 1.0), 0.5);
        if (!best) return best;
        for (int direction : {1, -1}) {  // towards wider cells of zero, then towards narrower ones
            for (int i = kFirst + direction; i >= 0 && i < kShiftCount; i += direction) {
                const std::optional<Found> other = solve(kShifts[i], best->step, 1 / 16.0);
                if (!other) return other;
                if (!better(other->m, best->m)) break;
                best = other;
            }
            if (best->shift < kShifts[kFirst]) break;
        }
        return best;
    }

  private:
    std::optional<Found> at(double log_step, float shift) const {
        Found found{round_step(std::pow(2.0, std::fmin(std::fmax(log_step, -126.0), 126.0))), shift, {}};
        if (!grid_measure(s_.x, s_.first, s_.second, s_.n, s_.zeros, s_.logs, float(found.step), shift, found.m))
            return std::nullopt;
        return found;
    }
    double over(const std::optional<Found>& grid) const {
        return grid ? std::log2(std::fmax(wanted_, 1e-300) / std::fmax(grid->m.error, 1e-300)) / 2 : INFINITY;
    }
    bool better(const Measured& a, const Measured& b) const {
        const double gain = std::log2(std::fmax(b.error, 1e-300) / std::fmax(a.error, 1e-300)) / 2 *
                            double(int64_t(s_.n) + s_.zeros);
        return gain + b.bits - a.bits > 0;
    }

    // By a bracket around `near` and regula falsi on log2 of the step.
    std::optional<Found> solve(float shift, double near, double stride) const {
        const double top = std::log2(kLargestStep), bottom = std::log2(kSmallestStep);
        double high = std::log2(std::fmin(std::fmax(near, kSmallestStep), kLargestStep)), up = stride, down = stride;
        std::optional<Found> grid = at(high, shift);
        double low = high, excess_low = -INFINITY, excess_high;
        while ((excess_high = over(grid)) > 0 && high < top) {  // not coarse enough
            low = high;
            excess_low = excess_high;
            high += up;
            up *= 2;
            grid = at(high, shift);
        }
        std::optional<Found> best = grid;
        if (!best || excess_high > 0) return best;  // there is no larger step
        while (excess_low <= 0) {  // not fine enough
            low -= down;
            down = std::fmin(2 * down, 1.0);
            grid = at(low, shift);
            excess_low = over(grid);
            if (excess_low > 0) break;
            high = low;
            excess_high = excess_low;
            if (grid->m.error <= best->m.error) best = grid;
            if (grid->m.error <= kExact * s_.energy || low < bottom) return best;  // out of reach
        }
        for (int i = 0; i < 12 && !(-kClose <= excess_high && excess_high <= 0); i++) {
            const double weight = std::isinf(excess_low) ? 0.5 : excess_low / (excess_low - excess_high);
            const double middle = low + (high - low) * std::fmin(std::fmax(weight, 0.1), 0.9);
            grid = at(middle, shift);
            const double excess = over(grid);
            if (excess > 0) {
                low = middle;
                excess_low = excess;
            } else {
                high = middle;
                excess_high = excess;
                best = grid;
            }
        }
        return best;
    }

    const Sample s_;
    double wanted_;
};

}  // namespace

bool grid_search(const Sample& sample, double error, float& step, float& shift, Measured& out) {
    const std::optional<Found> found = Search(sample, error).find();
    if (!found) return false;
    step = float(found->step);
    shift = found->shift;
    out = found->m;
    return true;
}

void running_sums(const float* x, size_t n, double* first, double* second) {
    double sum = first[0] = 0, squares = second[0] = 0;
    for (size_t i = 0; i < n; i++) {
        const double v = x[i];
        first[i + 1] = sum += v;
        second[i + 1] = squares += v * v;
    }
}

}  // namespace gradwire
