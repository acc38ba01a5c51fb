// Streams of symbols: the choice of their coding, and their bytes. streams.h says what for.
#include "streams.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "grid.h"
#include "kept_room.h"
#include "threads.h"

namespace gradwire {
namespace {

constexpr int kCoarse = 8, kFine = 12, kFinest = 14, kSmallAlphabet = 16;  // compress/precision.py
constexpr int64_t kLarge = 1 << 20;
constexpr double kTolerance = 1.006;
constexpr int kHistogram = 2, kChunkAlign = 64;
constexpr double kBitsPerLane = 1 << 13, kBitsPerChunk = kBitsPerLane * kMaxLanes;  // compress/rans.py
constexpr int kVector = 16, kMaxLaneBits = 6, kSmallestRans = 32;

int bit_length(uint64_t v) { return v ? 64 - __builtin_clzll(v) : 0; }
int gamma_bits(int64_t f) { return 2 * bit_length(uint64_t(f) + 1) - 1; }
int raw_width(int symbols) { return std::max(1, bit_length(uint64_t(symbols) - 1)); }

// models/integer_frequencies.py: integers that add up to 2^precision.
std::vector<int64_t> normalize(const int64_t* counts, int symbols, int64_t total, int precision) {
    std::vector<int64_t> frequencies(symbols), remainder(symbols, -1);
    int64_t sum = 0;
    for (int s = 0; s < symbols; s++) {
        if (!counts[s]) continue;
        const int64_t scaled = counts[s] << precision, floor = scaled / total;
        frequencies[s] = std::max<int64_t>(floor, 1);
        if (floor) remainder[s] = scaled % total;
        sum += frequencies[s];
    }
    int64_t missing = (int64_t(1) << precision) - sum;
    if (missing > 0) {
        std::vector<int> order(symbols);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return remainder[a] > remainder[b]; });
        for (int64_t i = 0; i < missing; i++) frequencies[order[i]]++;
    }
    for (; missing < 0; missing++) --*std::max_element(frequencies.begin(), frequencies.end());
    return frequencies;
}

// Elias-gamma codes of f + 1 of all symbols but one.
std::vector<uint8_t> pack_frequencies(const std::vector<int64_t>& frequencies, int implied) {
    std::vector<uint8_t> out;
    size_t used = 0;
    const auto put = [&](int bit) {
        if (used % 8 == 0) out.push_back(0);
        out.back() |= uint8_t(bit << (used++ % 8));
    };
    for (size_t s = 0; s < frequencies.size(); s++) {
        if (int(s) == implied) continue;
        const uint64_t v = uint64_t(frequencies[s]) + 1;
        const int length = bit_length(v);
        for (int i = 1; i < length; i++) put(0);
        for (int i = length - 1; i >= 0; i--) put(int(v >> i & 1));
    }
    return out;
}

// False if they are damaged. Moves `data` behind them.
bool unpack_frequencies(const uint8_t*& data, const uint8_t* end, int symbols, int precision, int implied,
                        std::vector<int64_t>& frequencies) {
    const size_t bits = 8 * size_t(end - data);
    size_t at = 0;
    const auto bit = [&](size_t i) { return data[i >> 3] >> (i & 7) & 1; };
    int64_t rest = int64_t(1) << precision;
    frequencies.assign(symbols, 0);
    for (int s = 0; s < symbols; s++) {
        if (s == implied) continue;
        int zeros = 0;
        while (zeros <= precision && at < bits && !bit(at)) at++, zeros++;
        if (zeros > precision || bits - at < size_t(zeros) + 1) return false;
        uint64_t v = 0;
        for (int i = 0; i <= zeros; i++) v = v << 1 | bit(at++);
        rest -= frequencies[s] = int64_t(v) - 1;
    }
    if (rest < 0) return false;
    for (; at % 8; at++)
        if (bit(at)) return false;
    frequencies[implied] = rest;
    data += at / 8;
    return true;
}

size_t chunk_size(size_t count, size_t chunks) {
    return ((count + chunks - 1) / chunks + kChunkAlign - 1) / kChunkAlign * kChunkAlign;
}

