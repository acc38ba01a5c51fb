// Runs CUDA C++ on the CPU, for tests: every thread of a block is a fiber, blocks run one after the other.
//
// A fiber goes on until it has to wait for others (__syncthreads, or a vote or shuffle of its warp). What a kernel reads
// from memory that no thread has written is what the test put there. Only what the kernels of gradwire use is here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

#define GRADWIRE_ON_CPU 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)

namespace on_cpu {
struct Index {
    unsigned x = 0, y = 0, z = 0;
};

constexpr size_t kStack = 128 << 10;
constexpr int kMostThreads = 1024;

struct Warp {
    uint64_t values[32];
    uint32_t arrived = 0;
    unsigned generation = 0;
};

struct Fiber {
    ucontext_t context;
    Index thread;
    bool done = true;
};

inline Fiber fibers[kMostThreads];
inline Warp warps[kMostThreads / 32];
inline char* stacks = nullptr;
inline ucontext_t scheduler;
inline int current = 0, count = 0, waiting = 0, alive = 0;
inline unsigned generation = 0;
inline Index block_index, block_size, grid_size;
inline std::function<void()> body;

// A hand-written switch is twenty times as fast as swapcontext, which asks the kernel for its signal mask.
#if defined(__x86_64__)
inline void* saved[kMostThreads + 1];
extern "C" void gradwire_switch(void** from, void* to);
asm(R"(
.text
.weak gradwire_switch
.type gradwire_switch,@function
gradwire_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#endif

inline void run_fiber() {
    body();
    fibers[current].done = true;
    alive--;
#if defined(__x86_64__)
    gradwire_switch(&saved[current], saved[kMostThreads]);
#else
    swapcontext(&fibers[current].context, &scheduler);
#endif
    abort();
}

inline void yield() {
    int self = current;
#if defined(__x86_64__)
    gradwire_switch(&saved[self], saved[kMostThreads]);
#else
    swapcontext(&fibers[self].context, &scheduler);
#endif
    current = self;
}

inline void run_block(int threads) {
    count = alive = threads;
    waiting = 0;
    for (int i = 0; i < (threads + 31) / 32; i++) warps[i].arrived = 0;
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.done = false;
        fiber.thread = {unsigned(i), 0, 0};
        char* top = stacks + kStack * (i + 1);
#if defined(__x86_64__)
        void** stack = reinterpret_cast<void**>(top) - 2;
        stack[0] = reinterpret_cast<void*>(&run_fiber);
        stack -= 6;
        memset(stack, 0, 48);
        saved[i] = stack;
#else
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = top - kStack;
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(run_fiber), 0);
#endif
    }
    while (alive) {
        for (int i = 0; i < threads; i++) {
            if (fibers[i].done) continue;
            current = i;
#if defined(__x86_64__)
            gradwire_switch(&saved[kMostThreads], saved[i]);
#else
            swapcontext(&scheduler, &fibers[i].context);
#endif
        }
    }
}

inline void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
    if (!stacks)
        stacks = static_cast<char*>(mmap(nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    body = std::move(kernel);
    grid_size = {blocks, 1, 1};
    block_size = {threads, 1, 1};
    for (unsigned b = 0; b < blocks; b++) {
        block_index = {b, 0, 0};
        run_block(threads);
    }
}

inline void block_barrier() {
    unsigned mine = generation;
    if (++waiting >= alive) {  // threads that have returned count as arrived
        waiting = 0;
        generation++;
        return;
    }
    while (generation == mine) {
        yield();
        if (generation == mine && waiting >= alive) {
            waiting = 0;
            generation++;
        }
    }
}

// Every lane of the mask puts a value; returns when all have, with the values in `warps`. Two barriers: nobody may put
// the next value before all have taken this one.
inline void warp_barrier(unsigned mask) {
    Warp& warp = warps[current / 32];
    unsigned mine = warp.generation;
    warp.arrived |= 1u << (current % 32);
    if ((warp.arrived & mask) == mask) {
        warp.arrived &= ~mask;
        warp.generation++;
        return;
    }
    while (warp.generation == mine) yield();
}

template <typename T>
inline void put(unsigned mask, T value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    warps[current / 32].values[current % 32] = bits;
    warp_barrier(mask);
}

template <typename T>
inline T taken(int lane) {
    T value;
    memcpy(&value, &warps[current / 32].values[lane & 31], sizeof value);
    return value;
}

template <typename T>
inline T shuffled(unsigned mask, T value, int from) {
    put(mask, value);
    T result = taken<T>(from);
    warp_barrier(mask);
    return result;
}
}  // namespace on_cpu

