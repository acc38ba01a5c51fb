// The loops of PacketKernels, for vectors of some 64-bit words; included by a file for each instruction set.
#pragma once

#include "packets.h"

namespace gradwire {
namespace {

typedef uint64_t Vector2 __attribute__((vector_size(16)));
typedef uint64_t Vector4 __attribute__((vector_size(32)));
typedef uint64_t Vector8 __attribute__((vector_size(64)));

template <class Vector>
struct Lanes {
    static constexpr int lanes = sizeof(Vector) / 8;

    static Vector shuffle(Vector a, Vector b, Vector from) {
#ifdef __clang__
        Vector out;
        for (int i = 0; i < lanes; i++) out[i] = from[i] < lanes ? a[from[i]] : b[from[i] - lanes];
        return out;
#else
        return __builtin_shuffle(a, b, from);
#endif
    }

    // Word i of every lane's message becomes one vector: a transposition of lanes × lanes words, in log2(lanes) steps
    // in which neighbouring rows change halves of theirs.
    static void transpose(Vector (&rows)[lanes]) {
        for (int step = 1; step < lanes; step *= 2) {
            Vector low, high;  // indices into two rows side by side
            for (int i = 0; i < lanes; i++) {
                bool odd = i & step;
                low[i] = odd ? uint64_t(lanes + i - step) : uint64_t(i);
                high[i] = odd ? uint64_t(lanes + i) : uint64_t(i + step);
            }
            for (int i = 0; i < lanes; i++) {
                if (i & step) continue;
                Vector a = rows[i], b = rows[i + step];
                rows[i] = shuffle(a, b, low);
                rows[i + step] = shuffle(a, b, high);
            }
        }
    }

    static SipState<Vector> state_of(const ToCode* packets) {  // after the headers
        Vector k0, k1;
        for (int i = 0; i < lanes; i++) k0[i] = packets[i].key.k0, k1[i] = packets[i].key.k1;
        SipState<Vector> state(k0, k1);
        for (size_t at = 0; at < kCodedHeader; at += 8) {
            uint64_t words[lanes];
            for (int i = 0; i < lanes; i++) std::memcpy(&words[i], packets[i].head + at, 8);
            Vector word;
            std::memcpy(&word, words, sizeof word);
            state.take(word);
        }
        return state;
    }
    static void load(const ToCode* packets, size_t at, Vector (&rows)[lanes]) {
        for (int i = 0; i < lanes; i++) std::memcpy(&rows[i], packets[i].body + at, 8 * lanes);
        transpose(rows);
    }
    static void store(SipState<Vector>& state, uint64_t* out) {
        Vector code = state.finish(kCodedHeader + kPayloadBytes);
        std::memcpy(out, &code, sizeof code);
    }

    static void codes_of(const ToCode* packets, uint64_t* out) {
        SipState<Vector> state = state_of(packets);
        for (size_t at = 0; at < kPayloadBytes; at += 8 * lanes) {
            Vector rows[lanes];
            load(packets, at, rows);
            for (int i = 0; i < lanes; i++) state.take(rows[i]);
        }
        store(state, out);
    }
    // Two vectors of packets side by side: each is a chain of operations that wait for each other.
    static void codes_of_two(const ToCode* packets, uint64_t* out) {
        SipState<Vector> one = state_of(packets), two = state_of(packets + lanes);
        for (size_t at = 0; at < kPayloadBytes; at += 8 * lanes) {
            Vector rows[lanes], others[lanes];
            load(packets, at, rows);
            load(packets + lanes, at, others);
            for (int i = 0; i < lanes; i++) one.take(rows[i]), two.take(others[i]);
        }
        store(one, out);
        store(two, out + lanes);
    }
    static_assert(kPayloadBytes % (8 * lanes) == 0, "no rest");

    static void codes(const ToCode* packets, size_t count, uint64_t* out) {
        for (; count >= size_t(2 * lanes); count -= 2 * lanes, packets += 2 * lanes, out += 2 * lanes)
            codes_of_two(packets, out);
        for (; count >= size_t(lanes); count -= lanes, packets += lanes, out += lanes) codes_of(packets, out);
        if (count == 0) return;
        if (count == 1) {  // as fast as all lanes
            *out = siphash(packets->key, packets->head, kCodedHeader, packets->body, kPayloadBytes);
            return;
        }
        ToCode filled[lanes];
        uint64_t codes[lanes];
        for (int i = 0; i < lanes; i++) filled[i] = packets[size_t(i) < count ? i : 0];
        codes_of(filled, codes);
        std::memcpy(out, codes, 8 * count);
    }

    static void add(uint32_t* sum, const uint8_t* words) {
        for (size_t i = 0; i < kWords; i++) {
            uint32_t word;
            std::memcpy(&word, words + 4 * i, 4);
            sum[i] += word;
        }
    }
    static void either(uint32_t* sum, const uint8_t* words) {
        for (size_t i = 0; i < kWords; i++) {
            uint32_t word;
            std::memcpy(&word, words + 4 * i, 4);
            sum[i] |= word;
        }
    }
    static constexpr PacketKernels kernels() { return {codes, add, either}; }
};

}  // namespace
}  // namespace gradwire