struct Layout {
    int lane_bits;
    size_t chunks;
};

// At most so many chunks that the last one has a symbol.
size_t chunks_with_symbols(size_t count, size_t chunks) {
    while (chunk_size(count, chunks) * (chunks - 1) >= count) chunks--;
    return chunks;
}

Layout layout_of(const SymbolStream& s, double bits) {
    if (s.lanes) {
        const double wanted = std::max(bits / kBitsPerLane, s.lanes_in_all) / double(s.lanes);
        return {bit_length(uint64_t(s.lanes)) - 1, chunks_with_symbols(s.count, std::max<size_t>(1, size_t(wanted)))};
    }
    const size_t most = (s.count + kChunkAlign - 1) / kChunkAlign;
    const size_t chunks = chunks_with_symbols(s.count,
                                              std::min(std::max<size_t>(1, size_t(bits / kBitsPerChunk)), most));
    int lanes = int(bits / double(chunks) / kBitsPerLane);
    if (lanes < kVector) lanes /= 2;
    return {std::min(kMaxLaneBits, bit_length(uint64_t(std::max(1, lanes))) - 1), chunks};
}

void put_varint(std::vector<uint8_t>& out, uint64_t value) {
    for (; value > 127; value >>= 7) out.push_back(uint8_t(value | 128));
    out.push_back(uint8_t(value));
}

// Room for what is coded on its way.
uint8_t* coding_room(size_t bytes) {
    static thread_local KeptRoom room;
    return room.of(bytes);
}

void encode_each(EncodeJob* jobs, size_t n) {
    for (size_t i = 0; i < n; i++)
        jobs[i].bytes = kernels().rans_encode(*jobs[i].table, jobs[i].symbols, jobs[i].count, jobs[i].lanes,
                                              jobs[i].out);
}

bool decode_each(const DecodeJob* jobs, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const Chunk chunk{jobs[i].data, jobs[i].length, jobs[i].count, {jobs[i].symbols, nullptr, nullptr, nullptr}};
        if (!kernels().rans_decode(*jobs[i].table, &chunk, 1, jobs[i].lanes, Sink::symbols)) return false;
    }
    return true;
}

const StreamKernels& stream_kernels() { return GRADWIRE_IN_USE(streams); }

// work(first, last) on jobs, a share of them for each thread; all of a thread's jobs are coded side by side.
template <class Work>
void share_jobs(size_t jobs, size_t symbols, int threads, const Work& work) {
    constexpr size_t kTogether = 4;
    const size_t useful = std::min(threads_for(symbols * 4, threads), (jobs + kTogether - 1) / kTogether);
    if (useful <= 1) return work(size_t(0), jobs);
    std::atomic<size_t> next{0};
    on_threads(useful, [&] {
        for (size_t first; (first = next.fetch_add(kTogether)) < jobs;) work(first, std::min(first + kTogether, jobs));
    });
}

}  // namespace

const StreamKernels portable_streams = {encode_each, decode_each};

Coding choose_coding(const int64_t* counts, int symbols, int implied, const double* logs) {
    Coding found;
    int64_t total = 0;
    int used = 0, last = 0;
    for (int s = 0; s < symbols; s++) {
        total += counts[s];
        if (counts[s]) used++, last = s;
    }
    if (used == 1) {
        found.coder = Coding::constant;
        found.head = {Coding::constant, uint8_t(last)};
        return found;
    }
    const double packed = double(total * raw_width(symbols));
    int precisions[3], tried = 0;
    if (symbols <= kSmallAlphabet) precisions[tried++] = kCoarse;
    if (symbols <= kSmallAlphabet && total < kLarge) precisions[tried++] = kFine - 1;
    precisions[tried++] = symbols <= kSmallAlphabet ? kFine : kFinest;
    std::vector<int64_t> frequencies[3];
    double bits[3], least = INFINITY;
    for (int i = 0; i < tried; i++) {
        frequencies[i] = normalize(counts, symbols, total, precisions[i]);
        double spent = 0;
        int64_t table = 0;
        for (int s = 0; s < symbols; s++) {
            const int64_t f = frequencies[i][s];
            if (counts[s]) spent += double(counts[s]) * (double(precisions[i]) - logs[f]);
            if (s != implied) table += gamma_bits(f);
        }
        bits[i] = spent + 8.0 * double((table + 7) / 8);
        least = std::min(least, bits[i]);
    }
    const double limit = total >= kLarge ? least * kTolerance : least;
    int best = 0;
    while (bits[best] > limit) best++;
    if (bits[best] + kSmallestRans >= packed) {
        found.bits = packed;
        found.head = {0};
        return found;
    }
    found.coder = Coding::rans;
    found.precision = precisions[best];
    found.bits = bits[best];
    found.frequencies = std::move(frequencies[best]);
    found.head = {uint8_t(Coding::rans | kHistogram << 2 | found.precision << 4)};
    const std::vector<uint8_t> table = pack_frequencies(found.frequencies, implied);
    found.head.insert(found.head.end(), table.begin(), table.end());
    return found;
}

