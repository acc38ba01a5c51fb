// rANS of many streams for x86 with AVX-512: several chunks side by side, each with tables of its own.
//
// Traps:
// - Tables do not fit into registers for several streams; they are operands in memory, which permutations take too.
// - A chunk that ends makes room for the next one at once: lengths differ a thousandfold.
// - Quotients: up to 16 symbols have reciprocals in a register (rans.h says why that is exact). Others are divided:
//   x < 2^22 and f <= 2^14 are exact in fp32, and where x/f is not an integer it is at least 1/f below the next one,
//   which is more than half a unit in the last place of a number below 2^22/f: rounding never reaches it.
// - A symbol is found by binary search among the starts: `above[i][p]` is the first slot of the upper half of what the
//   first i comparisons, whose results are the bits of p, have left. Symbols that there are not start behind all slots.
#ifdef GRADWIRE_X86
#include <algorithm>
#include <vector>

#include "avx512_encode.h"
#include "streams.h"

namespace gradwire {
namespace {

constexpr int kMostSteps = 6;  // of a search: up to 64 symbols

int steps_of(int symbols) {
    int steps = 2;
    while (1 << steps < symbols) steps++;
    return steps;
}

// Tables of up to 64 dwords in as many registers as they need.
template <int Steps>
struct Dwords {
    alignas(64) uint32_t at[Steps <= 4 ? 16 : 1 << Steps];

    GRADWIRE_INLINE Int part(int i) const { return _mm512_load_si512(at + 16 * i); }
    GRADWIRE_INLINE Int look_up(Int index) const {
        if constexpr (Steps <= 4) return _mm512_permutexvar_epi32(index, part(0));
        if constexpr (Steps >= 5) {
            const Int low = _mm512_permutex2var_epi32(part(0), index, part(1));
            if constexpr (Steps == 5) return low;
            if constexpr (Steps == 6) {
                const Int high = _mm512_permutex2var_epi32(part(2), index, part(3));
                return _mm512_mask_blend_epi32(_mm512_test_epi32_mask(index, _mm512_set1_epi32(32)), low, high);
            }
        }
    }
};

// What is known of a stream: frequency | start << 16 of every symbol, and reciprocals.
template <int Steps>
struct StreamTables {
    Dwords<Steps> factors;  // encoding: (2^k − f) | start << 16
    Dwords<4> limits, reciprocals;  // up to 16 symbols

    explicit StreamTables(const RansTable& t) {
        for (uint32_t& x : factors.at) x = 0;
        for (int i = 0; i < 16; i++) limits.at[i] = 0x7fffffff, reciprocals.at[i] = 0;
        for (int s = 0; s < t.symbols; s++) {
            factors.at[s] = ((1u << t.precision) - t.frequency[s]) | t.start[s] << 16;
            if (Steps > 4) continue;
            limits.at[s] = t.frequency[s] << (kHighBits - t.precision);
            reciprocals.at[s] = as_bits(t.reciprocal[s]);
        }
    }
};

// ── encoding ──

template <int V, int Steps>
struct Writer {
    Int x[V];
    const uint8_t* from;
    uint8_t* p;
    size_t rows;  // left
    EncodeJob* job;
    int precision;
    StreamTables<Steps> tables;

    explicit Writer(EncodeJob& j)
        : from(j.symbols), p(j.out + 3 * j.lanes), rows(j.count / j.lanes), job(&j), precision(j.table->precision),
          tables(*j.table) {
        for (Int& state : x) state = _mm512_set1_epi32(kLow);
    }

