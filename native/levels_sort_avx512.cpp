// BinGrad-b's splits of a bucket of up to 512 entries with AVX-512: all entries are sorted in 32 registers.
//
// In sorted order, entry 32 l + r is lane l of register r. Lanes are sorted first, side by side, by Batcher's network of
// minima and maxima between registers; then lanes are merged two by two, and only that moves entries between lanes. This
// order also lets all lanes add up their entries side by side, where sums are exact.
//
// Traps:
// - Floats are compared as integers of the same order, which all differ from that of padding: no float but a NaN has it.
// - Gains are rounded otherwise than the reference's, by some 2^-51 of themselves: a table of inverses is faster than
//   divisions. So all splits that might be the best are found, and the caller computes their gains as it is written.
#ifdef GRADWIRE_X86
#include <immintrin.h>

#include <utility>

#include "levels_loops.h"

namespace gradwire {
namespace {

constexpr int kRegisters = 32, kNone = 0x7fffffff;
constexpr double kNearly = 1 - 1e-12;

using Registers = __m512i[kRegisters];

struct Exchange {
    int low, high;
};

template <int Count>
struct Exchanges {
    Exchange at[Count] = {};
    int count = 0;
    constexpr void add(int low, int high) { at[count++] = {low, high}; }
};

constexpr Exchanges<191> batcher() {
    Exchanges<191> all;
    for (int p = 1; p < kRegisters; p *= 2)
        for (int k = p; k; k /= 2)
            for (int j = k % p; j + k < kRegisters; j += 2 * k)
                for (int i = j; i < j + k && i + k < kRegisters; i++)
                    if (i / (2 * p) == (i + k) / (2 * p)) all.add(i, i + k);
    return all;
}

constexpr Exchanges<80> bitonic() {
    Exchanges<80> all;
    for (int distance = kRegisters / 2; distance; distance /= 2)
        for (int i = 0; i < kRegisters; i++)
            if (!(i & distance)) all.add(i, i | distance);
    return all;
}

GRADWIRE_INLINE void exchange(__m512i& low, __m512i& high) {
    const __m512i least = _mm512_min_epi32(low, high);
    high = _mm512_max_epi32(low, high);
    low = least;
}

constexpr auto kBatcher = batcher();
constexpr auto kBitonic = bitonic();

template <const auto& Network, size_t... I>
GRADWIRE_INLINE void run(Registers& v, std::index_sequence<I...>) {
    (exchange(v[Network.at[I].low], v[Network.at[I].high]), ...);
}

// Lanes whose number differs in the bits of `Bits`, exchanged.
template <int Bits>
GRADWIRE_INLINE __m512i swapped(__m512i v) {
    switch (Bits) {
        case 1: return _mm512_shuffle_epi32(v, _MM_PERM_CDAB);
        case 2: return _mm512_shuffle_epi32(v, _MM_PERM_BADC);
        case 3: return _mm512_shuffle_epi32(v, _MM_PERM_ABCD);
        case 4: return _mm512_shuffle_i32x4(v, v, 0xb1);
        default: {
            const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            return _mm512_permutexvar_epi32(_mm512_xor_si512(lane, _mm512_set1_epi32(Bits)), v);
        }
    }
}

// The smaller of both, and the larger in lanes whose number has the bit `High`.
template <int High>
GRADWIRE_INLINE __m512i sides(__m512i v, __m512i other) {
    constexpr unsigned kUpper = High == 1 ? 0xaaaa : High == 2 ? 0xcccc : High == 4 ? 0xf0f0 : 0xff00;
    return _mm512_mask_max_epi32(_mm512_min_epi32(v, other), __mmask16(kUpper), v, other);
}

template <int Distance>
GRADWIRE_INLINE void merge_lanes(Registers& v) {
    for (int r = 0; r < kRegisters; r++) v[r] = sides<Distance>(v[r], swapped<Distance>(v[r]));
}

// From sorted runs of Lanes / 2 lanes to such of Lanes: the one upwards, the other downwards, are bitonic.
template <int Lanes>
void merge(Registers& v) {
    for (int r = 0; r < kRegisters / 2; r++) {
        __m512i &a = v[r], &b = v[kRegisters - 1 - r];
        const __m512i from_a = swapped<Lanes - 1>(a);
        a = sides<Lanes / 2>(a, swapped<Lanes - 1>(b));
        b = sides<Lanes / 2>(b, from_a);
    }
    if (Lanes >= 16) merge_lanes<4>(v);
    if (Lanes >= 8) merge_lanes<2>(v);
    if (Lanes >= 4) merge_lanes<1>(v);
}

[[gnu::noinline]] void sort_lanes(Registers& memory) {
    Registers v;
    for (int r = 0; r < kRegisters; r++) v[r] = memory[r];
    run<kBatcher>(v, std::make_index_sequence<191>());
    for (int r = 0; r < kRegisters; r++) memory[r] = v[r];
}

[[gnu::noinline]] void merge_registers(Registers& memory) {
    Registers v;
    for (int r = 0; r < kRegisters; r++) v[r] = memory[r];
    run<kBitonic>(v, std::make_index_sequence<80>());
    for (int r = 0; r < kRegisters; r++) memory[r] = v[r];
}

void sort(Registers& v) {
    sort_lanes(v);
    merge<2>(v);
    merge_registers(v);
    merge<4>(v);
    merge_registers(v);
    merge<8>(v);
    merge_registers(v);
    merge<16>(v);
    merge_registers(v);
}

// Floats to integers of their order, and back.
GRADWIRE_INLINE __m512i in_order(__m512i bits) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    return _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), magnitude));
}

}  // namespace