std::vector<std::vector<uint8_t>> code_streams(const std::vector<SymbolStream>& streams,
                                               const std::vector<Coding>& codings, int threads) {
    std::vector<std::unique_ptr<RansTable>> tables(streams.size());
    std::vector<EncodeJob> jobs;
    std::vector<size_t> first_job(streams.size() + 1);
    std::vector<Layout> layouts(streams.size());
    size_t room = 0, symbols = 0;
    for (size_t i = 0; i < streams.size(); i++) {
        first_job[i] = jobs.size();
        if (codings[i].coder != Coding::rans) continue;
        const SymbolStream& s = streams[i];
        tables[i].reset(new RansTable(codings[i].frequencies.data(), s.alphabet, codings[i].precision));
        layouts[i] = layout_of(s, codings[i].bits);
        const size_t chunk = chunk_size(s.count, layouts[i].chunks);
        for (size_t start = 0; start < s.count; start += chunk) {
            const size_t n = std::min(chunk, s.count - start);
            jobs.push_back({tables[i].get(), s.symbols + start, n, 1 << layouts[i].lane_bits, nullptr, room});
            room += rans_bound(n, 1 << layouts[i].lane_bits, 1);
        }
        symbols += s.count;
    }
    first_job.back() = jobs.size();
    uint8_t* const place = coding_room(room);
    for (EncodeJob& job : jobs) job.out = place + job.bytes;
    share_jobs(jobs.size(), symbols, threads,
               [&](size_t first, size_t last) { stream_kernels().encode(jobs.data() + first, last - first); });
    std::vector<std::vector<uint8_t>> all(streams.size());
    for (size_t i = 0; i < streams.size(); i++) {
        const SymbolStream& s = streams[i];
        std::vector<uint8_t>& out = all[i] = codings[i].head;
        if (codings[i].coder == Coding::raw) {
            const size_t head = out.size();
            out.resize(head + (s.count * raw_width(s.alphabet) + 7) / 8);
            std::vector<uint8_t> packed(out.size() + 8);
            pack_bits(s.symbols, s.count, raw_width(s.alphabet), packed.data());
            std::copy_n(packed.data(), out.size() - head, out.data() + head);
        }
        if (codings[i].coder != Coding::rans) continue;
        const size_t chunks = layouts[i].chunks;
        out.push_back(uint8_t(layouts[i].lane_bits | (chunks > 1 ? 128 : 0)));
        if (chunks > 1) {
            put_varint(out, chunks);
            for (size_t j = first_job[i]; j + 1 < first_job[i] + chunks; j++)
                for (int byte = 0; byte < 4; byte++) out.push_back(uint8_t(jobs[j].bytes >> 8 * byte));
        }
        for (size_t j = first_job[i]; j < first_job[i] + chunks; j++)
            out.insert(out.end(), jobs[j].out, jobs[j].out + jobs[j].bytes);
    }
    return all;
}

namespace {

// Decodes what has been gathered of several streams, a limited number of chunks at a time: a hostile frame has one for
// every 64 entries.
class Gathered {
  public:
    explicit Gathered(int threads) : threads_(threads) {}

