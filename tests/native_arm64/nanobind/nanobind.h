// As much of nanobind as the bindings of the kernels use, without Python: a module is a table of functions that take and
// return `Value`s. driver.cpp reads those from a file.
//
// What it keeps of nanobind: arrays of another type are converted for parameters that are only read, and refused for
// those that are written to; None is refused by all but optional parameters; defaults stand for missing arguments.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace nanobind {

struct Value;
using Values = std::vector<Value>;

struct Array {
    char kind;  // f, i or u, as in numpy
    size_t item, count;
    void* data;
    std::shared_ptr<void> owner;
    size_t bytes() const { return item * count; }
};

struct Value {
    enum Kind : uint8_t { kNone, kBool, kInt, kFloat, kText, kSequence, kArray } kind = kNone;
    int64_t integer = 0;  // of bools, too; unsigned numbers by their bits
    double real = 0;
    std::string text;
    Values items;
    Array array{};
};

struct TypeError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

struct object {
    Value value;
};
struct handle {
    const Value* value;
};
struct tuple : object {
    size_t size() const { return value.items.size(); }
    handle operator[](size_t i) const { return {&value.items.at(i)}; }
};
inline object none() { return {}; }

struct capsule {
    std::shared_ptr<void> owner;
    capsule(void* p, void (*free)(void*) noexcept) : owner(p, free) {}
};
struct gil_scoped_release {
    gil_scoped_release() {}  // so that it counts as used
};

struct numpy {};
struct c_contig {};
template <size_t>
struct ndim {};
namespace device {
struct cpu {};
}  // namespace device

template <class... Options>
struct ndarray {
    template <class T>
    static constexpr bool is_item = std::is_arithmetic_v<T>;
    template <class First, class... Rest>
    struct ItemOf : std::conditional_t<is_item<First>, std::common_type<First>, ItemOf<Rest...>> {};
    template <class Last>
    struct ItemOf<Last> : std::common_type<Last> {};
    static constexpr bool is_read_only = (std::is_const_v<Options> || ...);
    using Item = typename ItemOf<std::remove_const_t<Options>...>::type;
    using Pointer = std::conditional_t<is_read_only, const Item*, Item*>;

    Array array{};
    ndarray() = default;
    ndarray(Item* data, std::initializer_list<size_t> shape, const capsule& owner)
        : array{kind(), sizeof(Item), *shape.begin(), data, owner.owner} {}
    static constexpr char kind() { return std::is_floating_point_v<Item> ? 'f' : std::is_signed_v<Item> ? 'i' : 'u'; }
    Pointer data() const { return static_cast<Pointer>(array.data); }
    size_t size() const { return array.count; }
};

