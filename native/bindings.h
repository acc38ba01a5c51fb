// What the bindings share: array types, and a check that raises ValueError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace nb = nanobind;

namespace gradwire {

// An array that a function writes to. Arrays to read from may be of another type or not contiguous: nanobind makes a
// copy. What is written to a copy would be lost without a word, so here it is a TypeError.
template <class T>
struct Written : nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu> {
    static_assert(!std::is_const_v<T>);
    using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    Written() = default;
    Written(Array array) : Array(std::move(array)) {}
};

}  // namespace gradwire

namespace nanobind::detail {

template <class T>
struct type_caster<gradwire::Written<T>> {
    using Caster = make_caster<typename gradwire::Written<T>::Array>;
    NB_TYPE_CASTER(gradwire::Written<T>, Caster::Name)

    bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
        Caster caster;
        if (!caster.from_python(source, flags & ~uint32_t(cast_flags::convert), cleanup)) return false;
        value = std::move(caster.value);
        return true;
    }
};

}  // namespace nanobind::detail

namespace gradwire {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = Written<float>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = Written<uint8_t>;
using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntsOut = Written<int64_t>;
using Codes = nb::ndarray<const uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline void require(bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
}

constexpr size_t kFar = 1 << 18;  // entries: from there on a buffer is gone from the caches before it is read again

// Lengths of tensors that lie end to end.
inline void require_segments(Ints lengths, size_t entries) {
    size_t total = 0;
    for (size_t i = 0; i < lengths.size(); i++) {
        require(lengths.data()[i] > 0 && size_t(lengths.data()[i]) <= entries - total, "segments do not fit");
        total += size_t(lengths.data()[i]);
    }
    require(total == entries, "segments do not fill the tensor");
}

inline Stream make_stream(Floats gradient, const std::optional<Floats>& memory, std::optional<FloatsOut>& memory_out) {
    size_t n = gradient.size();
    require(!memory || memory->size() == n, "memory has the wrong size");
    require(!memory_out || memory_out->size() == n, "memory_out has the wrong size");
    Stream s{gradient.data(), memory ? memory->data() : nullptr, memory_out ? memory_out->data() : nullptr, n, 0};
    s.far = s.memory_out && s.memory_out != s.memory && n >= kFar;
    return s;
}

inline std::unique_ptr<RansTable> make_table(Ints frequencies, int precision) {
    require(precision >= 8 && precision <= kMaxPrecision && frequencies.size() <= kMaxSymbols, "bad frequency table");
    int64_t total = 0;
    for (size_t i = 0; i < frequencies.size(); i++) {
        require(frequencies.data()[i] >= 0 && frequencies.data()[i] <= 1 << precision, "bad frequency");
        total += frequencies.data()[i];
    }
    require(total == 1 << precision, "frequencies do not add up");
    return std::make_unique<RansTable>(frequencies.data(), int(frequencies.size()), precision);
}

inline void require_lanes(int lanes) {
    require(lanes >= 1 && lanes <= kMaxLanes && !(lanes & (lanes - 1)), "lanes must be a power of two up to 64");
}

// Of `chunk` entries each, the last may be shorter; `chunk` is not more than there are, so that nothing overflows.
inline size_t chunks_of(size_t count, size_t chunk) { return (count + chunk - 1) / chunk; }

// Each family of kernels adds its own functions to the module.
void bind_aggregator(nb::module_& m);
void bind_grid(nb::module_& m);
void bind_levels(nb::module_& m);
void bind_homomorphic(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_sketch(nb::module_& m);
void bind_sparse(nb::module_& m);
void bind_streams(nb::module_& m);
void bind_structure(nb::module_& m);

}  // namespace gradwire
