// The numbers of a bucket as its frame states them, and the values that a receiver makes of them.
#pragma once
#include "common.h"

const float kLargest = 8.507059173023462e37f;  // 2^126, the largest magnitude of a level
enum { MAX_NORM, L2_NORM, RANGE };             // methods of the kernels for scaled levels
enum { EXPLICIT = 0, EVEN = 1, SYMMETRIC = 2 };  // kinds of numbers, as on the wire

struct Recipe {  // of `Tensor.format`
    int method, levels, kind, precision, bucket, outward;
};

// The place of pair k of a table in shared memory, in 32 bits, so that no addition is needed where it is read. What is
// read from there is what has been stored before this is called.
__device__ __forceinline__ u32 place_of(const float2* table, int k) {
#ifdef GRADWIRE_ON_CPU
    return 8 * k;
#else
    u32 place = u32(__cvta_generic_to_shared(table + k));
    asm volatile("" : "+r"(place)::"memory");
    return place;
#endif
}

__device__ __forceinline__ float float_at(const float2* table, u32 place) {
#ifdef GRADWIRE_ON_CPU
    return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + place);
#else
    float x;
    asm("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(place));
    return x;
#endif
}

__device__ __forceinline__ float2 pair_at(const float2* table, u32 place) {
#ifdef GRADWIRE_ON_CPU
    return *reinterpret_cast<const float2*>(reinterpret_cast<const char*>(table) + place);
#else
    float2 x;
    asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(place));
    return x;
#endif
}

__device__ __forceinline__ float to_type(float x, int type) { return received(x, type) + 0.0f; }  // no −0

// The least number of this type that is not below x.
__device__ __forceinline__ float up_to_type(float x, int type) {
    float y = received(x, type);
    if (type == FP32 || y >= x) return y;
    u32 bits = type == FP16 ? float_to_half(y) : float_to_bf16(y);
    bits = y > 0 ? bits + 1 : y < 0 ? bits - 1 : 1;
    float next = type == FP16 ? half_to_float(u16(bits)) : bf16_to_float(u16(bits));
    return is_finite(next) ? next : y;
}

// Away from all entries, so that none is outside; first to the tensor's dtype, to which the receiver rounds.
__device__ __forceinline__ float outward(float x, int dtype, int precision) {
    return up_to_type(up_to_type(x, dtype), precision) + 0.0f;
}

__device__ __forceinline__ void put_number(u8* at, float x, int precision) {
    u32 bits = precision == FP32 ? __float_as_uint(x) : precision == FP16 ? float_to_half(x) : float_to_bf16(x);
    at[0] = u8(bits), at[1] = u8(bits >> 8);
    if (precision == FP32) at[2] = u8(bits >> 16), at[3] = u8(bits >> 24);
}

// Rounds the numbers of a bucket of n entries and writes them to the frame. By a warp, whose own numbers these are.
__device__ __forceinline__ void state_numbers(Job* job, const Recipe& recipe, int dtype, int n, float* numbers,
                                              u8* at) {
    int lane = threadIdx.x & 31, s = recipe.levels, precision = recipe.precision;
    int width = recipe.kind == EXPLICIT ? s : recipe.kind == EVEN ? 2 : 1;
    float limit = dtype == FP16 ? 65504.0f : kLargest;
    int used = n < 2 ? 2 : n;
    used = used < width ? used : width;
    int last = n - 1 < 1 ? 1 : n - 1;  // a small bucket repeats its last level
    last = last < width - 1 ? last : width - 1;
    float final = limited(numbers[width - 1], limit);
    __syncwarp();
#pragma unroll 1
    for (int k = lane; k < width; k += 32) {
        float x = limited(numbers[k], limit), y = to_type(x, precision);
        if (recipe.outward && k >= last) y = outward(final, dtype, precision);
        if (recipe.outward && k < last && !k) y = -outward(-x, dtype, precision) + 0.0f;
        numbers[k] = y;
        if (precision == FP16 && !(fabsf(x) <= 65504.0f)) atomicOr(&job->status->bits, u32(UNUSUAL));
        if (k < used) put_number(at + k * (precision == FP32 ? 4 : 2), y, precision);
    }
    __syncwarp();
}

// What a receiver gets for symbol k.
__device__ __forceinline__ float value_of(const Recipe& recipe, const float* numbers, int dtype, int k) {
    int s = recipe.levels;
    float level = numbers[recipe.kind == EXPLICIT ? k : 0];
    if (recipe.kind != EXPLICIT) {
        double low = recipe.kind == SYMMETRIC ? -double(level) : double(level);
        double high = recipe.kind == SYMMETRIC ? double(level) : double(numbers[1]);
        double both = low * double(s - 1 - k) + high * double(k);
        // Half, a quarter … of it is the same whether one divides or multiplies, which is faster.
        double part = double(__uint_as_float(u32(96 + __clz(s - 1)) << 23));
        level = __double2float_rn((s - 1) & (s - 2) ? both / double(s - 1) : both * part);
    }
    return received(level, dtype);
}

// States the values on both sides of each threshold, which are the inner values, up to the next power of two: values[k]
// is what the symbols k and k + 1 stand for.
__device__ __forceinline__ void state_values(const Recipe& recipe, const float* numbers, float2* values, int dtype,
                                             int thresholds) {
    int s = recipe.levels;
#pragma unroll 1
    for (int k = threadIdx.x & 31; k < s || k < thresholds; k += 32) {
        float value = k < s ? value_of(recipe, numbers, dtype, k) : 0.0f;
        if (k < thresholds) values[k].x = k < s - 1 ? value : kInfinity;
        if (k && k < s) values[k - 1].y = value;
    }
    __syncwarp();
}
