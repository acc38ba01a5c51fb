// Which kernels this machine can run, and which are in use.
#include <cstring>

#include "kernels.h"

namespace gradwire {
namespace {

const Kernels* const kAll[] = {
    &portable_kernels,
#ifdef GRADWIRE_X86
    &avx2_kernels,
    &avx512_kernels,
#endif
#ifdef GRADWIRE_NEON
    &neon_kernels,
#endif
};

bool supported(const Kernels* k) {
#ifdef GRADWIRE_X86
    __builtin_cpu_init();
    if (k == &avx2_kernels)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (k == &avx512_kernels)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("popcnt");
#endif
#ifdef GRADWIRE_NEON
    if (k == &neon_kernels) return true;
#endif
    return k == &portable_kernels;
}

const Kernels* best() {
    const Kernels* found = &portable_kernels;
    for (const Kernels* k : kAll)
        if (supported(k)) found = k;
    return found;
}

const Kernels* in_use = best();

}  // namespace

const Kernels& kernels() { return *in_use; }

bool use_kernels(const char* name) {
    for (const Kernels* k : kAll)
        if (!std::strcmp(k->name, name) && supported(k)) {
            in_use = k;
            return true;
        }
    return false;
}

const char* const* available_kernels() {
    static const char* names[4] = {};
    int n = 0;
    for (const Kernels* k : kAll)
        if (supported(k)) names[n++] = k->name;
    names[n] = nullptr;
    return names;
}

}  // namespace gradwire
