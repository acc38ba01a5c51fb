// The native kernels: the operations of src/gradwire/kernels/reference/ on flat arrays, bit for bit.
//
// Every instruction set fills in one `Kernels` table (portable.cpp, simd_avx2.cpp, simd_avx512.cpp, simd_neon.cpp);
// dispatch.cpp chooses between them at run time. The bytes are the same from all of them.
#pragma once

#include <cstddef>
#include <cstdint>

// Every arm64 has NEON: the compiler says so, and no option is needed. (Of x86, the build says it: CMakeLists.txt.)
#if defined(__aarch64__) && defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define GRADWIRE_NEON 1
#endif

namespace gradwire {

constexpr int kLowBits = 14, kHighBits = 22;  // rANS states live in [2^14, 2^22)
constexpr uint32_t kLow = 1u << kLowBits;
constexpr int kMaxPrecision = 14, kMaxSymbols = 256, kMaxLanes = 64;

// A float format and the step it is used with.
struct Quantizer {
    float decay, inverse, largest;  // inverse = 1/step
    int min_exponent, mantissa, zero_symbol, top_index;
    bool has_sign;
    const float* values;  // what each symbol stands for
    int symbols;
    uint64_t seed;
    bool stochastic;
};

// u = g + decay * memory goes in; memory_out = u - value(symbol) comes out. Both memories may be null, or equal.
struct Stream {
    const float* gradient;
    const float* memory;
    float* memory_out;
    size_t count;
    uint64_t first;  // index of the first entry, for the random numbers
    // Large, and memory_out is a buffer of its own: written past the caches. It would otherwise be read first, and its
    // lines, which have the same place in their pages as those of the other two, would hold up their loads.
    bool far = false;

    Stream part(size_t start, size_t n) const {
        return {gradient + start,
                memory ? memory + start : nullptr,
                memory_out ? memory_out + start : nullptr,
                n,
                first + start,
                far};
    }

    // The memory, if the new one is written over the old one.
    float* in_place() const { return memory_out == memory ? memory_out : nullptr; }
    // What an entry reads and writes.
    size_t entry_bytes() const { return 4 + (memory ? 4 : 0) + (memory_out ? 4 : 0); }
    bool streams() const { return far && (reinterpret_cast<uintptr_t>(memory_out) & 63) == 0; }
};

// Frequencies of a model in the forms that encoders and decoders want.
struct RansTable {
    int precision, symbols;
    uint32_t frequency[kMaxSymbols], start[kMaxSymbols];
    float reciprocal[kMaxSymbols];  // see rans.h: rounded up, so that truncation divides exactly
    uint8_t symbol_of_slot[1 << kMaxPrecision];

    RansTable(const int64_t* frequencies, int symbols, int precision);
};

enum class Sink { symbols, store, add };  // where decoded symbols go: as they are, or their values

// What a decoder writes to: `symbols` for Sink::symbols, `values` (a table) and `out` for the others. Sink::add adds
// values to `onto`, which may be `out` itself.
struct Target {
    uint8_t* symbols;
    const float* values;
    float* out;
    const float* onto;
};

// A coded chunk of `count` entries, and where they go.
struct Chunk {
    const uint8_t* data;
    size_t length, count;
    Target target;
};

// What an encoder did: it stops before a row that holds a NaN or an infinity, with a valid chunk of the rows before it.
struct Coded {
    size_t bytes, entries;
};

struct Kernels {
    const char* name;
    uint32_t (*absmax_bits)(const float* x, size_t n);  // bit pattern of max |x|; NaN counts as largest
    void (*quantize)(const Quantizer& q, const Stream& s, uint8_t* symbols);
    double (*squared_error)(const Quantizer& q, const float* u, size_t n);
    // Both write a chunk to `out`, which has room for rans_bound(count, lanes, 1).
    size_t (*rans_encode)(const RansTable& t, const uint8_t* symbols, size_t count, int lanes, uint8_t* out);
    Coded (*quantize_rans)(const Quantizer& q, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                           uint8_t* scratch);
    // False if a chunk is damaged. Reads no byte outside their data.
    bool (*rans_decode)(const RansTable& t, const Chunk* chunks, size_t n, int lanes, Sink sink);
};

// Every symbol emits at most two bytes; the rest is the states and room for one wide store.
inline size_t rans_bound(size_t count, int lanes, size_t chunks) { return 2 * count + 3 * size_t(lanes) * chunks + 64; }

extern const Kernels portable_kernels;
#ifdef GRADWIRE_X86
extern const Kernels avx2_kernels, avx512_kernels;
#endif
#ifdef GRADWIRE_NEON
extern const Kernels neon_kernels;
#endif

const Kernels& kernels();  // the ones in use
bool use_kernels(const char* name);  // false if this machine lacks them
const char* const* available_kernels();  // null-terminated, best last

// Of portable_x, avx2_x, avx512_x and neon_x the one that goes with kernels(), as far as this machine has them.
#ifdef GRADWIRE_X86
#define GRADWIRE_IN_USE(x)                                                                                             \
    (&kernels() == &avx512_kernels ? avx512_##x : &kernels() == &avx2_kernels ? avx2_##x : portable_##x)
#elif defined(GRADWIRE_NEON)
#define GRADWIRE_IN_USE(x) (&kernels() == &neon_kernels ? neon_##x : portable_##x)
#else
#define GRADWIRE_IN_USE(x) portable_##x
#endif

uint32_t crc32(const uint8_t* data, size_t n, uint32_t value);
// The CRC of one piece of data and another behind it, of n bytes, from those of both.
uint32_t crc32_joined(uint32_t first, uint32_t second, size_t n);

// Sums over the entries that are not zero, in fp64 (eight partial sums, always the same ones).
void moments(const float* x, size_t n, int64_t& nonzero, double& sum_abs, double& sum_square);

// u at the sampled entries (docs/architecture.md): `runs` runs of `length` entries, one in each equal part; or at all
// entries, if there are no more.
void sample(const float* gradient, const float* memory, float decay, size_t n, size_t runs, size_t length, float* out);

void pack_bits(const uint8_t* symbols, size_t n, int width, uint8_t* out);
bool unpack_bits(const uint8_t* data, size_t n, int width, int limit, uint8_t* symbols);
// The bits of each symbol's code, by package-merge; 0 where it has none.
void huffman_lengths(const int64_t* frequencies, int symbols, uint8_t* lengths);
// Eight bytes more room than it takes.
size_t huffman_encode(const uint8_t* symbols, size_t n, const uint8_t* lengths, const uint16_t* codes, int alphabet,
                      uint8_t* out);
bool huffman_decode(const uint8_t* data, size_t length, size_t n, const uint8_t* lengths, const uint16_t* codes,
                    int symbols, uint8_t* out);

}  // namespace gradwire
