// The kernels for x86 with AVX-512 (with VBMI, VBMI2 and VNNI: Ice Lake, Zen 4 and later).
//
// Up to 16 symbols, a table is a register and a look-up is one permutation; all lanes of a row move together.
// Traps:
// - Permutations look at the low four bits of an index only. So the fused path works with signed numbers -5…5
//   instead of symbols 0…10 and never adds the offset: its tables are laid out in that order (`symbol_at`).
// - vpmaddwd(a | b<<16, c | d<<16) = a*c + b*d in one instruction, and vpdpwssd adds it to a third. All factors must be
//   below 2^15: q < 2^14 in the encoder (x < f * 2^(22-k)) and x >> k < 2^14 in the decoder.
// - A row is one chain of dependent instructions, over a hundred cycles when decoding: so several chunks, which do not
//   depend on each other, are decoded side by side.
// - Bytes are compressed in a register and stored whole: vpcompressb to memory is slow on Zen 4. The stores reach up to
//   63 bytes past the end, which is why rans_bound() asks for room.
// - Loads near the end of a chunk are masked, so that not a byte beyond it is touched.
#ifdef GRADWIRE_X86
#include "avx512_encode.h"
#include "streaming.h"

namespace gradwire {
namespace {

constexpr size_t kTogether = 4;  // chunks decoded side by side

// ── encoding (avx512_encode.h has the rows) ──

template <int V, bool Twice>
size_t encode_symbols(const RansTable& table, const uint8_t* symbols, size_t count, uint8_t* out) {
    int symbol_at[16];
    for (int i = 0; i < 16; i++) symbol_at[i] = i < table.symbols ? i : -1;
    auto next = [&](size_t row, Int* index) __attribute__((always_inline)) {
        for (int v = 0; v < V; v++)
            index[v] = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols + row + 16 * v)));
        return true;
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) {
        std::memcpy(last, symbols + row, width);
        return true;
    };
    return encode_chunk<V, Twice>(table, EncodeTables(table, symbol_at), count, out, next, tail).bytes;
}

size_t rans_encode(const RansTable& t, const uint8_t* symbols, size_t count, int lanes, uint8_t* out) {
    if (t.symbols <= 16 && lanes >= 16) {
        bool twice = t.precision > 8;
        switch (lanes) {
            case 16: return (twice ? encode_symbols<1, true> : encode_symbols<1, false>)(t, symbols, count, out);
            case 32: return (twice ? encode_symbols<2, true> : encode_symbols<2, false>)(t, symbols, count, out);
            default: return (twice ? encode_symbols<4, true> : encode_symbols<4, false>)(t, symbols, count, out);
        }
    }
    return rans_encode_any(t, symbols, count, lanes, out);
}

// ── conversion to fp4 in the same pass ──

struct Fp4 {
    Float decay, twice_inverse, four, five, values;

    explicit Fp4(const Quantizer& q) {
        decay = _mm512_set1_ps(q.decay);
        twice_inverse = _mm512_set1_ps(2 * q.inverse);
        four = _mm512_set1_ps(4.0f);
        five = _mm512_set1_ps(5.0f);
        alignas(64) float v[16] = {};
        for (int s = 0; s < 11; s++) v[(s - 5) & 15] = q.values[s];
        values = _mm512_load_ps(v);
    }

    // Smaller magnitude of the two, with the sign of the first.
    static Float limit(Float x, Float bound) { return _mm512_range_ps(x, bound, 0b0010); }

    // u of 16 entries; `bad` gathers those that are not finite.
    template <bool Memory>
    GRADWIRE_INLINE Float load(const Stream& s, size_t i, __mmask16& bad) const {
        Float u = _mm512_loadu_ps(s.gradient + i);
        if (Memory) u = _mm512_add_ps(u, _mm512_mul_ps(_mm512_loadu_ps(s.memory + i), decay));
        bad |= _mm512_fpclass_ps_mask(u, 0x99);  // NaN of both kinds, infinities of both signs
        return u;
    }