namespace detail {

enum class cast_flags : uint32_t { convert = 1 };
struct cleanup_list;
#define NB_TYPE_CASTER(Type, Name) Type value;

template <class T, class = void>
struct type_caster;
template <class T>
using make_caster = type_caster<T>;

// A number of Python's; floats take integers, too.
template <class T>
struct type_caster<T, std::enable_if_t<std::is_arithmetic_v<T>>> {
    T value;
    bool from_python(handle source, uint32_t, cleanup_list*) {
        const Value& v = *source.value;
        if (v.kind == Value::kFloat && std::is_floating_point_v<T>)
            value = T(v.real);
        else if (v.kind == Value::kArray && std::is_same_v<T, uintptr_t>)  // its address
            std::memcpy(&value, &v.array.data, sizeof value);
        else if (v.kind == Value::kBool || (v.kind == Value::kInt && !std::is_same_v<T, bool>))
            value = T(v.integer);
        else
            return false;
        return true;
    }
};

template <class... Options>
struct type_caster<ndarray<Options...>> {
    using Kind = ndarray<Options...>;
    static constexpr int Name = 0;
    Kind value;
    bool from_python(handle source, uint32_t flags, cleanup_list*) {
        const Value& v = *source.value;
        if (v.kind != Value::kArray) return false;
        value.array = v.array;
        if (v.array.kind == Kind::kind() && v.array.item == sizeof(typename Kind::Item)) return true;
        if (!(flags & uint32_t(cast_flags::convert))) return false;
        auto copy = std::make_shared<std::vector<typename Kind::Item>>(v.array.count);
        for (size_t i = 0; i < v.array.count; i++) (*copy)[i] = number<typename Kind::Item>(v.array, i);
        value.array = {Kind::kind(), sizeof(typename Kind::Item), v.array.count, copy->data(), copy};
        return true;
    }
    template <class T>
    static T number(const Array& a, size_t i) {
        switch (a.kind == 'f' ? 100 + a.item : a.kind == 'u' ? 10 + a.item : a.item) {
            case 1: return T(static_cast<const int8_t*>(a.data)[i]);
            case 2: return T(static_cast<const int16_t*>(a.data)[i]);
            case 4: return T(static_cast<const int32_t*>(a.data)[i]);
            case 8: return T(static_cast<const int64_t*>(a.data)[i]);
            case 11: return T(static_cast<const uint8_t*>(a.data)[i]);
            case 12: return T(static_cast<const uint16_t*>(a.data)[i]);
            case 14: return T(static_cast<const uint32_t*>(a.data)[i]);
            case 18: return T(static_cast<const uint64_t*>(a.data)[i]);
            case 104: return T(static_cast<const float*>(a.data)[i]);
            case 108: return T(static_cast<const double*>(a.data)[i]);
            default: throw TypeError("an array of a type that nobody converts");
        }
    }
};

template <>
struct type_caster<std::string> {
    std::string value;
    bool from_python(handle source, uint32_t, cleanup_list*) {
        value = source.value->text;
        return source.value->kind == Value::kText;
    }
};

template <>
struct type_caster<tuple> {
    tuple value;
    bool from_python(handle source, uint32_t, cleanup_list*) {
        value.value = *source.value;
        return source.value->kind == Value::kSequence;
    }
};

template <class T>
struct type_caster<std::optional<T>> {
    std::optional<T> value;
    bool from_python(handle source, uint32_t flags, cleanup_list* list) {
        if (source.value->kind == Value::kNone) return true;
        make_caster<T> inner;
        if (!inner.from_python(source, flags, list)) return false;
        value = std::move(inner.value);
        return true;
    }
};

template <class T>
struct type_caster<std::vector<T>> {
    std::vector<T> value;
    bool from_python(handle source, uint32_t flags, cleanup_list* list) {
        for (const Value& item : source.value->items) {
            make_caster<T> inner;
            if (!inner.from_python({&item}, flags, list)) return false;
            value.push_back(std::move(inner.value));
        }
        return source.value->kind == Value::kSequence;
    }
};

template <class... T>
struct type_caster<std::tuple<T...>> {
    std::tuple<T...> value;
    bool from_python(handle source, uint32_t flags, cleanup_list* list) {
        const bool fits = source.value->kind == Value::kSequence && source.value->items.size() == sizeof...(T);
        return fits && each(source.value->items, flags, list, std::index_sequence_for<T...>());
    }
    template <size_t... I>
    bool each(const Values& items, uint32_t flags, cleanup_list* list, std::index_sequence<I...>) {
        return (one<I>(items[I], flags, list) && ...);
    }
    template <size_t I>
    bool one(const Value& item, uint32_t flags, cleanup_list* list) {
        make_caster<std::tuple_element_t<I, std::tuple<T...>>> inner;
        if (!inner.from_python({&item}, flags, list)) return false;
        std::get<I>(value) = std::move(inner.value);
        return true;
    }
};

// ── and back ──

template <class T>
Value to_value(const T& x) {
    Value v;
    if constexpr (std::is_same_v<T, bool>) {
        v.kind = Value::kBool;
        v.integer = x;
    } else if constexpr (std::is_integral_v<T>) {
        v.kind = Value::kInt;
        v.integer = int64_t(x);
    } else if constexpr (std::is_floating_point_v<T>) {
        v.kind = Value::kFloat;
        v.real = x;
    } else if constexpr (std::is_base_of_v<object, T>) {
        return x.value;
    } else {
        v.kind = Value::kText;
        v.text = x;
    }
    return v;
}
template <class... Options>
Value to_value(const ndarray<Options...>& x) {
    Value v;
    v.kind = Value::kArray;
    v.array = x.array;
    return v;
}
template <class T>
Value to_value(const std::vector<T>& items) {
    Value v;
    v.kind = Value::kSequence;
    for (const T& item : items) v.items.push_back(to_value(item));
    return v;
}
template <class A, class B>
Value to_value(const std::pair<A, B>& x) {
    Value v;
    v.kind = Value::kSequence;
    v.items = {to_value(x.first), to_value(x.second)};
    return v;
}

}  // namespace detail

template <class T>
T cast(handle source) {
    detail::make_caster<T> caster;
    if (!caster.from_python(source, 1, nullptr)) throw TypeError("an argument of another type");
    return std::move(caster.value);
}
template <class T>
object cast(const T& x) {
    return {detail::to_value(x)};
}
template <class... T>
tuple make_tuple(const T&... items) {
    tuple all;
    all.value.kind = Value::kSequence;
    (all.value.items.push_back(detail::to_value(items)), ...);
    return all;
}

struct arg {
    std::optional<Value> standard;
    explicit arg(const char*) {}
    arg& none() { return *this; }
    template <class T>
    arg& operator=(const T& x) {
        standard = detail::to_value(x);
        return *this;
    }
};

struct module_ {
    std::map<std::string, std::function<Value(const Values&)>> functions;

    template <class F, class... Args>
    void def(const char* name, F function, const Args&... args) {
        std::vector<std::optional<Value>> standards = {args.standard...};
        functions[name] = [function = Callable(function), standards](Values given) {
            while (given.size() < standards.size() && standards[given.size()])
                given.push_back(*standards[given.size()]);
            return call(function, given);
        };
    }

  private:
    template <class F>
    static auto Callable(F f) {
        return std::function(f);
    }
    template <class R, class... Args>
    static Value call(const std::function<R(Args...)>& f, const Values& given) {
        if (given.size() != sizeof...(Args)) throw TypeError("a wrong number of arguments");
        return with(f, given, std::index_sequence_for<Args...>());
    }
    template <class R, class... Args, size_t... I>
    static Value with(const std::function<R(Args...)>& f, const Values& given, std::index_sequence<I...>) {
        if constexpr (std::is_void_v<R>) {
            f(cast<std::decay_t<Args>>(handle{&given[I]})...);
            return {};
        } else {
            return detail::to_value(f(cast<std::decay_t<Args>>(handle{&given[I]})...));
        }
    }
};

#define NB_MODULE(name, variable) void define_module(::nanobind::module_& variable)

}  // namespace nanobind