    void finish() {
        alignas(64) uint32_t states[16 * V];
        for (int v = 0; v < V; v++) _mm512_store_si512(states + 16 * v, x[v]);
        if (const int rest = int(job->count % job->lanes)) p = encode_row(*job->table, from, rest, states, p);
        write_states(states, job->lanes, job->out);
        job->bytes = size_t(p - job->out);
    }
};

template <int V, int Steps>
GRADWIRE_INLINE void encode_one(const StreamTables<Steps>& t, const Packer& packer, int precision, const uint8_t* from,
                                Int* x, uint8_t*& p) {
    const Int one = _mm512_set1_epi32(0x10000);
    Int index[V], limit[V], factors[V], f[V];
    __mmask16 full[V];
    for (int v = 0; v < V; v++) {
        index[v] = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * v)));
        factors[v] = t.factors.look_up(index[v]);
        if constexpr (Steps <= 4) {
            limit[v] = t.limits.look_up(index[v]);
        } else {
            f[v] = _mm512_sub_epi32(_mm512_set1_epi32(1 << precision),
                                    _mm512_and_si512(factors[v], _mm512_set1_epi32(0xffff)));
            limit[v] = _mm512_sll_epi32(f[v], _mm_cvtsi32_si128(kHighBits - precision));
        }
        full[v] = _mm512_cmpge_epi32_mask(x[v], limit[v]);
    }
    p = emit<V>(packer, full, x, p);
    unsigned any = 0;
    for (int v = 0; v < V; v++) any |= full[v] = _mm512_cmpge_epi32_mask(x[v], limit[v]);
    if (__builtin_expect(any != 0, 0)) p = emit<V>(packer, full, x, p);
    for (int v = 0; v < V; v++) {
        const Float wide = _mm512_cvtepi32_ps(x[v]);
        Float quotient;
        if constexpr (Steps <= 4)
            quotient = _mm512_mul_ps(wide, _mm512_castsi512_ps(t.reciprocals.look_up(index[v])));
        else
            quotient = _mm512_div_ps(wide, _mm512_cvtepi32_ps(f[v]));
        x[v] = _mm512_dpwssd_epi32(x[v], _mm512_or_si512(_mm512_cvttps_epi32(quotient), one), factors[v]);
    }
}

// So many rows of N streams.
template <int N, int V, int Steps>
[[gnu::noinline]] void encode_rows(Writer<V, Steps>** writers, size_t rows) {
    const Packer packer;
    Int x[N][V];
    const uint8_t* from[N];
    uint8_t* p[N];
    for (int i = 0; i < N; i++) {
        for (int v = 0; v < V; v++) x[i][v] = writers[i]->x[v];
        from[i] = writers[i]->from;
        p[i] = writers[i]->p;
    }
    for (size_t row = 0; row < rows; row++)
        for (int i = 0; i < N; i++) {
            encode_one<V, Steps>(writers[i]->tables, packer, writers[i]->precision, from[i], x[i], p[i]);
            from[i] += 16 * V;
        }
    for (int i = 0; i < N; i++) {
        for (int v = 0; v < V; v++) writers[i]->x[v] = x[i][v];
        writers[i]->from = from[i];
        writers[i]->p = p[i];
        writers[i]->rows -= rows;
    }
}

// ── decoding ──

template <int Steps>
struct SearchTables {
    alignas(64) uint16_t above[Steps][32];
    Dwords<Steps> factors;  // frequency | start << 16

    explicit SearchTables(const RansTable& t) {
        for (int i = 0; i < Steps; i++)
            for (int p = 0; p < 32; p++) {
                const int symbol = (2 * p + 1) << (Steps - 1 - i);
                above[i][p] = symbol < t.symbols ? uint16_t(t.start[symbol]) : 0xffff;
            }
        for (uint32_t& x : factors.at) x = 0;
        for (int s = 0; s < t.symbols; s++) factors.at[s] = t.frequency[s] | t.start[s] << 16;
    }

    // Words in, words out; what the high words of dwords hold does not matter.
    GRADWIRE_INLINE Int search(Int slots) const {
        const Int one = _mm512_set1_epi16(1);
        Int p = _mm512_maskz_mov_epi16(_mm512_cmpge_epu16_mask(slots, _mm512_set1_epi16(int16_t(above[0][0]))), one);
        for (int i = 1; i < Steps; i++) {
            const Int start = _mm512_permutexvar_epi16(p, _mm512_load_si512(above[i]));
            p = _mm512_add_epi16(p, p);
            p = _mm512_mask_add_epi16(p, _mm512_cmpge_epu16_mask(slots, start), p, one);
        }
        return p;
    }
};