    template <bool Update>
    GRADWIRE_INLINE Int signed_index(const Stream& s, size_t i, Float u, bool far) const {
        Float y = _mm512_mul_ps(u, twice_inverse);
        Int index = _mm512_cvtps_epi32(limit(y, four));
        __mmask16 beyond = _mm512_cmp_ps_mask(_mm512_abs_ps(y), five, _CMP_GT_OQ);
        index = _mm512_mask_add_epi32(index, beyond, index, _mm512_srai_epi32(index, 2));  // 4 → 5, -4 → -5
        if (Update) store(s.memory_out + i, _mm512_sub_ps(u, _mm512_permutexvar_ps(index, values)), far);
        return index;
    }
};

template <int V, bool Twice, bool Memory, bool Update>
Coded fp4_chunk(const Quantizer& q, const Stream& stream, const RansTable& table, uint8_t* out) {
    const Stream s = stream;  // a copy: stores to `out` could otherwise change it
    const bool far = s.streams();
    int symbol_at[16];
    for (int i = 0; i < 16; i++) {
        int symbol = (i < 8 ? i : i - 16) + 5;
        symbol_at[i] = symbol >= 0 && symbol < 11 ? symbol : -1;
    }
    const Fp4 fp4(q);
    auto next = [&](size_t row, Int* index) __attribute__((always_inline)) {
        Float u[V];
        __mmask16 bad = 0;
        for (int v = 0; v < V; v++) u[v] = fp4.load<Memory>(s, row + 16 * v, bad);
        if (__builtin_expect(bad != 0, 0)) return false;
        for (int v = 0; v < V; v++) index[v] = fp4.signed_index<Update>(s, row + 16 * v, u[v], far);
        return true;
    };
    auto tail = [&](size_t row, size_t width, uint8_t* last) {
        const Stream rest = s.part(row, width);
        if (!all_finite(q, rest)) return false;
        quantize_any(q, rest, last);
        return true;
    };
    const Coded coded = encode_chunk<V, Twice>(table, EncodeTables(table, symbol_at), s.count, out, next, tail);
    if (far) _mm_sfence();
    return coded;
}

template <int V, bool Twice>
Coded fp4_chunk_of(const Quantizer& q, const Stream& s, const RansTable& t, uint8_t* out) {
    if (s.memory)
        return (s.memory_out ? fp4_chunk<V, Twice, true, true> : fp4_chunk<V, Twice, true, false>)(q, s, t, out);
    return (s.memory_out ? fp4_chunk<V, Twice, false, true> : fp4_chunk<V, Twice, false, false>)(q, s, t, out);
}

template <int V>
Coded fp4_chunk_of(const Quantizer& q, const Stream& s, const RansTable& t, uint8_t* out) {
    return (t.precision > 8 ? fp4_chunk_of<V, true> : fp4_chunk_of<V, false>)(q, s, t, out);
}

Coded quantize_rans(const Quantizer& q, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                    uint8_t* scratch) {
    if (is_fp4(q) && lanes >= 16) {
        switch (lanes) {
            case 16: return fp4_chunk_of<1>(q, s, t, out);
            case 32: return fp4_chunk_of<2>(q, s, t, out);
            default: return fp4_chunk_of<4>(q, s, t, out);
        }
    }
    if (!all_finite(q, s)) return {0, 0};
    quantize_any(q, s, scratch);
    return {rans_encode(t, scratch, s.count, lanes, out), s.count};
}

// ── decoding ──

// Tables of 256 bytes (for 8-bit precision) in four registers.
struct Bytes256 {
    Int a, b, c, d;
    explicit Bytes256(const uint8_t* t) {
        a = _mm512_loadu_si512(t);
        b = _mm512_loadu_si512(t + 64);
        c = _mm512_loadu_si512(t + 128);
        d = _mm512_loadu_si512(t + 192);
    }
    GRADWIRE_INLINE Int look_up(Int index) const {
        Int low = _mm512_permutex2var_epi8(a, index, b), high = _mm512_permutex2var_epi8(c, index, d);
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
    }
};

