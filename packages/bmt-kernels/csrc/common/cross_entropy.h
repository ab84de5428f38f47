// Rows of logits, and what the two passes of cross entropy read and write for each of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/element.h"

#if defined(__CUDACC__)
#define BMT_HOST_DEVICE __host__ __device__
#else
#define BMT_HOST_DEVICE
#endif

namespace bmt {

// A matrix whose rows are contiguous; `stride` is the distance of rows in elements.
struct Logits {
    const void* address;
    Element element;
    std::int64_t rows;
    std::int64_t classes;
    std::int64_t stride;
};

struct Targets {
    const std::int64_t* address;
    std::int64_t first_class;
};

// Classes of targets may be any numbers: no difference of them may overflow, and none may become an address unless it is one of
// the classes given. Returns `classes` for a class that is elsewhere.
BMT_HOST_DEVICE static inline std::int64_t column_of(std::int64_t target, std::int64_t first_class,
                                                     std::int64_t classes) {
    const std::uint64_t column = static_cast<std::uint64_t>(target) - static_cast<std::uint64_t>(first_class);
    return column < static_cast<std::uint64_t>(classes) ? static_cast<std::int64_t>(column) : classes;
}

struct ForwardResult {
    float* row_max;
    float* log_sum;
    float* target_log_prob;
    float* log_prob_sum;  // null if not wanted
};

struct BackwardFactors {
    const float* row_max;
    const float* log_sum;
    const float* total;
    const float* hit;
    const float* spread;  // null if 0
};

// Where the gradient goes; it may be the logits themselves.
struct Gradient {
    void* address;
    std::int64_t stride;
};

}  // namespace bmt
