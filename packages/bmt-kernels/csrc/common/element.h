// The element types that kernels read and write, and how a weight is stored for Adam.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bmt {

// Only the bits: what they mean is up to the lanes (CPU) and packs (CUDA) that load them.
struct Float16 {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};

// The numbers are those of bmt_kernels/elements.py.
enum class Element : int { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3 };

inline std::size_t size_of(Element element) {
    return element == Element::float64 ? 8 : element == Element::float32 ? 4 : 2;
}

// [Note: weight forms]
// plain:     the parameter is the float32 weight.
// master:    a half parameter is the rounded copy of a float32 master.
// remainder: a bfloat16 parameter and 16 more bits are one float32 weight, exactly; [Note: compact master] in
//            bmt_core/ops/remainder.py has the rule and its reasons. With `bits` those of the weight,
//            parameter = (bits + 0x8000) >> 16 (the weight rounded to nearest, ties away from zero) and remainder = the low
//            half of bits, which as a signed number is what the weight's bits are beyond the parameter's. Written, every NaN is
//            one quiet NaN with remainder 0. Read, what would be NaN means the parameter alone.
enum class Form : int { plain = 0, master_float16 = 1, master_bfloat16 = 2, remainder = 3 };

}  // namespace bmt
