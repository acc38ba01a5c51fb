// Runs the bindings of the kernels on cases from a file, on every instruction set of an arm64 machine, and compares what
// comes out byte for byte. tests/kernels/test_arm64.py builds it, writes the file and runs it under qemu; that file says
// what a case is, and in which form it is stored.
//
// Every array lies in pages of its own and touches one that must not be touched, behind it in one case and before it in
// the next: whoever reads or writes a byte beside it ends the program. Of a NaN only that it is one is compared: machines
// make different ones.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>

#include <nanobind/nanobind.h>

#include "kernels.h"

void define_module(nanobind::module_& m);  // NB_MODULE of bindings.cpp

namespace gradwire {
void bind_aggregator(nanobind::module_&) {}  // no kernels
}  // namespace gradwire

namespace {

using nanobind::Array;
using nanobind::Value;
using nanobind::Values;

struct Reader {
    const char *at, *end;

    template <class T>
    T number() {
        T x;
        std::memcpy(&x, take(sizeof x), sizeof x);
        return x;
    }
    const char* take(size_t n) {
        if (size_t(end - at) < n) throw std::runtime_error("the file of cases is cut short");
        return std::exchange(at, at + n);
    }
    std::string text() {
        const size_t n = number<uint32_t>();
        return {take(n), n};
    }
};

// What an array should hold after the call: at least its first `compared` bytes.
struct Expected {
    const char* content;
    size_t compared;
};

struct Case {
    std::string name;
    bool raises, stops;
    Values arguments;
    Value result;
    std::vector<Array> arrays;  // all of them by number, as they stand in the file: those of arguments come first
    std::vector<Expected> after;
};

Value read_value(Reader& r, Case& c) {
    Value v;
    v.kind = Value::Kind(r.number<uint8_t>());
    switch (v.kind) {
        case Value::kNone: break;
        case Value::kBool: v.integer = r.number<uint8_t>(); break;
        case Value::kInt: v.integer = r.number<int64_t>(), v.real = double(v.integer); break;
        case Value::kFloat: v.real = r.number<double>(); break;
        case Value::kText: v.text = r.text(); break;
        case Value::kSequence:
            for (uint32_t n = r.number<uint32_t>(); n; n--) v.items.push_back(read_value(r, c));
            break;
        case Value::kArray: {
            const size_t number = r.number<uint32_t>();
            if (number == c.arrays.size()) {
                Array a{};
                a.kind = r.number<char>();
                a.item = r.number<uint8_t>();
                a.count = r.number<uint64_t>();
                a.data = const_cast<char*>(r.take(a.bytes()));
                c.arrays.push_back(a);
            }
            v.integer = int64_t(number);
            v.array = c.arrays.at(number);
            break;
        }
        default: throw std::runtime_error("the file of cases has an unknown kind of value");
    }
    return v;
}

Case read_case(Reader& r) {
    Case c;
    c.name = r.text();
    const uint8_t flags = r.number<uint8_t>();
    c.raises = flags & 1;
    c.stops = flags & 2;
    Value arguments = read_value(r, c);
    c.arguments = arguments.items;
    const size_t given = c.arrays.size();
    c.result = read_value(r, c);
    for (size_t i = 0; i < given; i++) {
        const bool changed = r.number<uint8_t>();
        const size_t compared = r.number<uint64_t>();
        c.after.push_back({changed ? r.take(compared) : static_cast<const char*>(c.arrays[i].data), compared});
    }
    return c;
}

// ── one call ──

struct Pages {
    char* start;
    size_t size;
    Pages(size_t bytes, bool guard_behind, const void* content, void** data) {
        const size_t page = size_t(sysconf(_SC_PAGESIZE)), room = (bytes + page - 1) / page * page;
        size = room + page;
        start = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (start == MAP_FAILED) throw std::bad_alloc();
        mprotect(guard_behind ? start + room : start, page, PROT_NONE);
        *data = guard_behind ? start + room - bytes : start + page;
        if (bytes) std::memcpy(*data, content, bytes);
    }
    ~Pages() { munmap(start, size); }
    Pages(const Pages&) = delete;
};

struct Call {
    std::vector<std::unique_ptr<Pages>> pages;
    std::vector<Array> arrays;  // those of the arguments
    Values arguments;
    Value result;
    bool raised = false;

    Call(const Case& c, bool guard_behind) {
        for (size_t i = 0; i < c.after.size(); i++) {
            arrays.push_back(c.arrays[i]);
            void* data;
            pages.push_back(std::make_unique<Pages>(arrays[i].bytes(), guard_behind, c.arrays[i].data, &data));
            arrays[i].data = data;
        }
        for (const Value& argument : c.arguments) arguments.push_back(placed(argument));
    }
    Value placed(Value v) const {
        if (v.kind == Value::kArray) v.array = arrays[size_t(v.integer)];
        for (Value& item : v.items) item = placed(item);
        return v;
    }
    void make(const nanobind::module_& module, const std::string& name) {
        try {
            result = module.functions.at(name)(arguments);
        } catch (const std::invalid_argument&) { raised = true; }
    }
    // Arguments 0 to 2 (gradient, memory, and the new memory) have so many entries only.
    void cut(size_t entries) {
        for (size_t i = 0; i < 3; i++)
            if (arguments[i].kind == Value::kArray) arguments[i].array.count = entries;
    }
};

template <class T>
bool same_numbers(const char* a, const char* b, size_t bytes) {
    for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
        T x, y;
        std::memcpy(&x, a + i, sizeof x);
        std::memcpy(&y, b + i, sizeof y);
        if (std::memcmp(&x, &y, sizeof x) && !(x != x && y != y)) return false;
    }
    return true;
}