#define threadIdx (on_cpu::fibers[on_cpu::current].thread)
#define blockIdx (on_cpu::block_index)
#define blockDim (on_cpu::block_size)
#define gridDim (on_cpu::grid_size)

inline void __syncthreads() { on_cpu::block_barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { on_cpu::warp_barrier(mask); }
inline void __threadfence() {}
inline int __syncthreads_or(int p) {
    static int any;
    __syncthreads();
    if (!threadIdx.x) any = 0;
    __syncthreads();
    if (p) any = 1;
    __syncthreads();
    return any;
}
inline unsigned __ballot_sync(unsigned mask, int p) {
    on_cpu::put<int>(mask, p != 0);
    unsigned result = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && on_cpu::taken<int>(i)) result |= 1u << i;
    on_cpu::warp_barrier(mask);
    return result;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
template <typename T>
inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
    int lane = threadIdx.x & 31;
    return on_cpu::shuffled(mask, v, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned by) {
    int lane = threadIdx.x & 31;
    return on_cpu::shuffled(mask, v, lane < int(by) ? lane : lane - int(by));
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned by) {
    int lane = threadIdx.x & 31;
    return on_cpu::shuffled(mask, v, lane + int(by) > 31 ? lane : lane + int(by));
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T v, int by) {
    return on_cpu::shuffled(mask, v, int(threadIdx.x & 31) ^ by);
}
inline unsigned __match_any_sync(unsigned mask, unsigned value) {
    on_cpu::put(mask, value);
    unsigned result = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && on_cpu::taken<unsigned>(i) == value) result |= 1u << i;
    on_cpu::warp_barrier(mask);
    return result;
}
inline unsigned __activemask() { return ~0u; }
inline void __nanosleep(unsigned) { on_cpu::yield(); }

template <typename T, typename U>
inline T atomicAdd(T* p, U v) {
    T old = *p;
    *p = T(old + T(v));
    return old;
}
template <typename T, typename U>
inline T atomicOr(T* p, U v) {
    T old = *p;
    *p = old | T(v);
    return old;
}
template <typename T, typename U>
inline T atomicXor(T* p, U v) {
    T old = *p;
    *p = old ^ T(v);
    return old;
}
template <typename T, typename U>
inline T atomicMax(T* p, U v) {
    T old = *p;
    if (T(v) > old) *p = T(v);
    return old;
}
template <typename T, typename U>
inline T atomicMin(T* p, U v) {
    T old = *p;
    if (T(v) < old) *p = T(v);
    return old;
}
template <typename T, typename U>
inline T atomicExch(T* p, U v) {
    T old = *p;
    *p = T(v);
    return old;
}
template <typename T, typename U, typename V>
inline T atomicCAS(T* p, U expected, V v) {
    T old = *p;
    if (old == T(expected)) *p = T(v);
    return old;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned __float_as_uint(float x) {
    unsigned b;
    memcpy(&b, &x, 4);
    return b;
}
inline float __uint_as_float(unsigned b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}
inline long long __double_as_longlong(double x) {
    long long b;
    memcpy(&b, &x, 8);
    return b;
}
inline double __longlong_as_double(long long b) {
    double x;
    memcpy(&x, &b, 8);
    return x;
}
inline int __float2int_rn(float x) { return int(std::nearbyintf(x)); }
inline int __float2int_rd(float x) { return int(std::floor(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_rd(float a, float b) {  // rounded down
    double sum = double(a) + double(b);
    float x = float(sum);
    return double(x) > sum ? std::nextafterf(x, -INFINITY) : x;
}
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __double2float_rn(double x) { return float(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= unsigned(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
    return unsigned(((unsigned long long)hi << 32 | lo) << (s & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
    return unsigned(((unsigned long long)hi << 32 | lo) >> (s & 31));
}
template <typename T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
template <typename T>
inline T __ldg(const T* p) {
    return *p;
}
template <typename T>
inline T __ldcs(const T* p) {
    return *p;
}
template <typename T>
inline void __stcs(T* p, T v) {
    *p = v;
}

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

inline float half_to_float(unsigned short h) {
    unsigned sign = (h & 0x8000u) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return __uint_as_float(sign | 0x7f800000u | m << 13);
    if (!e) {
        float x = std::ldexp(float(m), -24);
        return sign ? -x : x;
    }
    return __uint_as_float(sign | (e + 112) << 23 | m << 13);
}
inline unsigned short float_to_half(float x) {
    _Float16 h = static_cast<_Float16>(x);
    unsigned short bits;
    memcpy(&bits, &h, 2);
    return bits;
}
