// A tensor as memory, for operations that treat all elements alike.
#pragma once

#include <cstddef>

#include "common/element.h"

namespace bmt {

struct Tensor {
    void* address;
    std::size_t numel;
    Element element;
    double weight;  // of its sum in powers_sum
};

}  // namespace bmt
