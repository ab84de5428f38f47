// What is summed over the elements of a tensor for a norm.
#pragma once

namespace bmt {

enum class Power : int {
    sum = 0,      // |x|
    squares = 1,  // x * x
    largest = 2,  // the largest |x| instead of a sum
    other = 3,    // |x| to a power given beside
};

}  // namespace bmt
