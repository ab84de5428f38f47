// Everything that is compiled once per instruction set: see [Note: one namespace per instruction set].
#pragma once

#include "cpu/adam.inl"
#include "cpu/casts.inl"
#include "cpu/cross_entropy.inl"
#include "cpu/gradients.inl"

namespace bmt::BMT_ISA {

static constexpr Kernels all(const char* name) {
    return {name, adam, cast, has_non_finite, power_sum, scale, cross_entropy_forward, cross_entropy_backward};
}

}  // namespace bmt::BMT_ISA
