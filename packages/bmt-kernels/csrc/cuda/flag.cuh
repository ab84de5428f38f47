#pragma once

#include <cstdint>

#include "common/adam.h"

namespace bmt {

// NaN counts as set, as it does in torch's conversion to bool.
__device__ inline bool is_set(const Flag& flag) {
    if (flag.address == nullptr) {
        return false;
    }
    return flag.is_float ? *static_cast<const float*>(flag.address) != 0.0f
                         : *static_cast<const std::uint8_t*>(flag.address) != 0;
}

}  // namespace bmt
