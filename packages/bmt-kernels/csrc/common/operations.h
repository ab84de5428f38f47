// The operations, as each module implements them for its device. Bindings have checked what Python passed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/adam.h"
#include "common/casts.h"
#include "common/cross_entropy.h"
#include "common/element.h"
#include "common/power.h"
#include "common/tensor.h"

namespace bmt {

// Threads of the CPU, or a stream of a GPU: cpu/where.h and cuda/where.h.
class Where;

void adam_step(Form form, Element grad, const std::vector<AdamRow>& rows, const AdamSettings& settings,
               const Where& where);

void cast(const std::vector<Cast>& casts, const Where& where);

// Sets *flag to 1 or leaves it.
void has_non_finite(const std::vector<Tensor>& tensors, std::uint8_t* flag, const Where& where);

// Number of float64 that powers_sum needs to work in.
extern const std::size_t powers_sum_workspace;

// The result is the same in every bit each time.
void powers_sum(const std::vector<Tensor>& tensors, Power kind, double p, float* result, double* workspace,
                const Where& where);

void scale(const std::vector<Tensor>& tensors, const float* factor, const Where& where);

void zero_if(const std::vector<Tensor>& tensors, const Flag& flag, const Where& where);

void cross_entropy_forward(const Logits& logits, const Targets& targets, const float* weight,
                           const ForwardResult& result, const Where& where);

void cross_entropy_backward(const Logits& logits, const Targets& targets, const BackwardFactors& factors,
                            const float* weight, const Gradient& gradient, const Where& where);

}  // namespace bmt