struct Rests {  // slot - start for every slot of an 8-bit table
    uint8_t at[256] = {};
    explicit Rests(const RansTable& t) {
        if (t.precision != 8) return;
        for (int s = 0; s < t.symbols; s++)
            for (uint32_t i = 0; i < t.frequency[s]; i++) at[t.start[s] + i] = uint8_t(i);
    }
};

template <int V, bool Coarse>
struct DecodeTables {
    Packer packer;
    Bytes256 symbols, rests;
    Int factors, minus_start, slot_mask, high_half, low, very_low, place[V], above[4];
    Float values;
    __m128i shift;

    DecodeTables(const RansTable& t, const float* table) : symbols(t.symbol_of_slot), rests(Rests(t).at) {
        alignas(64) int32_t factor[16] = {}, minus[16] = {};
        alignas(64) float value[16] = {};
        for (int s = 0; s < t.symbols; s++) {
            factor[s] = int32_t(1 | t.frequency[s] << 16);
            minus[s] = -int32_t(t.start[s]);
            if (table) value[s] = table[s];
        }
        for (int i = 0; i < 4; i++) {
            alignas(64) uint16_t word[32];
            for (int j = 0; j < 32; j++) {
                int symbol = (i ? j % 16 : 0) + (8 >> i);
                word[j] = symbol < t.symbols ? uint16_t(t.start[symbol]) : 0xffff;
            }
            above[i] = _mm512_load_si512(word);
        }
        factors = _mm512_load_si512(factor);
        minus_start = _mm512_load_si512(minus);
        values = _mm512_load_ps(value);
        slot_mask = _mm512_set1_epi32((1 << t.precision) - 1);
        high_half = _mm512_set1_epi32(int32_t(0xffff0000u));
        low = _mm512_set1_epi32(kLow);
        very_low = _mm512_set1_epi32(kLow >> 8);
        shift = _mm_cvtsi32_si128(16 - t.precision);
        for (int v = 0; v < V; v++) place[v] = place_of(v);
    }

    // The last symbol that starts at or below a slot, by binary search: words, one to a lane. `above[i]` holds the
    // starts shifted by 8, 4, 2 and 1, so that the position so far is the index of the next one to compare with.
    GRADWIRE_INLINE Int search(Int slots) const {
        Int at = _mm512_maskz_set1_epi16(_mm512_cmpge_epu16_mask(slots, above[0]), 8);
        for (int i = 1; i < 4; i++) {
            Int start = _mm512_permutexvar_epi16(at, above[i]);
            at = _mm512_mask_add_epi16(at, _mm512_cmpge_epu16_mask(slots, start), at,
                                       _mm512_set1_epi16(int16_t(8 >> i)));
        }
        return at;
    }

    // The symbols of a row in the low words of dwords: two vectors are searched as one of words. What is left in the
    // high words does not matter to permutations.
    GRADWIRE_INLINE void symbols_by_search(const Int* slot, Int* symbol) const {
        for (int v = 0; v < V; v += 2) {
            if (V == 1) {
                symbol[v] = search(slot[v]);
                continue;
            }
            Int at = search(_mm512_or_si512(slot[v], _mm512_slli_epi32(slot[v + 1], 16)));
            symbol[v] = at;
            symbol[v + 1] = _mm512_srli_epi32(at, 16);
        }
    }
};

template <int V>
struct Reader {
    Int x[V];
    const uint8_t *begin, *end, *limit;
    size_t row;

    // Takes a byte for each lane in the masks, the highest lane's last; false if there are too few.
    GRADWIRE_INLINE bool take(const __mmask16* m, const Int* place) {
        __mmask64 mask = row_mask<V>(m);
        size_t n = size_t(_mm_popcnt_u64(mask));
        if (size_t(end - begin) < n) return false;
        end -= n;
        Int bytes = limit - end >= 64 ? _mm512_loadu_si512(end)
                                      : _mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, unsigned(n)), end);
        bytes = _mm512_maskz_expand_epi8(mask, bytes);
        for (int v = 0; v < V; v++)
            x[v] = _mm512_or_si512(_mm512_mask_slli_epi32(x[v], m[v], x[v], 8), spread(bytes, place[v]));
        return true;
    }
};

