// The loops over rows, compiled once per instruction set.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "rows.h"

namespace gradwire {
namespace {  // one copy per instruction set

using Half = uint16_t;  // the bits of a bf16 number: the upper half of an fp32 one
constexpr int kSums = 16;

// Vectors of so many numbers; written out, since gcc knows no vectors whose size is a template's parameter.
struct Of1 {
    static constexpr int count = 1;
    typedef float Floats __attribute__((vector_size(4)));
    typedef double Doubles __attribute__((vector_size(8)));
    typedef uint32_t Words __attribute__((vector_size(4)));
    typedef Half Halves __attribute__((vector_size(2)));
};
struct Of2 {
    static constexpr int count = 2;
    typedef float Floats __attribute__((vector_size(8)));
    typedef double Doubles __attribute__((vector_size(16)));
    typedef uint32_t Words __attribute__((vector_size(8)));
    typedef Half Halves __attribute__((vector_size(4)));
};
struct Of4 {
    static constexpr int count = 4;
    typedef float Floats __attribute__((vector_size(16)));
    typedef double Doubles __attribute__((vector_size(32)));
    typedef uint32_t Words __attribute__((vector_size(16)));
    typedef Half Halves __attribute__((vector_size(8)));
};
struct Of8 {
    static constexpr int count = 8;
    typedef float Floats __attribute__((vector_size(32)));
    typedef double Doubles __attribute__((vector_size(64)));
    typedef uint32_t Words __attribute__((vector_size(32)));
    typedef Half Halves __attribute__((vector_size(16)));
};
struct Of16 {
    static constexpr int count = 16;
    typedef float Floats __attribute__((vector_size(64)));
    typedef double Doubles __attribute__((vector_size(128)));
    typedef uint32_t Words __attribute__((vector_size(64)));
    typedef Half Halves __attribute__((vector_size(32)));
};

template <class V>
struct Wide : V {
    using typename V::Floats, typename V::Doubles, typename V::Words, typename V::Halves;

    static Floats load(const float* at) {
        Floats x;
        std::memcpy(&x, at, sizeof x);
        return x;
    }
    static Floats load(const Half* at) {
        Halves x;
        std::memcpy(&x, at, sizeof x);
        return (Floats)(__builtin_convertvector(x, Words) << 16);
    }
    static void store(float* at, Floats x) { std::memcpy(at, &x, sizeof x); }
    static void store(Half* at, Floats x) {
        const Words bits = (Words)x, nan = (bits >> 16) | 0x40u;
        const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
        const Words is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
        const Halves half = __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), Halves);
        std::memcpy(at, &half, sizeof half);
    }
};

// Entries of keep·memory + scale·(row − mean). Memory is void where nothing is remembered, Mean where there is none.
template <class Row, class Mean, class Memory>
struct Joined {
    const Row* row;
    const Mean* mean;
    const Memory* memory;
    float keep, scale;

    Joined(const void* row, const void* mean, const void* memory, float keep, float scale)
        : row(static_cast<const Row*>(row)), mean(static_cast<const Mean*>(mean)),
          memory(static_cast<const Memory*>(memory)), keep(keep), scale(scale) {}

    template <class V>
    typename V::Floats centred(size_t i) const {
        if constexpr (std::is_void_v<Mean>)
            return Wide<V>::load(row + i);
        else
            return Wide<V>::load(row + i) - Wide<V>::load(mean + i);
    }
    template <class V>
    typename V::Floats at(size_t i) const {
        const typename V::Floats entered = centred<V>(i) * scale;
        if constexpr (std::is_void_v<Memory>)
            return entered;
        else
            return Wide<V>::load(memory + i) * keep + entered;
    }
};

// step(i, vectors) for columns from 0 to n, with vectors of one number where fewer are left.
template <class V, class Step>
inline void each_column(size_t n, Step step) {
    size_t i = 0;
    for (; i + V::count <= n; i += V::count) step(i, V());
    for (; i < n; i++) step(i, Of1());
}

