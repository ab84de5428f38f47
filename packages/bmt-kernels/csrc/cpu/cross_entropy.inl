// Cross entropy of one row of logits, read from memory once in each pass and never held in float32 as a whole.
#pragma once

#include "common/cross_entropy.h"
#include "cpu/exp.inl"

namespace bmt::BMT_ISA {

// Classes that are gone over twice, for their maximum and for the sum, while they are in the innermost cache; and that are
// summed in float32, before all else is in double precision.
constexpr std::int64_t class_block = 512;

// The largest element; NaN if there is one.
template <class T>
static float largest_of(const T* x, std::int64_t count) {
    const auto size = static_cast<std::int64_t>(Lanes::size);
    Lanes one = Lanes::all(-__builtin_inff()), other = one;
    std::int64_t c = 0;
    for (; c + 2 * size <= count; c += 2 * size) {
        one = max(one, Lanes::load(x + c));
        other = max(other, Lanes::load(x + c + size));
    }
    Lane largest{max(one, other).max()};
    for (; c < count; ++c) {
        largest = max(largest, Lane::load(x + c));
    }
    return largest.v;
}

struct Sums {
    float exponentials;  // sum of exp(x - shift)
    float differences;   // sum of weight * (x - shift)
    float weights;
};

template <bool with_sum, class F, class T>
static inline void add_class(F (&sums)[3], const T* x, const float* weight, float shift, std::int64_t c) {
    const F difference = F::load(x + c) - F::all(shift);
    sums[0] = sums[0] + exp(difference);
    if constexpr (with_sum) {
        const F factor = weight == nullptr ? F::all(1.0f) : F::load(weight + c);
        sums[1] = sums[1] + factor * difference;
        sums[2] = sums[2] + factor;
    }
}

template <bool with_sum, class T>
static Sums sums_of(const T* x, const float* weight, float shift, std::int64_t count) {
    const auto size = static_cast<std::int64_t>(Lanes::size);
    Lanes sums[3] = {Lanes::all(0.0f), Lanes::all(0.0f), Lanes::all(0.0f)};
    Lane rest[3] = {{0.0f}, {0.0f}, {0.0f}};
    std::int64_t c = 0;
    for (; c + size <= count; c += size) {
        add_class<with_sum>(sums, x, weight, shift, c);
    }
    for (; c < count; ++c) {
        add_class<with_sum>(rest, x, weight, shift, c);
    }
    return {sums[0].sum() + rest[0].v, sums[1].sum() + rest[1].v, sums[2].sum() + rest[2].v};
}

template <bool with_sum, class T>
static void forward_row(const T* x, std::int64_t classes, std::int64_t column, const float* weight,
                        const ForwardResult& result, std::int64_t row) {
    float row_max = -__builtin_inff();
    // What exponents are relative to: the maximum so far, but 0 while that is -inf, because -inf minus -inf is NaN.
    float shift = 0.0f;
    double sum = 0, differences = 0, weights = 0;
    for (std::int64_t start = 0; start < classes; start += class_block) {
        const std::int64_t count = classes - start < class_block ? classes - start : class_block;
        row_max = max(Lane{row_max}, Lane{largest_of(x + start, count)}).v;
        const float before = shift;
        shift = row_max == -__builtin_inff() ? 0.0f : row_max;
        if (start != 0 && shift != before) {
            // A sum of nothing but exp(-inf) is 0, and stays so although exp(before - shift) may be infinite.
            sum = sum == 0.0 ? 0.0 : sum * exp(Lane{before - shift}).v;
            differences += weights * (before - shift);
        }
        const Sums part = sums_of<with_sum>(x + start, weight == nullptr ? nullptr : weight + start, shift, count);
        sum += part.exponentials;
        differences += part.differences;
        weights += part.weights;
    }
    const double log_sum = __builtin_log(sum);
    result.row_max[row] = row_max;
    result.log_sum[row] = static_cast<float>(log_sum);
    const float at_target = column < classes ? Lane::load(x + column).v - row_max : 0.0f;
    result.target_log_prob[row] = column < classes ? static_cast<float>(at_target - log_sum) : 0.0f;
    if constexpr (with_sum) {
        // Where everything is -inf the maximum is, too, and log p is undefined.
        const double undefined = row_max == -__builtin_inff() ? __builtin_nan("") : 0.0;
        result.log_prob_sum[row] = static_cast<float>(differences - weights * log_sum + undefined);
    }
}

template <class T>
static void forward_rows(const Logits& logits, const Targets& targets, const float* weight, const ForwardResult& result,
                         std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(logits.address) + row * logits.stride;
        const std::int64_t column = column_of(targets.address[row], targets.first_class, logits.classes);
        if (result.log_prob_sum == nullptr) {
            forward_row<false>(x, logits.classes, column, weight, result, row);
        } else {
            forward_row<true>(x, logits.classes, column, weight, result, row);
        }
    }
}

