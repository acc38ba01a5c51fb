// Memory of a thread that is kept for the next tensor: fresh pages cost more than what is written to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace gradwire {

class KeptRoom {
  public:
    // Room for so many bytes, with any contents, until the next call. What is very long is not kept.
    uint8_t* of(size_t bytes) {
        constexpr size_t kKept = 1 << 25;
        if (bytes > room_ || room_ > kKept) {
            data_.reset();
            data_.reset(new uint8_t[bytes]);
            room_ = bytes;
        }
        return data_.get();
    }

  private:
    std::unique_ptr<uint8_t[]> data_;
    size_t room_ = 0;
};

}  // namespace gradwire
