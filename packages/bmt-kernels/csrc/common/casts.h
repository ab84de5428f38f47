// One tensor that is to be written in the element type of another.
#pragma once

#include <cstddef>

#include "common/element.h"

namespace bmt {

struct Cast {
    const void* source;
    void* target;
    std::size_t numel;
    Element from;
    Element to;
};

}  // namespace bmt