bool same_bytes(const Array& as, const void* a, const void* b, size_t bytes) {
    if (!bytes || !std::memcmp(a, b, bytes)) return true;
    auto p = static_cast<const char*>(a), q = static_cast<const char*>(b);
    return as.kind == 'f' && (as.item == 4 ? same_numbers<float> : same_numbers<double>)(p, q, bytes);
}

bool same(const Value& a, const Value& b) {
    if (a.kind != b.kind || a.items.size() != b.items.size() || a.text != b.text) return false;
    if (a.kind == Value::kArray)
        return a.array.kind == b.array.kind && a.array.bytes() == b.array.bytes() &&
               same_bytes(a.array, a.array.data, b.array.data, a.array.bytes());
    if (a.kind != Value::kSequence && a.kind != Value::kFloat && a.integer != b.integer) return false;
    if (a.kind == Value::kFloat && std::memcmp(&a.real, &b.real, 8) && !(std::isnan(a.real) && std::isnan(b.real)))
        return false;
    for (size_t i = 0; i < a.items.size(); i++)
        if (!same(a.items[i], b.items[i])) return false;
    return true;
}

// What is wrong with a call, or nothing.
std::string wrong(const Case& c, const Call& call) {
    if (call.raised != c.raises) return c.raises ? "no error" : "an error";
    if (!same(c.result, call.result)) return "another result";
    for (size_t i = 0; i < c.after.size(); i++)
        if (!same_bytes(c.arrays[i], call.arrays[i].data, c.after[i].content, c.after[i].compared))
            return "array " + std::to_string(i) + " differs";
    return "";
}

// Where an entry is not finite, instruction sets stop at different rows before it. What was done up to there must be what
// the portable kernels do with so many entries.
std::string wrong_when_stopped(const nanobind::module_& module, const std::string& set, const Case& c,
                               const Call& call) {
    if (call.raised) return "an error";
    const bool selects = c.name == "select";
    const Value& gradient = call.arguments[0];
    const size_t entries = size_t(call.result.items.at(selects ? 0 : 1).integer);
    if (entries >= gradient.array.count) return "did not stop";
    const Call fresh(c, true);
    const Value& memory = fresh.arguments[1];
    const float decay = float(c.arguments[3].real);
    for (size_t i = 0; i < entries; i++) {
        float u = static_cast<const float*>(fresh.arguments[0].array.data)[i];
        if (memory.kind == Value::kArray) u += static_cast<const float*>(memory.array.data)[i] * decay;
        if (!std::isfinite(u)) return "went too far";
    }
    if (!entries) return "";
    Call again(c, true);
    again.cut(entries);
    gradwire::use_kernels("portable");
    again.make(module, c.name);
    gradwire::use_kernels(set.c_str());
    if (again.raised) return "an error of the entries before";
    if (!selects && !same(again.result, call.result)) return "another result of the entries before";
    size_t coded = 0;
    if (!selects)
        for (const Value& length : call.result.items[0].items) coded += size_t(length.integer);
    for (size_t i = 0; i < call.arguments.size(); i++) {
        const Value &one = call.arguments[i], &other = again.arguments[i];
        if (one.kind != Value::kArray) continue;
        // The three of `cut` as far as they were looked at; the bytes; and outliers, which are not written behind.
        const bool bytes = one.array.kind == 'u' && one.array.item == 1;
        const size_t n = i < 3 ? entries * 4 : bytes ? coded : one.array.bytes();
        if (!same_bytes(one.array, one.array.data, other.array.data, n))
            return "argument " + std::to_string(i) + " differs up to where it stopped";
    }
    return "";
}

}  // namespace

int main(int count, char** files) {
    nanobind::module_ module;
    define_module(module);
    int failed = 0;
    for (const char* const* set = gradwire::available_kernels(); *set; set++) {
        gradwire::use_kernels(*set);
        size_t cases = 0;
        for (int f = 1; f < count; f++) {
            std::ifstream in(files[f], std::ios::binary);
            const std::string all{std::istreambuf_iterator<char>(in), {}};
            for (Reader r{all.data(), all.data() + all.size()}; r.at < r.end; cases++) {
                const Case c = read_case(r);
                Call call(c, cases % 2);
                call.make(module, c.name);
                const std::string what = c.stops ? wrong_when_stopped(module, *set, c, call) : wrong(c, call);
                if (what.empty()) continue;
                if (failed++ < 20) std::printf("%s: %s, case %zu: %s\n", *set, c.name.c_str(), cases, what.c_str());
            }
        }
        std::printf("%s: %zu cases\n", *set, cases);
    }
    return failed != 0;
}