template <int V, int Steps>
struct ChunkReader {
    Int x[V];
    const uint8_t *begin, *end, *limit;
    uint8_t* to;  // where the next row ends
    size_t rows;  // left
    const DecodeJob* job;
    int precision;
    SearchTables<Steps> tables;

    explicit ChunkReader(const DecodeJob& j) : job(&j), precision(j.table->precision), tables(*j.table) {}

    bool open() {
        alignas(64) uint32_t states[16 * V];
        const size_t lanes = 16 * V;
        if (job->length < 3 * lanes || !read_states(job->data, int(lanes), states)) return false;
        begin = job->data + 3 * lanes;
        end = limit = job->data + job->length;
        rows = job->count / lanes;
        to = job->symbols + rows * lanes;
        if (const int rest = int(job->count % lanes)) {
            const Target target{job->symbols, nullptr, nullptr, nullptr};
            end = decode_row<Sink::symbols>(*job->table, rows * lanes, rest, states, begin, end, target);
            if (!end) return false;
        }
        for (int v = 0; v < V; v++) x[v] = _mm512_load_si512(states + 16 * v);
        return true;
    }
    bool at_start() const {
        __mmask16 off = 0;
        for (int v = 0; v < V; v++) off |= _mm512_cmpneq_epi32_mask(x[v], _mm512_set1_epi32(kLow));
        return end == begin && !off;
    }
};

template <int V>
GRADWIRE_INLINE bool take(const __mmask16* m, const Int* place, Int* x, const uint8_t* begin, const uint8_t*& end,
                          const uint8_t* limit) {
    const __mmask64 mask = row_mask<V>(m);
    const size_t n = size_t(_mm_popcnt_u64(mask));
    if (__builtin_expect(size_t(end - begin) < n, 0)) return false;
    end -= n;
    Int bytes = __builtin_expect(limit - end >= 64, 1)
                    ? _mm512_loadu_si512(end)
                    : _mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, unsigned(limit - end)), end);
    bytes = _mm512_maskz_expand_epi8(mask, bytes);
    for (int v = 0; v < V; v++)
        x[v] = _mm512_or_si512(_mm512_mask_slli_epi32(x[v], m[v], x[v], 8), spread(bytes, place[v]));
    return true;
}

template <int V, int Steps>
GRADWIRE_INLINE bool decode_one(const SearchTables<Steps>& t, int precision, const Int* place, Int* x,
                                const uint8_t* begin, const uint8_t*& end, const uint8_t* limit, uint8_t* to) {
    const Int mask = _mm512_set1_epi32((1 << precision) - 1);
    const __m128i shift = _mm_cvtsi32_si128(precision);
    Int slot[V], symbol[V], least = _mm512_set1_epi32(kLow);
    __mmask16 empty[V];
    for (int v = 0; v < V; v++) slot[v] = _mm512_and_si512(x[v], mask);
    if constexpr (V == 1) {
        symbol[0] = t.search(slot[0]);
    } else {
        for (int v = 0; v < V; v += 2) {
            const Int both = t.search(_mm512_or_si512(slot[v], _mm512_slli_epi32(slot[v + 1], 16)));
            symbol[v] = both;
            symbol[v + 1] = _mm512_srli_epi32(both, 16);
        }
    }
    for (int v = 0; v < V; v++) {
        const Int factors = t.factors.look_up(symbol[v]);
        // f * (x >> k) + slot − start; the high words of the first are zero
        x[v] = _mm512_add_epi32(_mm512_madd_epi16(_mm512_srl_epi32(x[v], shift), factors),
                                _mm512_sub_epi32(slot[v], _mm512_srli_epi32(factors, 16)));
        least = _mm512_min_epi32(least, x[v]);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * v), _mm512_cvtepi32_epi8(symbol[v]));
    }
    const Int very_low = _mm512_set1_epi32(kLow >> 8), low = _mm512_set1_epi32(kLow);
    if (__builtin_expect(_mm512_cmplt_epi32_mask(least, very_low) != 0, 0)) {
        for (int v = 0; v < V; v++) empty[v] = _mm512_cmplt_epi32_mask(x[v], very_low);
        if (!take<V>(empty, place, x, begin, end, limit)) return false;
    }
    for (int v = 0; v < V; v++) empty[v] = _mm512_cmplt_epi32_mask(x[v], low);
    return take<V>(empty, place, x, begin, end, limit);
}

