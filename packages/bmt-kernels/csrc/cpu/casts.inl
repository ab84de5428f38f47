// Casts of a range of one tensor, rounded to nearest, ties to even.
#pragma once

#include "common/casts.h"
#include "common/element.h"

namespace bmt::BMT_ISA {

template <class From, class To>
static void cast_of(const From* x, To* y, std::size_t count) {
    std::size_t i = 0;
    for (; i + Lanes::size <= count; i += Lanes::size) {
        Lanes::load(x + i).store(y + i);
    }
    for (; i < count; ++i) {
        Lane::load(x + i).store(y + i);
    }
}

template <class From>
static void cast_from(const Cast& cast, std::size_t begin, std::size_t end) {
    const From* x = static_cast<const From*>(cast.source) + begin;
    const std::size_t count = end - begin;
    switch (cast.to) {
        case Element::float32: return cast_of(x, static_cast<float*>(cast.target) + begin, count);
        case Element::float16: return cast_of(x, static_cast<Float16*>(cast.target) + begin, count);
        case Element::bfloat16: return cast_of(x, static_cast<BFloat16*>(cast.target) + begin, count);
        case Element::float64: return;  // refused by the module
    }
}

static void cast(const Cast& cast, std::size_t begin, std::size_t end) {
    switch (cast.from) {
        case Element::float32: return cast_from<float>(cast, begin, end);
        case Element::float16: return cast_from<Float16>(cast, begin, end);
        case Element::bfloat16: return cast_from<BFloat16>(cast, begin, end);
        case Element::float64: return;  // refused by the module
    }
}

}  // namespace bmt::BMT_ISA