static void cross_entropy_forward(const Logits& logits, const Targets& targets, const float* weight,
                                  const ForwardResult& result, std::int64_t begin, std::int64_t end) {
    switch (logits.element) {
        case Element::float32: return forward_rows<float>(logits, targets, weight, result, begin, end);
        case Element::float16: return forward_rows<Float16>(logits, targets, weight, result, begin, end);
        case Element::bfloat16: return forward_rows<BFloat16>(logits, targets, weight, result, begin, end);
        case Element::float64: return;  // refused by the module
    }
}

template <class F>
struct RowFactors {
    F row_max, log_sum, total, spread;
};

template <class F, class T>
static inline F gradient_at(const T* x, std::int64_t c, const float* weight, bool has_spread, const RowFactors<F>& f) {
    const F gradient = f.total * exp((F::load(x + c) - f.row_max) - f.log_sum);
    if (!has_spread) {
        return gradient;
    }
    return gradient - (weight == nullptr ? f.spread : f.spread * F::load(weight + c));
}

template <class F>
static inline RowFactors<F> factors_of(const BackwardFactors& factors, std::int64_t row) {
    const float spread = factors.spread == nullptr ? 0.0f : factors.spread[row];
    return {F::all(factors.row_max[row]), F::all(factors.log_sum[row]), F::all(factors.total[row]), F::all(spread)};
}

template <class T>
static void backward_rows(const Logits& logits, const Targets& targets, const BackwardFactors& factors,
                          const float* weight, const Gradient& gradient, std::int64_t begin, std::int64_t end) {
    const std::int64_t classes = logits.classes;
    const auto size = static_cast<std::int64_t>(Lanes::size);
    const bool has_spread = factors.spread != nullptr;
    for (std::int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(logits.address) + row * logits.stride;
        T* out = static_cast<T*>(gradient.address) + row * gradient.stride;
        const RowFactors<Lanes> lanes = factors_of<Lanes>(factors, row);
        const RowFactors<Lane> lane = factors_of<Lane>(factors, row);
        // Before the row is overwritten, if the gradient takes its place.
        const std::int64_t column = column_of(targets.address[row], targets.first_class, classes);
        Lane at_target = Lane::all(0.0f);
        if (column < classes) {
            at_target = gradient_at(x, column, weight, has_spread, lane) - Lane::all(factors.hit[row]);
        }
        std::int64_t c = 0;
        for (; c + size <= classes; c += size) {
            gradient_at(x, c, weight, has_spread, lanes).store(out + c);
        }
        for (; c < classes; ++c) {
            gradient_at(x, c, weight, has_spread, lane).store(out + c);
        }
        if (column < classes) {
            at_target.store(out + column);
        }
    }
}

static void cross_entropy_backward(const Logits& logits, const Targets& targets, const BackwardFactors& factors,
                                   const float* weight, const Gradient& gradient, std::int64_t begin,
                                   std::int64_t end) {
    switch (logits.element) {
        case Element::float32: return backward_rows<float>(logits, targets, factors, weight, gradient, begin, end);
        case Element::float16: return backward_rows<Float16>(logits, targets, factors, weight, gradient, begin, end);
        case Element::bfloat16: return backward_rows<BFloat16>(logits, targets, factors, weight, gradient, begin, end);
        case Element::float64: return;  // refused by the module
    }
}

}  // namespace bmt::BMT_ISA