size_t splits_avx512(const float* u, size_t n, bool exact, const double* inverses, double& total, SplitPlace* found) {
    alignas(64) Registers v;
    for (size_t r = 0, i = 0; r < size_t(kRegisters); r++, i += 16) {
        const __mmask16 valid = i >= n ? 0 : n - i >= 16 ? 0xffff : __mmask16((1u << (n - i)) - 1);
        const __m512i entries = _mm512_maskz_loadu_epi32(valid, u + i);
        v[r] = _mm512_mask_mov_epi32(_mm512_set1_epi32(kNone), valid, in_order(entries));
    }
    sort(v);

    // Place 16 r + l of `left` has the sum of all entries up to 32 l + r.
    alignas(64) double left[kSplitMost], gains[kSplitMost];
    alignas(64) double offsets[16] = {};
    __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    for (int r = 0; r < kRegisters; r++) {
        const __mmask16 valid = _mm512_cmpneq_epi32_mask(v[r], _mm512_set1_epi32(kNone));
        const __m512 x = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(valid, in_order(v[r])));
        v[r] = _mm512_castps_si512(x);
        sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
        sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
        _mm512_store_pd(left + 16 * r, sums[0]);
        _mm512_store_pd(left + 16 * r + 8, sums[1]);
    }
    total = 0;
    if (exact) {
        for (int l = 0; l < 16; l++) {
            offsets[l] = total;
            total += sums[l / 8][l % 8];
        }
    } else {
        const float* x = reinterpret_cast<const float*>(v);
        for (size_t i = 0; i < n; i++) {
            const size_t at = i % kRegisters * 16 + i / kRegisters;
            total += double(x[at]);
            left[at] = total;
        }
    }

    const __m512d all = _mm512_set1_pd(total);
    __m512d most = _mm512_setzero_pd();
    for (size_t i = 0; i < kSplitMost; i += 8) {
        const __m512d a = _mm512_add_pd(_mm512_load_pd(left + i), _mm512_load_pd(offsets + i % 16));
        const __m512d b = _mm512_sub_pd(all, a);
        const __m512d gain = _mm512_add_pd(_mm512_mul_pd(_mm512_mul_pd(a, a), _mm512_loadu_pd(inverses + i)),
                                           _mm512_mul_pd(_mm512_mul_pd(b, b),
                                                         _mm512_loadu_pd(inverses + kSplitMost + i)));
        _mm512_store_pd(gains + i, gain);
        most = _mm512_max_pd(most, gain);
    }
    const __m512d enough = _mm512_set1_pd(_mm512_reduce_max_pd(most) * kNearly);
    size_t count = 0;
    for (size_t i = 0; i < kSplitMost; i += 8) {
        unsigned best = _mm512_cmp_pd_mask(_mm512_load_pd(gains + i), enough, _CMP_GE_OQ);
        for (; best; best &= best - 1) {
            const size_t at = i + size_t(__builtin_ctz(best)), c = at % 16 * kRegisters + at / 16 + 1;
            if (c < n) found[count++] = {c, left[at] + offsets[at % 16]};
        }
    }
    return count;
}

}  // namespace gradwire
#endif