template <int N, int V, int Steps>
[[gnu::noinline]] bool decode_rows(ChunkReader<V, Steps>** readers, size_t rows) {
    Int x[N][V], place[V];
    const uint8_t *begin[N], *end[N], *limit[N];
    uint8_t* to[N];
    for (int v = 0; v < V; v++) place[v] = place_of(v);
    for (int i = 0; i < N; i++) {
        for (int v = 0; v < V; v++) x[i][v] = readers[i]->x[v];
        begin[i] = readers[i]->begin;
        end[i] = readers[i]->end;
        limit[i] = readers[i]->limit;
        to[i] = readers[i]->to;
    }
    for (size_t row = 0; row < rows; row++) {
        bool good = true;
        for (int i = 0; i < N; i++) {
            to[i] -= 16 * V;
            good &= decode_one<V, Steps>(readers[i]->tables, readers[i]->precision, place, x[i], begin[i], end[i],
                                         limit[i], to[i]);
        }
        if (__builtin_expect(!good, 0)) return false;
    }
    for (int i = 0; i < N; i++) {
        for (int v = 0; v < V; v++) readers[i]->x[v] = x[i][v];
        readers[i]->end = end[i];
        readers[i]->to = to[i];
        readers[i]->rows -= rows;
    }
    return true;
}

// ── jobs side by side ──

constexpr int together(int vectors) { return vectors == 1 ? 6 : vectors == 2 ? 4 : 2; }

// Slots are Writers or ChunkReaders; `open` begins a job, `rows` does some rows of the first n slots, `close` ends one.
template <int Most, class Slot, class Job, class Open, class Rows, class Close>
bool side_by_side(Job* const* jobs, size_t n, const Open& open, const Rows& rows, const Close& close) {
    alignas(64) unsigned char room[Most][sizeof(Slot)];
    Slot* slots[Most];
    for (int i = 0; i < Most; i++) slots[i] = reinterpret_cast<Slot*>(room[i]);
    size_t next = 0;
    int active = 0;
    for (;;) {
        while (active < Most && next < n) {
            new (slots[active]) Slot(*jobs[next++]);
            if (!open(*slots[active])) return false;
            active++;
        }
        if (!active) return true;
        size_t shared = slots[0]->rows;
        for (int i = 1; i < active; i++) shared = std::min(shared, slots[i]->rows);
        if (shared && !rows(slots, active, shared)) return false;
        for (int i = 0; i < active;) {
            if (slots[i]->rows) {
                i++;
                continue;
            }
            if (!close(*slots[i])) return false;
            std::swap(slots[i], slots[--active]);
        }
    }
}

template <int V, int Steps>
void encode_group(EncodeJob* const* jobs, size_t n) {
    using Slot = Writer<V, Steps>;
    side_by_side<together(V), Slot>(jobs, n, [](Slot&) { return true; }, [](Slot** slots, int active, size_t rows) {
        switch (active) {
            case 1: encode_rows<1, V, Steps>(slots, rows); break;
            case 2: encode_rows<2, V, Steps>(slots, rows); break;
            case 3: encode_rows<std::min(3, together(V)), V, Steps>(slots, rows); break;
            case 4: encode_rows<std::min(4, together(V)), V, Steps>(slots, rows); break;
            case 5: encode_rows<std::min(5, together(V)), V, Steps>(slots, rows); break;
            default: encode_rows<together(V), V, Steps>(slots, rows);
        }
        return true;
    }, [](Slot& slot) {
        slot.finish();
        return true;
    });
}