    const RansTable* keep(const std::vector<int64_t>& frequencies, int precision) {
        tables_.emplace_back(new RansTable(frequencies.data(), int(frequencies.size()), precision));
        return tables_.back().get();
    }
    bool add(const DecodeJob& job) {
        jobs_.push_back(job);
        symbols_ += job.count;
        return jobs_.size() < kMost || decode();
    }
    bool decode() {
        std::atomic<bool> good{true};
        share_jobs(jobs_.size(), symbols_, threads_, [&](size_t first, size_t last) {
            if (good && !stream_kernels().decode(jobs_.data() + first, last - first)) good = false;
        });
        jobs_.clear();
        symbols_ = 0;
        return good;
    }

  private:
    static constexpr size_t kMost = 2048;
    int threads_;
    std::vector<std::unique_ptr<RansTable>> tables_;
    std::vector<DecodeJob> jobs_;
    size_t symbols_ = 0;
};

// The lengths of the chunks and then the chunks.
bool gather_chunks(const uint8_t* data, const uint8_t* end, const SymbolStream& to, const RansTable* table,
                   Gathered& gathered) {
    if (data == end) return false;
    const int byte = *data++, lane_bits = byte & 127;
    uint64_t chunks = 1;
    if (byte & 128) {
        chunks = 0;
        for (int shift = 0;; shift += 7) {
            if (data == end || shift > 49) return false;
            const uint8_t b = *data++;
            chunks |= uint64_t(b & 127) << shift;
            if (b > 127) continue;
            if (!b && shift) return false;
            break;
        }
        if (chunks < 2 || chunks > to.count) return false;
    }
    if (lane_bits > kMaxLaneBits) return false;
    const size_t chunk = chunk_size(to.count, chunks);
    if (chunk * (chunks - 1) >= to.count || size_t(end - data) < 4 * (chunks - 1)) return false;
    const uint8_t *lengths = data, *body = data + 4 * (chunks - 1);
    for (size_t i = 0; i < chunks; i++) {
        size_t length = size_t(end - body);
        if (i + 1 < chunks) {
            const size_t told = lengths[4 * i] | lengths[4 * i + 1] << 8 | lengths[4 * i + 2] << 16 |
                                size_t(lengths[4 * i + 3]) << 24;
            if (told > length) return false;
            length = told;
        }
        const size_t start = i * chunk, count = std::min(chunk, to.count - start);
        if (!gathered.add({table, body, length, to.symbols + start, count, 1 << lane_bits})) return false;
        body += length;
    }
    return true;
}

}  // namespace

bool decode_streams(const std::vector<CodedStream>& streams, int threads) {
    Gathered gathered(threads);
    for (const CodedStream& s : streams) {
        const uint8_t *data = s.data, *end = s.data + s.length;
        if (data == end) return false;
        const int byte = *data++, precision = byte >> 4;
        const SymbolStream& to = s.to;
        switch (byte & 3) {
            case Coding::raw:
            case Coding::constant:
                if (byte >> 2) return false;
                if (byte == Coding::constant) {
                    if (end - data != 1 || *data >= to.alphabet) return false;
                    std::memset(to.symbols, *data, to.count);
                } else {
                    const int width = raw_width(to.alphabet);
                    if (size_t(end - data) != (to.count * width + 7) / 8 ||
                        !unpack_bits(data, to.count, width, to.alphabet, to.symbols))
                        return false;
                }
                break;
            case Coding::rans: {
                if ((byte >> 2 & 3) != kHistogram) return false;
                if (precision < kCoarse || precision > kFinest || 1 << precision < to.alphabet) return false;
                std::vector<int64_t> frequencies;
                if (!unpack_frequencies(data, end, to.alphabet, precision, to.implied, frequencies)) return false;
                if (!gather_chunks(data, end, to, gathered.keep(frequencies, precision), gathered)) return false;
                break;
            }
            default: return false;
        }
    }
    return gathered.decode();
}

}  // namespace gradwire
