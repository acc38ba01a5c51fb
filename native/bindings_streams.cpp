// Argument checks of the kernels that code many streams of symbols.
#include <algorithm>

#include "bindings.h"
#include "bindings_pool.h"
#include "grid.h"
#include "streams.h"

namespace gradwire {
namespace {

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int kMostClasses = 32;

// How many lanes classes have that are to be coded quickly: convert/structured.py has the same.
struct Lanes {
    static constexpr double kBitsPerLane = 4096, kMany = 400, kSome = 200;
    static constexpr size_t kLong = 1 << 15, kLongEnough = 1 << 12;
    double all;  // that the classes may have together
    int together;

    explicit Lanes(double bits) : all(bits / kBitsPerLane), together(all >= kMany ? 64 : all >= kSome ? 32 : 16) {}
    void give(SymbolStream& s, size_t total) const {
        if (s.count < (all >= kSome ? kLongEnough : kLong)) return;
        s.lanes = together;
        s.lanes_in_all = all * (double(s.count) / double(total));
    }
};

nb::object as_array(const std::vector<uint8_t>& bytes) {
    auto [result, data] = array<uint8_t>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), data);
    return result;
}

// The classes of a grid: how often each has each of 2·largest+1 symbols, and what follows from it.
struct GridClasses {
    int largest;
    std::vector<int> magnitude;  // the largest of each class
    std::vector<size_t> count;
    std::vector<Coding> codings;  // of classes that are not all zero

    GridClasses(const Ints& counts, int classes, const Doubles& logs) {
        require(classes >= 1 && classes <= kMostClasses && counts.size() % size_t(classes) == 0, "bad classes");
        const size_t symbols = counts.size() / size_t(classes);
        require(symbols % 2 == 1 && symbols <= 255, "bad number of symbols");
        require(logs.size() == kLogs + 1, "bad table of logarithms");
        largest = int(symbols / 2);
        for (int t = 0; t < classes; t++) {
            const int64_t* of_class = counts.data() + size_t(t) * symbols;
            int most = 0;
            size_t total = 0;
            for (size_t s = 0; s < symbols; s++) {
                require(of_class[s] >= 0 && of_class[s] < int64_t(1) << 48, "bad count");
                total += size_t(of_class[s]);
                if (of_class[s]) most = std::max(most, std::abs(int(s) - largest));
            }
            magnitude.push_back(most);
            count.push_back(total);
            codings.push_back(most ? choose_coding(of_class + largest - most, 2 * most + 1, most, logs.data())
                                   : Coding{});
        }
    }
};

void put_varint(std::vector<uint8_t>& out, uint64_t value) {
    for (; value > 127; value >>= 7) out.push_back(uint8_t(value | 128));
    out.push_back(uint8_t(value));
}

// About the bits that all classes take.
double class_bits(Ints counts, int classes, Doubles logs) {
    const GridClasses c(counts, classes, logs);
    double bits = 0;
    for (int t = 0; t < classes; t++) {
        bits += 8.0;
        std::vector<uint8_t> length;
        put_varint(length, c.count[t] / 4);
        if (c.magnitude[t]) bits += c.codings[t].bits + 8.0 * double(length.size() + c.codings[t].head.size());
    }
    return bits;
}

// The classes as they stand in a frame. `streams` has their symbols one class after the other, and is changed.
nb::object code_classes(BytesOut streams, Ints counts, int classes, Doubles logs, int threads) {
    const GridClasses c(counts, classes, logs);
    size_t total = 0;
    for (size_t n : c.count) total += n;
    require(total == streams.size(), "streams do not fit their counts");
    std::vector<uint8_t> out;
    bool good = true;
    {
        nb::gil_scoped_release release;
        std::vector<SymbolStream> all;
        std::vector<Coding> codings;
        double bits = 0;
        for (const Coding& coding : c.codings) bits += coding.bits;
        const Lanes lanes(bits);
        uint8_t* from = streams.data();
        for (int t = 0; t < classes; from += c.count[t++]) {
            if (!c.magnitude[t]) continue;
            const size_t n = c.count[t];
            const uint8_t shift = uint8_t(c.largest - c.magnitude[t]);
            uint8_t* const of_class = from;
            uint8_t most = 0;
            for (size_t i = 0; i < n; i++) {
                const uint8_t symbol = uint8_t(of_class[i] - shift);
                of_class[i] = symbol;
                most = std::max(most, symbol);
            }
            good = good && most <= 2 * c.magnitude[t];
            all.push_back({of_class, n, 2 * c.magnitude[t] + 1, c.magnitude[t]});
            lanes.give(all.back(), total);
            codings.push_back(c.codings[t]);
        }
        if (good) {
            const auto coded = code_streams(all, codings, threads);
            size_t next = 0;
            for (int t = 0; t < classes; t++) {
                if (!c.count[t]) continue;
                out.push_back(uint8_t(c.magnitude[t]));
                if (!c.magnitude[t]) continue;
                put_varint(out, coded[next].size());
                out.insert(out.end(), coded[next].begin(), coded[next].end());
                next++;
            }
        }
    }
    require(good, "symbol out of range");
    return as_array(out);
}

