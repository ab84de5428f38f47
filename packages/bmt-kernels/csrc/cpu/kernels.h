// The kernels of one instruction set, each for a part of the work, on one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/adam.h"
#include "common/casts.h"
#include "common/cross_entropy.h"
#include "common/element.h"
#include "common/power.h"

namespace bmt {

// y[i] = square root of x[i] for i below count.
using SquareRoot = void(const float* x, float* y, std::size_t count);

struct Kernels {
    const char* name;
    // Elements begin to end of one parameter. `root` serves the plain form; null: the processor's own square root.
    void (*adam)(Form, Element grad, const AdamRow&, std::size_t begin, std::size_t end, const AdamSettings&,
                 SquareRoot* root);
    // Elements begin to end of one tensor.
    void (*cast)(const Cast&, std::size_t begin, std::size_t end);
    bool (*has_non_finite)(Element, const void*, std::size_t begin, std::size_t end);
    double (*power_sum)(Element, const void*, std::size_t begin, std::size_t end, Power, double p);
    void (*scale)(Element, void*, std::size_t begin, std::size_t end, float factor);
    // Rows begin to end; `weight` is null or has one number per class.
    void (*cross_entropy_forward)(const Logits&, const Targets&, const float* weight, const ForwardResult&,
                                  std::int64_t begin, std::int64_t end);
    void (*cross_entropy_backward)(const Logits&, const Targets&, const BackwardFactors&, const float* weight,
                                   const Gradient&, std::int64_t begin, std::int64_t end);
};

extern const Kernels portable_kernels;
#if defined(BMT_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace bmt
