// Arrays for results whose size is known only afterwards.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "bindings.h"

namespace gradwire {

// Blocks of memory that are handed to numpy and come back: on a large tensor, fresh pages cost more than what is
// written to them. A few are kept, none of them large. A fork waits until nobody has the pool, so that in the child it
// is whole and free: the thread that had it would not be there.
class Pool {
  public:
    struct Block {
        char* data;
        size_t room;
    };

    Block take(size_t bytes) {
        std::lock_guard<std::mutex> guard(mutex_);
        for (size_t i = 0; i < kept_.size(); i++)
            if (kept_[i].room >= bytes && kept_[i].room / 4 <= bytes) {
                const Block found = kept_[i];
                kept_[i] = kept_.back();
                kept_.pop_back();
                return found;
            }
        return {new char[bytes], bytes};
    }
    void give_back(Block block) {
        std::lock_guard<std::mutex> guard(mutex_);
        if (block.room >= kSmallest && block.room <= kLargest && kept_.size() < kBlocks)
            kept_.push_back(block);
        else
            delete[] block.data;
    }
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

  private:
    static constexpr size_t kSmallest = 1 << 16, kLargest = 1 << 24, kBlocks = 8;
    std::mutex mutex_;
    std::vector<Block> kept_;
};

inline Pool& pool() {
    static Pool* one = [] {
        pthread_atfork([] { pool().lock(); }, [] { pool().unlock(); }, [] { pool().unlock(); });
        return new Pool;  // never destroyed: arrays may outlive everything else
    }();
    return *one;
}

// Room in a block of the pool, of which the front becomes an array of numpy's once it is known how much was needed.
template <class T>
class Room {
  public:
    explicit Room(size_t n)
        : block_(std::make_unique<Pool::Block>(pool().take(std::max<size_t>(1, n) * sizeof(T)))),
          data_(reinterpret_cast<T*>(block_->data)) {}
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    ~Room() {
        if (block_) pool().give_back(*block_);
    }
    T* data() const { return data_; }
    nb::object front(size_t n) {  // once
        nb::capsule owner(block_.get(), [](void* p) noexcept {
            pool().give_back(*static_cast<Pool::Block*>(p));
            delete static_cast<Pool::Block*>(p);
        });
        block_.release();
        return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data_, {n}, owner));
    }

  private:
    std::unique_ptr<Pool::Block> block_;
    T* data_;
};

// An array of numpy's in a block of the pool, and where its entries are.
template <class T>
std::pair<nb::object, T*> array(size_t n) {
    Room<T> room(n);
    T* data = room.data();
    return {room.front(n), data};
}

// The same with a copy of these entries.
template <class T>
nb::object array_of(const T* entries, size_t n) {
    auto [result, data] = array<T>(n);
    std::copy_n(entries, n, data);
    return result;
}

}  // namespace gradwire
