#pragma once

#include <vector>

namespace bmt {

// The architectures that the kernels were compiled for, 900 for sm_90.
std::vector<int> architectures();

}  // namespace bmt