template <class V, class Row, class Mean, class Memory>
double norm_of(const void* row, const void* mean, const void* memory, size_t columns, float keep, float scale) {
    using Doubles = typename V::Doubles;
    constexpr int N = V::count;
    const Joined<Row, Mean, Memory> joined(row, mean, memory, keep, scale);
    Doubles part[kSums / N] = {};
    size_t i = 0;
    for (; i + kSums <= columns; i += kSums)
        for (int v = 0; v < kSums / N; v++) {
            const auto u = __builtin_convertvector(joined.template at<V>(i + size_t(v * N)), Doubles);
            part[v] += u * u;
        }
    double sums[kSums];
    std::memcpy(sums, part, sizeof sums);
    for (; i < columns; i++) {
        const double u = joined.template at<Of1>(i)[0];
        sums[i % kSums] += u * u;
    }
    for (int half = kSums / 2; half; half /= 2)
        for (int s = 0; s < half; s++) sums[s] += sums[s + half];
    return std::sqrt(sums[0]);
}

template <class V, class Row, class Mean, class Memory>
void join_into(const void* row, const void* mean, void* memory, size_t columns, float keep, float scale) {
    if constexpr (!std::is_void_v<Memory>) {
        const Joined<Row, Mean, Memory> joined(row, mean, memory, keep, scale);
        Memory* out = static_cast<Memory*>(memory);
        each_column<V>(columns, [&](size_t i, auto v) {
            Wide<decltype(v)>::store(out + i, joined.template at<decltype(v)>(i));
        });
    }
}

template <class Row, class Mean>
bool is_zero(const void* row, const void* mean, size_t columns) {
    const Joined<Row, Mean, void> joined(row, mean, nullptr, 0, 0);
    for (size_t i = 0; i < columns; i++)  // of most rows, one is enough
        if (joined.template centred<Of1>(i)[0] != 0) return false;
    return true;
}

template <class V, class Row, class Mean, class Memory>
void take_from(const void* row, const void* mean, void* memory, size_t columns, float gain, void* taken) {
    if (!columns) return;
    Row* out = static_cast<Row*>(taken);
    if constexpr (!std::is_void_v<Memory>) {
        const Memory* in = static_cast<const Memory*>(memory);
        each_column<V>(columns, [&](size_t i, auto v) {
            Wide<decltype(v)>::store(out + i, Wide<decltype(v)>::load(in + i) * gain);
        });
        std::memset(memory, 0, columns * sizeof(Memory));
    } else if constexpr (std::is_void_v<Mean>) {
        std::memcpy(taken, row, columns * sizeof(Row));
    } else {
        const Joined<Row, Mean, void> joined(row, mean, nullptr, 0, 0);
        each_column<V>(columns, [&](size_t i, auto v) {
            Wide<decltype(v)>::store(out + i, joined.template centred<decltype(v)>(i));
        });
    }
}

// V for sums in doubles, W, of as many floats as a register has, for the rest.
template <class V, class W, class Row, class Mean, class Memory>
constexpr RowLoops row_loops{norm_of<V, Row, Mean, Memory>, join_into<W, Row, Mean, Memory>, is_zero<Row, Mean>,
                             take_from<W, Row, Mean, Memory>};

template <class V, class W>
constexpr RowKernels row_kernels() {
    return {{{{row_loops<V, W, float, void, void>, row_loops<V, W, float, float, void>},
              {row_loops<V, W, float, void, float>, row_loops<V, W, float, float, float>},
              {row_loops<V, W, float, void, Half>, row_loops<V, W, float, float, Half>}},
             {{row_loops<V, W, Half, void, void>, row_loops<V, W, Half, Half, void>},
              {row_loops<V, W, Half, void, float>, row_loops<V, W, Half, Half, float>},
              {row_loops<V, W, Half, void, Half>, row_loops<V, W, Half, Half, Half>}}}};
}

}  // namespace
}  // namespace gradwire