template <Sink S>
GRADWIRE_INLINE void put_vector(const Target& target, size_t i, Int symbol, Float values) {
    if (S == Sink::symbols) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target.symbols + i), _mm512_cvtepi32_epi8(symbol));
        return;
    }
    Float value = _mm512_permutexvar_ps(symbol, values);
    if (S == Sink::add) value = _mm512_add_ps(_mm512_loadu_ps(target.onto + i), value);
    _mm512_storeu_ps(target.out + i, value);
}

// Decodes one row of a chunk.
template <int V, Sink S, bool Coarse>
GRADWIRE_INLINE bool decode_vectors(const DecodeTables<V, Coarse>& t, Reader<V>& r, const Target& target) {
    Int slot[V], symbol[V], rests;
    __mmask16 empty[V];
    if (Coarse) {
        Int slots = t.packer.template low_bytes<V>(r.x);
        Int symbols = t.symbols.look_up(slots);
        for (int v = 0; v < V; v++) symbol[v] = spread(symbols, t.place[v]);
        rests = t.rests.look_up(slots);
    } else {
        for (int v = 0; v < V; v++) slot[v] = _mm512_and_si512(r.x[v], t.slot_mask);
        t.symbols_by_search(slot, symbol);
    }
    Int least = t.low;
    for (int v = 0; v < V; v++) {
        // f * (x >> k) + rest, or + slot - start
        Int rest = Coarse ? spread(rests, t.place[v]) : slot[v];
        Int halves = _mm512_ternarylogic_epi32(_mm512_sll_epi32(r.x[v], t.shift), t.high_half, rest, 0xea);
        Int factors = _mm512_permutexvar_epi32(symbol[v], t.factors);
        r.x[v] = Coarse ? _mm512_madd_epi16(halves, factors)
                        : _mm512_dpwssd_epi32(_mm512_permutexvar_epi32(symbol[v], t.minus_start), halves, factors);
        put_vector<S>(target, r.row + 16 * v, symbol[v], t.values);
        least = _mm512_min_epi32(least, r.x[v]);
    }
    if (!Coarse && __builtin_expect(_mm512_cmplt_epi32_mask(least, t.very_low) != 0, 0)) {
        for (int v = 0; v < V; v++) empty[v] = _mm512_cmplt_epi32_mask(r.x[v], t.very_low);
        if (!r.take(empty, t.place)) return false;
    }
    for (int v = 0; v < V; v++) empty[v] = _mm512_cmplt_epi32_mask(r.x[v], t.low);
    return r.take(empty, t.place);
}

// Reads the states and decodes the last row if it is not full.
template <int V, Sink S>
bool open_chunk(const RansTable& t, const Chunk& c, Reader<V>& r) {
    constexpr int lanes = 16 * V;
    alignas(64) uint32_t states[lanes];
    if (c.length < size_t(3 * lanes) || !read_states(c.data, lanes, states)) return false;
    r.begin = c.data + 3 * lanes;
    r.end = r.limit = c.data + c.length;
    const size_t rows = c.count / lanes;
    if (c.count % lanes) {
        r.end = decode_row<S>(t, rows * lanes, int(c.count % lanes), states, r.begin, r.end, c.target);
        if (!r.end) return false;
    }
    r.row = rows * lanes;
    for (int v = 0; v < V; v++) r.x[v] = _mm512_load_si512(states + 16 * v);
    return true;
}

template <int V>
bool at_start(const Reader<V>& r) {
    __mmask16 off = 0;
    for (int v = 0; v < V; v++) off |= _mm512_cmpneq_epi32_mask(r.x[v], _mm512_set1_epi32(kLow));
    return r.end == r.begin && !off;
}