template <int V, int Steps>
bool decode_group(const DecodeJob* const* jobs, size_t n) {
    using Slot = ChunkReader<V, Steps>;
    return side_by_side<together(V), Slot>(jobs, n, [](Slot& slot) { return slot.open(); },
                                           [](Slot** slots, int active, size_t rows) {
        switch (active) {
            case 1: return decode_rows<1, V, Steps>(slots, rows);
            case 2: return decode_rows<2, V, Steps>(slots, rows);
            case 3: return decode_rows<std::min(3, together(V)), V, Steps>(slots, rows);
            case 4: return decode_rows<std::min(4, together(V)), V, Steps>(slots, rows);
            case 5: return decode_rows<std::min(5, together(V)), V, Steps>(slots, rows);
            default: return decode_rows<together(V), V, Steps>(slots, rows);
        }
    }, [](Slot& slot) { return slot.at_start(); });
}

// Jobs by their number of lanes and symbols, the longest first; those for which there are no vectors come last.
template <class Job>
std::vector<Job*> of_group(Job* jobs, size_t n, int lanes, int steps) {
    std::vector<Job*> found;
    for (size_t i = 0; i < n; i++) {
        const bool covered = jobs[i].lanes >= 16 && jobs[i].table->symbols <= 1 << kMostSteps;
        if (covered ? jobs[i].lanes == lanes && steps_of(jobs[i].table->symbols) == steps : !lanes)
            found.push_back(jobs + i);
    }
    std::stable_sort(found.begin(), found.end(), [](const Job* a, const Job* b) { return a->count > b->count; });
    return found;
}

template <int V, int Steps>
void encode_those(EncodeJob* jobs, size_t n, int fewest_steps) {
    std::vector<EncodeJob*> group;
    for (int steps = fewest_steps; steps <= Steps; steps++)
        for (EncodeJob* job : of_group(jobs, n, 16 * V, steps)) group.push_back(job);
    if (!group.empty()) encode_group<V, Steps>(group.data(), group.size());
}

template <int V>
void encode_lanes(EncodeJob* jobs, size_t n) {
    encode_those<V, 4>(jobs, n, 2);
    encode_those<V, 5>(jobs, n, 5);
    encode_those<V, 6>(jobs, n, 6);
}

template <int V, int Steps>
bool decode_those(const DecodeJob* jobs, size_t n, int fewest_steps) {
    std::vector<const DecodeJob*> group;
    for (int steps = fewest_steps; steps <= Steps; steps++)
        for (const DecodeJob* job : of_group(jobs, n, 16 * V, steps)) group.push_back(job);
    return group.empty() || decode_group<V, Steps>(group.data(), group.size());
}

template <int V>
bool decode_lanes(const DecodeJob* jobs, size_t n) {
    return decode_those<V, 4>(jobs, n, 2) && decode_those<V, 5>(jobs, n, 5) && decode_those<V, 6>(jobs, n, 6);
}

void encode(EncodeJob* jobs, size_t n) {
    encode_lanes<1>(jobs, n);
    encode_lanes<2>(jobs, n);
    encode_lanes<4>(jobs, n);
    for (EncodeJob* job : of_group(jobs, n, 0, 0))
        job->bytes = kernels().rans_encode(*job->table, job->symbols, job->count, job->lanes, job->out);
}

bool decode(const DecodeJob* jobs, size_t n) {
    if (!decode_lanes<1>(jobs, n) || !decode_lanes<2>(jobs, n) || !decode_lanes<4>(jobs, n)) return false;
    for (const DecodeJob* job : of_group(jobs, n, 0, 0)) {
        const Chunk chunk{job->data, job->length, job->count, {job->symbols, nullptr, nullptr, nullptr}};
        if (!kernels().rans_decode(*job->table, &chunk, 1, job->lanes, Sink::symbols)) return false;
    }
    return true;
}

}  // namespace

const StreamKernels avx512_streams = {encode, decode};

}  // namespace gradwire
#endif
