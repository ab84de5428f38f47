#include "cpu/processor.h"

#include <atomic>
#include <stdexcept>

namespace bmt {
namespace {

std::vector<const Kernels*> usable() {
    std::vector<const Kernels*> found = {&portable_kernels};
#if defined(BMT_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        found.push_back(&avx2_kernels);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            found.push_back(&avx512_kernels);
        }
    }
#endif
    return found;
}

std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> kernels = usable().back();
    return kernels;
}

}  // namespace

std::vector<std::string> usable_instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable()) {
        names.emplace_back(kernels->name);
    }
    return names;
}

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

void use_instruction_set(const std::string& name) {
    for (const Kernels* kernels : usable()) {
        if (name == kernels->name) {
            chosen().store(kernels);
            return;
        }
    }
    throw std::invalid_argument("No usable instruction set is named '" + name + "'.");
}

}  // namespace bmt