// N chunks side by side, as long as all have rows left, then each to its end.
template <int V, Sink S, bool Coarse, int N>
bool decode_together(const RansTable& table, const DecodeTables<V, Coarse>& t, const Chunk* chunks) {
    constexpr int lanes = 16 * V;
    Reader<V> r[N];
    size_t shared = ~size_t(0);
    for (int i = 0; i < N; i++) {
        if (!open_chunk<V, S>(table, chunks[i], r[i])) return false;
        size_t rows = r[i].row / lanes;
        shared = rows < shared ? rows : shared;
    }
    for (size_t k = 0; k < shared; k++) {
        bool good = true;
        for (int i = 0; i < N; i++) {
            r[i].row -= lanes;
            good &= decode_vectors<V, S, Coarse>(t, r[i], chunks[i].target);
        }
        if (!good) return false;
    }
    for (int i = 0; i < N; i++) {
        while (r[i].row) {
            r[i].row -= lanes;
            if (!decode_vectors<V, S, Coarse>(t, r[i], chunks[i].target)) return false;
        }
        if (!at_start(r[i])) return false;
    }
    return true;
}

template <int V, Sink S, bool Coarse>
bool decode_chunks(const RansTable& table, const Chunk* chunks, size_t n) {
    const DecodeTables<V, Coarse> t(table, chunks[0].target.values);
    size_t i = 0;
    bool good = true;
    for (; good && n - i >= kTogether; i += kTogether)
        good = decode_together<V, S, Coarse, kTogether>(table, t, chunks + i);
    if (kTogether > 2 && good && n - i >= 2) {
        good = decode_together<V, S, Coarse, 2>(table, t, chunks + i);
        i += 2;
    }
    if (good && i < n) good = decode_together<V, S, Coarse, 1>(table, t, chunks + i);
    return good;
}

template <int V, Sink S>
bool decode_chunks_of(const RansTable& t, const Chunk* chunks, size_t n) {
    return (t.precision == 8 ? decode_chunks<V, S, true> : decode_chunks<V, S, false>)(t, chunks, n);
}

template <int V>
bool decode_chunks_to(const RansTable& t, const Chunk* chunks, size_t n, Sink sink) {
    switch (sink) {
        case Sink::symbols: return decode_chunks_of<V, Sink::symbols>(t, chunks, n);
        case Sink::store: return decode_chunks_of<V, Sink::store>(t, chunks, n);
        default: return decode_chunks_of<V, Sink::add>(t, chunks, n);
    }
}

bool rans_decode(const RansTable& t, const Chunk* chunks, size_t n, int lanes, Sink sink) {
    if (t.symbols <= 16 && lanes >= 16) {
        switch (lanes) {
            case 16: return decode_chunks_to<1>(t, chunks, n, sink);
            case 32: return decode_chunks_to<2>(t, chunks, n, sink);
            default: return decode_chunks_to<4>(t, chunks, n, sink);
        }
    }
    return rans_decode_any(t, chunks, n, lanes, sink);
}

// Two streams through memory are read faster than one.
uint32_t absmax_bits(const float* x, size_t n) {
    const Int magnitude = _mm512_set1_epi32(0x7fffffff);
    const size_t half = n / 32 * 16;
    Int a = _mm512_setzero_si512(), b = a;
    for (size_t i = 0; i < half; i += 16) {
        a = _mm512_max_epu32(a, _mm512_and_si512(magnitude, _mm512_loadu_si512(x + i)));
        b = _mm512_max_epu32(b, _mm512_and_si512(magnitude, _mm512_loadu_si512(x + half + i)));
    }
    uint32_t rest = absmax_bits_loop(x + 2 * half, n - 2 * half),
             most = _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
    return rest > most ? rest : most;
}

}  // namespace

const Kernels avx512_kernels = {"avx512",    absmax_bits,   quantize_any, squared_error_loop,
                                rans_encode, quantize_rans, rans_decode};

}  // namespace gradwire
#endif
