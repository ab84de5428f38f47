// Adam for a range of one parameter. The order of operations, and what is rounded once and what twice, is that of
// torch.optim.Adam on the CPU: lerp_, mul_, addcmul_, sqrt, div, add_, addcdiv_. Where the weight is not the parameter, there is
// one division less: these forms are not torch's to the bit anyway, without torch's square root, and divisions take long.
#pragma once

#include "common/adam.h"
#include "common/element.h"

namespace bmt::BMT_ISA {

constexpr std::size_t line_bytes = 64;

template <Form form>
struct ParamOf {
    using Type = BFloat16;
};
template <>
struct ParamOf<Form::plain> {
    using Type = float;
};
template <>
struct ParamOf<Form::master_float16> {
    using Type = Float16;
};

template <class F>
struct AdamConstants {
    explicit AdamConstants(const AdamSettings& s)
        : is_clipped(s.clip_at != nullptr),
          is_scaled(s.scale != 1.0f),
          is_near(s.mean_weight < 0.5f),
          hold(s.hold),
          decay_kind(s.decay_kind),
          clip(F::all(is_clipped ? *s.clip_at : 1.0f)),
          scale(F::all(s.scale)),
          mean_weight(F::all(is_near ? s.mean_weight : s.mean_weight - 1.0f)),
          beta2(F::all(s.beta2)),
          square_weight(F::all(s.square_weight)),
          root_correction(F::all(s.root_correction)),
          eps(F::all(s.eps)),
          step_size(F::all(s.step_size)),
          decay(F::all(s.decay)),
          whole_step_size(F::all(s.step_size * s.root_correction)),
          whole_eps(F::all(s.eps * s.root_correction)) {}

