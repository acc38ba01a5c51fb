// How many packets a worker has under way, and how long it waits for results: docs/aggregator.md, "Lost packets".
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace gradwire {

class Pace {
  public:
    static constexpr uint64_t kReordering = 32;  // results of packets sent so much later: this one is lost

    void begin_session(double most) {
        most_ = threshold_ = std::max(1.0, most);
        window_ = std::min(kFirstWindow, most_);
        reduced_ = rtt_ = deviation_ = 0;
    }
    void begin_operation() { results_ = 0, burst_ = 1, doublings_ = 0; }

    uint64_t window() const { return uint64_t(window_); }

    void got_results(size_t count) {
        for (size_t i = 0; i < count; i++) window_ += window_ < threshold_ ? 1 : 8 / window_;
        window_ = std::min(window_, most_);
        results_ += count;
        doublings_ = 0;
    }

    void lost_some(double now) {
        if (now - reduced_ <= std::max(rtt_, 0.001)) return;  // once for all losses of a round trip
        window_ = threshold_ = std::min(most_, std::max(kSmallestWindow, window_ * 0.7));
        reduced_ = now;
    }

    void measured(double rtt) {
        if (!rtt_) rtt_ = rtt, deviation_ = rtt / 2;
        deviation_ += (std::fabs(rtt - rtt_) - deviation_) / 4;
        rtt_ += (rtt - rtt_) / 8;
    }

    // Seconds without a result until packets are sent again.
    double patience() const {
        double once = rtt_ ? std::max(kShortest, rtt_ + 4 * deviation_) : kFirst;
        return std::min(kLongest, std::ldexp(once, doublings_));
    }

    // How many, then. A worker may be late: if no result has come since the last time, it is one packet; while results
    // come, losses are likely, and it is more.
    size_t send_after_silence() {
        if (results_) {
            burst_ = std::min(kLongestBurst, std::max<size_t>(8, 4 * burst_));
            doublings_ = 0;
        } else {
            burst_ = 1;
            doublings_ = std::min(doublings_ + 1, 16);
        }
        results_ = 0;
        return burst_;
    }

  private:
    static constexpr double kShortest = 0.005, kLongest = 0.25, kFirst = 0.01;  // seconds
    static constexpr double kSmallestWindow = 32, kFirstWindow = 128;
    static constexpr size_t kLongestBurst = 256;

    double most_ = 1, window_ = 1, threshold_ = 1, reduced_ = 0, rtt_ = 0, deviation_ = 0;
    size_t results_ = 0, burst_ = 1;  // results since packets were last sent again after silence
    int doublings_ = 0;
};

}  // namespace gradwire