nb::object code_symbols(Bytes symbols, int alphabet, int implied, Doubles logs, int threads) {
    require(alphabet >= 1 && alphabet <= 255 && implied >= 0 && implied < alphabet, "bad alphabet");
    require(symbols.size() > 0 && logs.size() == kLogs + 1, "bad symbols or logarithms");
    std::vector<int64_t> counts(256);
    for (size_t i = 0; i < symbols.size(); i++) counts[symbols.data()[i]]++;
    require(std::all_of(counts.begin() + alphabet, counts.end(), [](int64_t n) { return !n; }), "symbol out of range");
    std::vector<std::vector<uint8_t>> coded;
    {
        nb::gil_scoped_release release;
        const Coding coding = choose_coding(counts.data(), alphabet, implied, logs.data());
        coded = code_streams({{const_cast<uint8_t*>(symbols.data()), symbols.size(), alphabet, implied}}, {coding},
                             threads);
    }
    return as_array(coded[0]);
}

// Whether it was possible, and how many bytes there were.
nb::tuple read_classes(Bytes data, Ints counts, int largest, BytesOut streams, BytesOut zeros, int threads) {
    require(counts.size() == zeros.size() && counts.size() <= kMostClasses, "bad classes");
    require(largest >= 1 && largest <= 127, "bad range");
    size_t total = 0;
    for (size_t t = 0; t < counts.size(); t++) {
        require(counts.data()[t] >= 0 && counts.data()[t] < int64_t(1) << 48, "bad count");
        total += size_t(counts.data()[t]);
    }
    require(total == streams.size(), "streams do not fit their counts");
    bool good = true;
    const uint8_t *at = data.data(), *const end = at + data.size();
    {
        nb::gil_scoped_release release;
        std::vector<CodedStream> coded;
        uint8_t* to = streams.data();
        for (size_t t = 0; t < counts.size() && good; to += counts.data()[t++]) {
            zeros.data()[t] = 0;
            const size_t n = size_t(counts.data()[t]);
            if (!n) continue;
            const int most = at < end ? *at++ : 255;
            if (most > largest) {
                good = false;
                break;
            }
            zeros.data()[t] = uint8_t(largest - most);
            if (!most) {
                std::fill_n(to, n, uint8_t(0));
                continue;
            }
            uint64_t length = 0;
            for (int shift = 0;; shift += 7) {
                const int byte = at < end && shift <= 49 ? *at++ : -1;
                if (byte < 0 || (byte == 0 && shift)) {
                    good = false;
                    break;
                }
                length |= uint64_t(byte & 127) << shift;
                if (byte < 128) break;
            }
            if (!good || length > size_t(end - at)) {
                good = false;
                break;
            }
            coded.push_back({at, size_t(length), {to, n, 2 * most + 1, most}});
            at += length;
        }
        good = good && decode_streams(coded, threads);
    }
    return nb::make_tuple(good, size_t(at - data.data()));
}

bool read_symbols(Bytes data, int alphabet, int implied, BytesOut symbols, int threads) {
    require(alphabet >= 1 && alphabet <= 255 && implied >= 0 && implied < alphabet, "bad alphabet");
    require(symbols.size() > 0, "there are no symbols");
    nb::gil_scoped_release release;
    return decode_streams({{data.data(), data.size(), {symbols.data(), symbols.size(), alphabet, implied}}}, threads);
}

}  // namespace

void bind_streams(nb::module_& m) {
    m.def("class_bits", class_bits);
    m.def("code_classes", code_classes);
    m.def("code_symbols", code_symbols);
    m.def("read_classes", read_classes);
    m.def("read_symbols", read_symbols);
}

}  // namespace gradwire
