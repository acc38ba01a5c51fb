// Momentum before the exchange, of all tensors of a message at once: velocities, and zeros where something was sent.
//
// The arithmetic is torch's: correct/momentum.py has the same for one tensor. Sums with a factor are fused there, too.
#include "common.h"

const int kPushed = 4096;  // entries of a tile

struct Push {
    const void* gradient;
    const void* parameter;  // null without weight decay
    const float* before;  // null in the first step
    float* velocity;  // null without momentum
    void* out;  // what is passed on, where that is another tensor than the velocity; it may be the gradient
    i64 count;
    float momentum, weight_decay;
    int dtype, of_parameter, of_out, nesterov;
};

struct Mask {
    float* velocity;
    const void* values;  // what was to be sent, beside the memory
    const float *before, *after;
    i64 count;
    float decay;
    int dtype;
};

__device__ __forceinline__ void store_rounded(void* out, i64 i, float x, int dtype) {
    if (dtype == FP32) {
        static_cast<float*>(out)[i] = x;
        return;
    }
    u16 bits = dtype == FP16 ? float_to_half(x) : x == x ? float_to_bf16(x) : u16(0x7fc0);
    static_cast<u16*>(out)[i] = bits;
}

extern "C" __global__ void __launch_bounds__(256) push_velocities(const Push* pushes, const Where* tiles) {
    Where where = tiles[blockIdx.x];
    const Push& p = pushes[where.item];
    i64 begin = i64(where.index) * kPushed, end = begin + kPushed < p.count ? begin + kPushed : p.count;
#pragma unroll 4
    for (i64 i = begin + threadIdx.x; i < end; i += 256) {
        float g = load(p.gradient, i, p.dtype);
        if (p.parameter) g = __fmaf_rn(load(p.parameter, i, p.of_parameter), p.weight_decay, g);
        float passed = g;
        if (p.velocity) {
            float v = p.before ? __fadd_rn(__fmul_rn(p.before[i], p.momentum), g) : g;
            p.velocity[i] = v;
            passed = p.nesterov ? __fmaf_rn(v, p.momentum, g) : v;
        }
        if (p.out) store_rounded(p.out, i, passed, p.of_out);
    }
}

// What was sent is what the new error memory does not hold whole.
extern "C" __global__ void __launch_bounds__(256) mask_velocities(const Mask* masks, const Where* tiles) {
    Where where = tiles[blockIdx.x];
    const Mask& m = masks[where.item];
    i64 begin = i64(where.index) * kPushed, end = begin + kPushed < m.count ? begin + kPushed : m.count;
#pragma unroll 8
    for (i64 i = begin + threadIdx.x; i < end; i += 256)
        if (compensated(load(m.values, i, m.dtype), m.before[i], m.decay) != m.after[i]) m.velocity[i] = 0.0f;
}
