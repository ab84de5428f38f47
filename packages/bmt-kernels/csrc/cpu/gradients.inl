// What is done to all gradients of a step at once, for a range of one tensor.
#pragma once

#include "common/element.h"
#include "common/power.h"

namespace bmt::BMT_ISA {

// Sums of this many elements are formed in float32 before they are added up in double precision.
constexpr std::size_t sum_block = 1024;

// The exponent is all ones in infinities and NaN: adding one to it carries into the place of the sign.
template <class Bits>
static bool has_full_exponent(const Bits* x, std::size_t count, Bits exponent, Bits one) {
    constexpr Bits sign = static_cast<Bits>(Bits{1} << (sizeof(Bits) * 8 - 1));
    for (std::size_t start = 0; start < count; start += sum_block) {
        const std::size_t stop = start + sum_block < count ? start + sum_block : count;
        Bits carries = 0;
        for (std::size_t i = start; i < stop; ++i) {
            carries = static_cast<Bits>(carries | static_cast<Bits>((x[i] & exponent) + one));
        }
        if ((carries & sign) != 0) {
            return true;
        }
    }
    return false;
}

static bool has_non_finite(Element element, const void* address, std::size_t begin, std::size_t end) {
    const std::size_t count = end - begin;
    using U16 = std::uint16_t;
    switch (element) {
        case Element::float32:
            return has_full_exponent<std::uint32_t>(static_cast<const std::uint32_t*>(address) + begin, count,
                                                    0x7f800000u, 0x00800000u);
        case Element::float64:
            return has_full_exponent<std::uint64_t>(static_cast<const std::uint64_t*>(address) + begin, count,
                                                    0x7ff0000000000000u, 0x0010000000000000u);
        case Element::float16:
            return has_full_exponent<U16>(static_cast<const U16*>(address) + begin, count, U16{0x7c00}, U16{0x0400});
        case Element::bfloat16:
            return has_full_exponent<U16>(static_cast<const U16*>(address) + begin, count, U16{0x7f80}, U16{0x0080});
    }
    return false;
}

// Adds up (or takes the largest of) power(x) over some elements.
template <Power kind, class F>
static inline F with_power(F sum, F x) {
    if constexpr (kind == Power::sum) {
        return sum + abs(x);
    } else if constexpr (kind == Power::squares) {
        return fma(x, x, sum);
    } else {
        return max(sum, abs(x));
    }
}

template <Power kind>
static inline double combined(double sum, double part) {
    if constexpr (kind == Power::largest) {
        return part > sum || part != part ? part : sum;
    } else {
        return sum + part;
    }
}

template <Power kind, class T>
static double power_sum_of_lanes(const T* x, std::size_t count) {
    double total = 0;
    for (std::size_t start = 0; start < count; start += sum_block) {
        const std::size_t stop = start + sum_block < count ? start + sum_block : count;
        // Several sums at a time, because each addition waits for the one before it.
        Lanes sums[4] = {Lanes::all(0.0f), Lanes::all(0.0f), Lanes::all(0.0f), Lanes::all(0.0f)};
        std::size_t i = start;
        for (; i + 4 * Lanes::size <= stop; i += 4 * Lanes::size) {
            for (std::size_t k = 0; k < 4; ++k) {
                sums[k] = with_power<kind>(sums[k], Lanes::load(x + i + k * Lanes::size));
            }
        }
        Lane rest = Lane::all(0.0f);
        for (; i < stop; ++i) {
            rest = with_power<kind>(rest, Lane::load(x + i));
        }
        if constexpr (kind == Power::largest) {
            const Lanes largest = max(max(sums[0], sums[1]), max(sums[2], sums[3]));
            total = combined<kind>(combined<kind>(total, largest.max()), rest.v);
        } else {
            total += static_cast<double>(((sums[0] + sums[1]) + (sums[2] + sums[3])).sum()) + rest.v;
        }
    }
    return total;
}

template <class T>
static double power_sum_of(const T* x, std::size_t count, Power kind, double p) {
    switch (kind) {
        case Power::sum: return power_sum_of_lanes<Power::sum>(x, count);
        case Power::squares: return power_sum_of_lanes<Power::squares>(x, count);
        case Power::largest: return power_sum_of_lanes<Power::largest>(x, count);
        case Power::other: break;
    }
    double total = 0;
    for (std::size_t i = 0; i < count; ++i) {
        total += __builtin_pow(abs(Lane::load(x + i)).v, p);
    }
    return total;
}

static double power_sum_of(const double* x, std::size_t count, Power kind, double p) {
    double total = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const double magnitude = __builtin_fabs(x[i]);
        switch (kind) {
            case Power::sum: total += magnitude; break;
            case Power::squares: total += magnitude * magnitude; break;
            case Power::largest: total = combined<Power::largest>(total, magnitude); break;
            case Power::other: total += __builtin_pow(magnitude, p); break;
        }
    }
    return total;
}

static double power_sum(Element element, const void* address, std::size_t begin, std::size_t end, Power kind,
                        double p) {
    const std::size_t count = end - begin;
    switch (element) {
        case Element::float32: return power_sum_of(static_cast<const float*>(address) + begin, count, kind, p);
        case Element::float64: return power_sum_of(static_cast<const double*>(address) + begin, count, kind, p);
        case Element::float16: return power_sum_of(static_cast<const Float16*>(address) + begin, count, kind, p);
        case Element::bfloat16: return power_sum_of(static_cast<const BFloat16*>(address) + begin, count, kind, p);
    }
    return 0;
}

template <class T>
static void scale_of(T* x, std::size_t count, float factor) {
    std::size_t i = 0;
    const Lanes factors = Lanes::all(factor);
    for (; i + Lanes::size <= count; i += Lanes::size) {
        (Lanes::load(x + i) * factors).store(x + i);
    }
    for (; i < count; ++i) {
        (Lane::load(x + i) * Lane::all(factor)).store(x + i);
    }
}

static void scale_of(double* x, std::size_t count, float factor) {
    for (std::size_t i = 0; i < count; ++i) {
        x[i] *= static_cast<double>(factor);
    }
}

static void scale(Element element, void* address, std::size_t begin, std::size_t end, float factor) {
    const std::size_t count = end - begin;
    switch (element) {
        case Element::float32: return scale_of(static_cast<float*>(address) + begin, count, factor);
        case Element::float64: return scale_of(static_cast<double*>(address) + begin, count, factor);
        case Element::float16: return scale_of(static_cast<Float16*>(address) + begin, count, factor);
        case Element::bfloat16: return scale_of(static_cast<BFloat16*>(address) + begin, count, factor);
    }
}

}  // namespace bmt::BMT_ISA