    bool is_clipped, is_scaled, is_near, hold;
    Decay decay_kind;
    F clip, scale, mean_weight, beta2, square_weight, root_correction, eps, step_size, decay;
    F whole_step_size, whole_eps;  // for numerator and denominator both multiplied by root_correction
};

template <Form form, class F>
static inline F load_weight(const AdamRow& row, std::size_t i) {
    using Param = typename ParamOf<form>::Type;
    if constexpr (form == Form::plain) {
        return F::load(static_cast<const float*>(row.param) + i);
    } else if constexpr (form == Form::remainder) {
        return F::load(static_cast<const Param*>(row.param) + i, static_cast<const std::uint16_t*>(row.master) + i);
    } else {
        return F::load(static_cast<const float*>(row.master) + i);
    }
}

template <Form form, class F>
static inline void store_weight(const AdamRow& row, std::size_t i, F weight) {
    using Param = typename ParamOf<form>::Type;
    Param* param = static_cast<Param*>(row.param) + i;
    if constexpr (form == Form::remainder) {
        weight.store(param, static_cast<std::uint16_t*>(row.master) + i);
    } else {
        if constexpr (form != Form::plain) {
            weight.store(static_cast<float*>(row.master) + i);
        }
        weight.store(param);
    }
}

template <class F>
struct Moments {
    F mean;
    F square;
};

// Moves the moments of the lanes that begin at element i, and returns them.
template <Form form, class Grad, class F>
static inline Moments<F> moments_at(const AdamRow& row, std::size_t i, const AdamConstants<F>& c) {
    F grad = F::load(static_cast<const Grad*>(row.grad) + i);
    F mean = F::load(row.exp_avg + i);
    F square = F::load(row.exp_avg_sq + i);
    if (c.is_clipped) {
        grad = grad * c.clip;
    }
    if (c.is_scaled) {
        grad = grad / c.scale;
    }
    if (c.decay_kind == Decay::coupled) {
        grad = fma(load_weight<form, F>(row, i), c.decay, grad);
    }
    // torch.lerp starts from the nearer end.
    mean = fma(c.mean_weight, grad - mean, c.is_near ? mean : grad);
    square = fma(c.square_weight * grad, grad, square * c.beta2);
    mean.store(row.exp_avg + i);
    square.store(row.exp_avg_sq + i);
    return {mean, square};
}

// Moves the weights, given the square root of the second moment.
template <Form form, class F>
static inline void weights_at(const AdamRow& row, std::size_t i, F mean, F root, const AdamConstants<F>& c) {
    F weight = load_weight<form, F>(row, i);
    if (c.decay_kind == Decay::decoupled) {
        weight = weight * c.decay;
    }
    if constexpr (form == Form::plain) {
        weight = weight + c.step_size * mean / (root / c.root_correction + c.eps);
    } else {
        weight = weight + c.whole_step_size * mean / (root + c.whole_eps);
    }
    store_weight<form, F>(row, i, weight);
}

// Calls step(i, constants) for all elements: as many lanes at a time as there are, and one at a time for the rest.
template <class Step>
static inline void for_lanes(std::size_t begin, std::size_t end, const AdamSettings& settings, const Step& step) {
    std::size_t i = begin;
    const AdamConstants<Lanes> constants(settings);
    for (; i + Lanes::size <= end; i += Lanes::size) {
        step(i, constants);
    }
    const AdamConstants<Lane> rest(settings);
    for (; i < end; ++i) {
        step(i, rest);
    }
}

template <Form form, class Grad>
static void adam_range(const AdamRow& row, std::size_t begin, std::size_t end, const AdamSettings& settings) {
    for_lanes(begin, end, settings, [&](std::size_t i, const auto& constants) {
        const auto moments = moments_at<form, Grad>(row, i, constants);
        if (!constants.hold) {
            weights_at<form>(row, i, moments.mean, sqrt(moments.square), constants);
        }
    });
}

// [Note: parameters past the cache]
// A parameter with a float32 master is written and not read. Its memory would be read all the same, to be put in the cache, and a
// step that is as fast as memory would move 30 bytes per parameter instead of 28. So it is written past the cache, in whole
// lines, if it is large enough for nobody to find it there later.
static inline bool goes_past_the_cache(const AdamRow& row) {
    constexpr std::size_t large = 1 << 20;
    return row.numel >= large && reinterpret_cast<std::uintptr_t>(row.param) % line_bytes == 0;
}

// The same; `begin` must be a multiple of the elements in a line.
template <Form form, class Grad>
static void adam_range_past_the_cache(const AdamRow& row, std::size_t begin, std::size_t end,
                                      const AdamSettings& settings) {
    using Param = typename ParamOf<form>::Type;
    constexpr std::size_t line = line_bytes / sizeof(Param);
    constexpr std::size_t block = 16 * line;
    alignas(line_bytes) Param rounded[block];
    const std::size_t last = end - (end - begin) % line;
    for (std::size_t start = begin; start < last; start += block) {
        const std::size_t count = last - start < block ? last - start : block;
        const AdamRow part{rounded,
                           static_cast<const Grad*>(row.grad) + start,
                           row.exp_avg + start,
                           row.exp_avg_sq + start,
                           static_cast<float*>(row.master) + start,
                           count};
        adam_range<form, Grad>(part, 0, count, settings);
        for (std::size_t i = 0; i < count; i += line) {
            Lanes::stream_line(rounded + i, static_cast<Param*>(row.param) + start + i);
        }
    }
    Lanes::finish_streams();
    adam_range<form, Grad>(row, last, end, settings);
}

// The same in two passes over a few elements at a time, with a square root of others: see [Note: torch's square root].
template <class Grad>
static void adam_range_with_root(const AdamRow& row, std::size_t begin, std::size_t end, const AdamSettings& settings,
                                 SquareRoot* square_root) {
    constexpr std::size_t block = 512;
    float roots[block];
    for (std::size_t start = begin; start < end; start += block) {
        const std::size_t stop = start + block < end ? start + block : end;
        for_lanes(start, stop, settings,
                  [&](std::size_t i, const auto& constants) { moments_at<Form::plain, Grad>(row, i, constants); });
        if (settings.hold) {
            continue;
        }
        square_root(row.exp_avg_sq + start, roots, stop - start);
        for_lanes(start, stop, settings, [&]<class F>(std::size_t i, const AdamConstants<F>& constants) {
            weights_at<Form::plain>(row, i, F::load(row.exp_avg + i), F::load(roots + (i - start)), constants);
        });
    }
}

template <Form form, class Grad>
static void adam_of(const AdamRow& row, std::size_t begin, std::size_t end, const AdamSettings& s, SquareRoot* root) {
    if constexpr (form == Form::plain) {
        if (root != nullptr) {
            return adam_range_with_root<Grad>(row, begin, end, s, root);
        }
    }
    if constexpr (Lanes::can_stream && (form == Form::master_float16 || form == Form::master_bfloat16)) {
        if (goes_past_the_cache(row) && !s.hold) {
            return adam_range_past_the_cache<form, Grad>(row, begin, end, s);
        }
    }
    adam_range<form, Grad>(row, begin, end, s);
}

template <Form form>
static void adam_in_form(Element grad, const AdamRow& row, std::size_t begin, std::size_t end, const AdamSettings& s,
                         SquareRoot* root) {
    switch (grad) {
        case Element::float32: return adam_of<form, float>(row, begin, end, s, root);
        case Element::float16: return adam_of<form, Float16>(row, begin, end, s, root);
        case Element::bfloat16: return adam_of<form, BFloat16>(row, begin, end, s, root);
        case Element::float64: return;  // refused by the module
    }
}

static void adam(Form form, Element grad, const AdamRow& row, std::size_t begin, std::size_t end, const AdamSettings& s,
                 SquareRoot* root) {
    switch (form) {
        case Form::plain: return adam_in_form<Form::plain>(grad, row, begin, end, s, root);
        case Form::master_float16: return adam_in_form<Form::master_float16>(grad, row, begin, end, s, root);
        case Form::master_bfloat16: return adam_in_form<Form::master_bfloat16>(grad, row, begin, end, s, root);
        case Form::remainder: return adam_in_form<Form::remainder>(grad, row, begin, end, s, root);
    }
}

}  // namespace bmt::BMT_ISA
