// One lane: the tail of every vector loop, and the whole of it on processors without a vector path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/element.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

// [Note: one namespace per instruction set]
// The kernels are compiled once per instruction set, in a namespace of its own. Nothing here may be an inline function of
// another namespace (of the standard library, say) that is not certain to be inlined: the linker keeps one copy of such a
// function, and a processor without AVX-512 might be given the copy that uses it.
namespace bmt::BMT_ISA {

template <class To, class From>
static inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Round to nearest, ties to even; NaN stays NaN, and quiet.
static inline std::uint16_t bfloat16_bits(float x) {
    const auto bits = bits_as<std::uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    }
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#if defined(__F16C__)
static inline float from_float16(std::uint16_t bits) { return _cvtsh_ss(bits); }
static inline std::uint16_t float16_bits(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
static inline float from_float16(std::uint16_t bits) {
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
    if (magnitude >= 0x7c00u << 13) {
        return bits_as<float>(sign | 0x7f800000u | (magnitude & 0x007fffffu));
    }
    // The exponent biases differ by 112; the product is exact, also for what is denormal in float16.
    return bits_as<float>(sign | bits_as<std::uint32_t>(bits_as<float>(magnitude) * 0x1p112f));
}

static inline std::uint16_t float16_bits(float x) {
    const auto bits = bits_as<std::uint32_t>(x);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<std::uint16_t>(sign | 0x7e00u);
    }
    if (magnitude >= 0x477ff000u) {  // 65520: halfway from the largest finite value to the next, and beyond
        return static_cast<std::uint16_t>(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) {  // denormal: beside 0.5, the last bit of float32 is the last bit of float16
        return static_cast<std::uint16_t>(sign |
                                          (bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u));
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}
#endif

// See [Note: weight forms].
static inline float joined(std::uint16_t param, std::uint16_t remainder) {
    const std::uint32_t upper = static_cast<std::uint32_t>(param) << 16;
    const std::uint32_t bits = upper - (static_cast<std::uint32_t>(remainder & 0x8000u) << 1) + remainder;
    return bits_as<float>((bits & 0x7fffffffu) > 0x7f800000u ? upper : bits);
}

static inline void split(float weight, std::uint16_t* param, std::uint16_t* remainder) {
    auto bits = bits_as<std::uint32_t>(weight);
    bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
    *param = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    *remainder = static_cast<std::uint16_t>(bits);
}

struct Lane {
    static constexpr std::size_t size = 1;
    float v;

    static Lane all(float x) { return {x}; }
    static Lane load(const float* p) { return {*p}; }
    static Lane load(const Float16* p) { return {from_float16(p->bits)}; }
    static Lane load(const BFloat16* p) { return {bits_as<float>(static_cast<std::uint32_t>(p->bits) << 16)}; }
    static Lane load(const BFloat16* param, const std::uint16_t* remainder) {
        return {joined(param->bits, *remainder)};
    }
    void store(float* p) const { *p = v; }
    void store(Float16* p) const { p->bits = float16_bits(v); }
    void store(BFloat16* p) const { p->bits = bfloat16_bits(v); }
    void store(BFloat16* param, std::uint16_t* remainder) const { split(v, &param->bits, remainder); }

    // Whether there are stores past the cache: see [Note: parameters past the cache].
    static constexpr bool can_stream = false;
    static void stream_line(const void*, void*) {}
    static void finish_streams() {}

    float sum() const { return v; }
    float max() const { return v; }
};

static inline Lane operator+(Lane a, Lane b) { return {a.v + b.v}; }
static inline Lane operator-(Lane a, Lane b) { return {a.v - b.v}; }
static inline Lane operator*(Lane a, Lane b) { return {a.v * b.v}; }
static inline Lane operator/(Lane a, Lane b) { return {a.v / b.v}; }
static inline Lane sqrt(Lane a) { return {__builtin_sqrtf(a.v)}; }
static inline Lane abs(Lane a) { return {__builtin_fabsf(a.v)}; }
// NaN if either is.
static inline Lane max(Lane a, Lane b) { return {a.v > b.v || a.v != a.v ? a.v : b.v}; }
static inline Lane clamp(Lane a, float low, float high) { return {a.v < low ? low : a.v > high ? high : a.v}; }
static inline Lane round(Lane a) { return {__builtin_nearbyintf(a.v)}; }

// a * b + c, rounded once where the processor has an instruction for it: torch's own kernels do the same.
static inline Lane fma(Lane a, Lane b, Lane c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__aarch64__)
    return {__builtin_fmaf(a.v, b.v, c.v)};
#else
    return {a.v * b.v + c.v};
#endif
}

// a * 2**n for whole n from -252 to 252, in two factors that are powers of two themselves.
static inline Lane times_power_of_two(Lane a, Lane n) {
    const auto whole = static_cast<std::int32_t>(n.v);
    const std::int32_t half = whole >> 1;
    const auto first = bits_as<float>(static_cast<std::uint32_t>(half + 127) << 23);
    const auto second = bits_as<float>(static_cast<std::uint32_t>(whole - half + 127) << 23);
    return {a.v * first * second};
}

}  // namespace bmt::BMT_ISA
